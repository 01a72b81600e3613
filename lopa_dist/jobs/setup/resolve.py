"""Replaces each ``auto`` in the options that users write by a value, and says from what the value follows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from lopa_dist.checks import check_read
from lopa_dist.config import Config, ModelOptions
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.context import CONTEXTS
from lopa_dist.engine.config import EngineConfig
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.families import FAMILIES, TrainingPattern, check_drafts, training_pattern

if TYPE_CHECKING:  # sweeps are checked without torch, which takes seconds to import
    import torch

Resolved = dict[str, tuple[Any, str]]
"""By the key of an option that is ``auto``: what it stands for, and what that follows from, in words."""


def resolve(config: Config, shape: ModelConfig, device: torch.device, typed: Collection[str] | None = None) -> Config:
    """Return the configuration with every ``auto`` of decode.* and engine.* replaced.

    Args:
        config: as given.
        shape: the model's configuration.
        device: the device that computes.
        typed: keys that the user typed (`check_read`).
    """
    values = by_model(config, shape, device, typed)
    decode = DecodeConfig(**vars(config.decode) | values_of(values, "decode"))
    check_read("engine", config.engine, config.engine, decode, typed)
    return replace(config, decode=decode, engine=replace(config.engine, **values_of(values, "engine")))


def values_of(values: Resolved, section: str) -> dict[str, Any]:
    """Return the values of a section's options, by their names in it."""
    keys = [key.split(".") for key in values]
    return {name: values[f"{section}.{name}"][0] for where, name in keys if where == section}


def resolve_decode(
    decode: DecodeConfig, pattern: TrainingPattern, typed: Collection[str] | None = None
) -> DecodeConfig:
    """Return the options with every ``auto`` replaced by the value of `pattern`, or of the context that was chosen.

    Raises:
        ValueError: the context is for causal models and the model is of another kind, or the other way round; an option
            is not read there; or editing is asked for, but the model was not trained for it, the context is not
            `blocks`, or several blocks may be active.
    """
    values = {f.name: getattr(decode, f.name) for f in fields(DecodeConfig)}
    context = pattern.context if values["context"] == "auto" else values["context"]
    scope = CONTEXTS[context]
    if scope.causal != pattern.scope.causal:
        kind = "causal" if pattern.scope.causal else "not causal"
        raise ValueError(f"decode.context={context}: the model is {kind}; set it to auto")
    trained = vars(pattern) | {"context": context, "max_active_blocks": scope.max_active_blocks}
    if not scope.from_prompt:
        trained["sub_block_size"] = None
    resolved = DecodeConfig(**{key: trained[key] if v == "auto" and key in trained else v for key, v in values.items()})
    check_read("decode", decode, resolved, typed=typed)
    check_decided(resolved, typed or ())
    if resolved.tau_edit is not None:
        if not pattern.edits:
            raise ValueError(
                f"decode.tau_edit={resolved.tau_edit}: only LLaDA2.1 was trained to predict filled tokens; set it to "
                "null"
            )
        if not scope.from_prompt or resolved.max_active_blocks != 1:
            raise ValueError(
                f"decode.tau_edit={resolved.tau_edit} needs decode.context=blocks and decode.max_active_blocks=1: what "
                "may still be edited must not be cached, nor be read by later blocks; leave them at auto"
            )
    return resolved


def check_decided(decode: DecodeConfig, typed: Collection[str]) -> None:
    """Raise a ValueError for a typed setting that has no effect because another one decides."""
    deciding = {
        "tau_conf": [
            f"decode.{key}={value}" for key in ("fill", "tau_entropy") if (value := getattr(decode, key)) is not None
        ],
        **dict.fromkeys(("tau_add", "tau_act"), ["decode.max_active_blocks=1"] * (decode.max_active_blocks == 1)),
    }
    for name, others in deciding.items():
        if others and f"decode.{name}" in typed:
            raise ValueError(f"decode.{name}={getattr(decode, name)}: has no effect: {others[0]} decides; leave it out")


def by_device(config: Config, device: torch.device) -> Resolved:
    """Return the options that follow from the device alone."""
    values: Resolved = {}
    if config.model.device == "auto":
        values["model.device"] = device.type, "what this machine has"
    if config.model.dtype == "auto":
        values["model.dtype"] = choose_dtype(config.model, device), f"the device, {device.type}"
    return values


def choose_dtype(options: ModelOptions, device: torch.device) -> str:
    """Return the name of the weights' precision: `model.dtype`, or what suits the device."""
    if options.dtype != "auto":
        return options.dtype
    return "bf16" if device.type == "cuda" else "fp32"


def by_model(
    config: Config, shape: ModelConfig, device: torch.device, typed: Collection[str] | None = None
) -> Resolved:
    """Return the options that follow from the model with configuration `shape`: its training, and its heads' size."""
    values: Resolved = {}
    pattern, reason = config.model.pattern, f"model.pattern={config.model.pattern}"
    if pattern == "auto":
        pattern = FAMILIES[shape.family].pattern
        reason = f"the pattern of its family {shape.family}, {pattern}"
        values["model.pattern"] = pattern, f"the model's family, {shape.family}"
    if config.job.learn is not None and not FAMILIES[shape.family].causal:
        raise ValueError(
            f"job.learn={config.job.learn}: {shape.family} models are not causal: what they draft changes their texts, "
            "so nothing is learned; leave it out"
        )
    check_drafts(shape, config.decode.drafts, config.decode.branches, config.decode.draft_from)
    decode = resolve_decode(config.decode, training_pattern(shape, pattern), typed)
    for entry in fields(DecodeConfig):
        # drafts and their sources are chosen anew in every step
        if getattr(config.decode, entry.name) == "auto" and entry.name not in ("drafts", "draft_from"):
            values[f"decode.{entry.name}"] = getattr(decode, entry.name), reason
    if config.engine.attention == "plain" and decode.causal:
        raise ValueError(
            "engine.attention=plain: with a causal model its bits depend on the number of drafts, and so texts might; "
            "leave it at auto"
        )
    if config.engine.attention == "auto":
        from lopa_dist.kernels.attention import suited  # torch comes with it

        reason = f"the device, {device.type}, and the size of the model's heads"
        values["engine.attention"] = suited(device, shape.head_dim, config.engine.kernels), reason
    return values


def sequences_of_replica(engine: EngineConfig, requests: int, replicas: int) -> int:
    """Return how many sequences a data replica decodes at once: no more than its share of the requests."""
    return max(1, min(engine.max_sequences, -(-requests // replicas)))
