"""What ``auto`` stands for: from options as users write them to those of a job, and what each value follows."""

from __future__ import annotations

import json
import logging
from dataclasses import fields, replace
from typing import Any

import torch

from lopa_dist.config import AUTO_BRANCHES, Config
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.profile import usual_window
from lopa_dist.jobs.device import choose_dtype
from lopa_dist.jobs.profiles import profile_of
from lopa_dist.kernels.attention import suited
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.families import FAMILIES, TrainingPattern, check_drafts, training_pattern
from lopa_dist.parallel.group import Group
from lopa_dist.parallel.mesh import Mesh

log = logging.getLogger("lopa_dist")
PROFILE = "the profile of this machine"
BY_PROFILE = ("branches", "one_block_from")  # what of decode.* may follow it
Found = dict[str, tuple[Any, str]]
"""By the key of an option that is ``auto``: what it stands for, and what that follows, in words."""


def resolve(config: Config, shape: ModelConfig, device: torch.device, group: Group, requests: int) -> Config:
    """Return the configuration with every ``auto`` of decode.* and engine.* replaced; the same on all ranks.

    `requests` are the job's, at least where they are too few for `engine.max_sequences` on every replica; those that
    an earlier attempt finished count, so that the job goes on as it began.

    Raises:
        ValueError: branches or rows are to be chosen by a profile, and there is none.
    """
    found = by_model(config, shape, device) | by_ranks(config, group.mesh)
    profile = by_profile(config, shape, device, group.mesh, requests) if group.world.rank == 0 else {}
    found |= json.loads(group.store.broadcast("profile", json.dumps(profile)))
    decode = DecodeConfig(**vars(config.decode) | values_of(found, "decode"))
    return replace(config, decode=decode, engine=replace(config.engine, **values_of(found, "engine")))


def values_of(found: Found, section: str) -> dict[str, Any]:
    """Return the values that were found for the options of a section, by their names in it."""
    keys = [key.split(".") for key in found]
    return {name: found[f"{section}.{name}"][0] for where, name in keys if where == section}


def resolve_decode(decode: DecodeConfig, pattern: TrainingPattern) -> DecodeConfig:
    """Return the options with every ``auto`` replaced by the value of `pattern`.

    Neither ranks nor a profile are known here: branches are 0 with verify=agreement, else 7; one_block_from is null.

    Raises:
        ValueError: options that do not go together, or a causal model, which no option decodes yet.
    """
    if pattern.window_attention == "causal":
        raise ValueError(
            "this is a causal model, in which a row sees what is before it alone: decode has nothing for it"
        )
    values = {f.name: getattr(decode, f.name) for f in fields(DecodeConfig)}
    if values["one_block_from"] == "auto":
        values["one_block_from"] = None
    if values["branches"] == "auto":
        values["branches"] = 0 if decode.verify == "agreement" else AUTO_BRANCHES
    # what goes with the user's choices, whatever the model
    causal = values["window_attention"] == "block_causal"
    if causal and values["prompt_attention"] == "auto" and pattern.prompt_attention == "joint":
        values["prompt_attention"] = "self"
    if values["canvas"] == "auto" and (causal or values["cache"] == "dual"):
        values["canvas"] = "growing" if causal else "whole"
    return DecodeConfig(**{key: getattr(pattern, key) if v == "auto" else v for key, v in values.items()})


def by_device(config: Config, device: torch.device) -> Found:
    """Return what follows the device alone, which is that of `model.device`."""
    found: Found = {}
    if config.model.device == "auto":
        found["model.device"] = device.type, "what this machine has"
    if config.model.dtype == "auto":
        found["model.dtype"] = choose_dtype(config.model, device), f"the device, {device.type}"
    return found


def by_model(config: Config, shape: ModelConfig, device: torch.device) -> Found:
    """Return what follows the model, whose configuration is `shape`: how it was trained, and the size of its heads."""
    found: Found = {}
    pattern, reason = config.model.pattern, f"model.pattern={config.model.pattern}"
    if pattern == "auto":
        pattern = FAMILIES[shape.family].pattern
        reason = f"the pattern of its family {shape.family}, {pattern}"
        found["model.pattern"] = pattern, f"the model's family, {shape.family}"
    check_drafts(shape, config.decode.drafts)
    decode = resolve_decode(config.decode, training_pattern(shape, pattern))
    for entry in fields(DecodeConfig):
        if getattr(config.decode, entry.name) == "auto" and entry.name not in BY_PROFILE:
            found[f"decode.{entry.name}"] = getattr(decode, entry.name), reason
    if config.engine.attention == "auto":
        reason = f"the device, {device.type}, and the size of the model's heads"
        found["engine.attention"] = suited(device, shape.head_dim), reason
    return found


def by_ranks(config: Config, mesh: Mesh) -> Found:
    """Return what follows the ranks: with verify=agreement, a branch for each branch rank."""
    if config.decode.verify != "agreement" or not isinstance(config.decode.branches, str):
        return {}
    ranks = "this is one rank" if mesh.branch == 1 else f"there are {mesh.branch}"
    return {"decode.branches": (mesh.branch - 1, f"the ranks: a branch for each branch rank, and {ranks}")}


def needs_profile(config: Config) -> list[str]:
    """Return the keys that are ``auto`` and follow the profile of the model on its device."""
    wanted = {
        "decode.branches": config.decode.verify != "agreement" and isinstance(config.decode.branches, str),
        "decode.one_block_from": isinstance(config.decode.one_block_from, str),
        "engine.max_rows": config.engine.max_rows == "auto",
    }
    return [key for key, needed in wanted.items() if needed]


def by_profile(config: Config, shape: ModelConfig, device: torch.device, mesh: Mesh, requests: int) -> Found:
    """Return what follows the profile of the model on its device, as `profile_of` finds it."""
    keys = needs_profile(config)
    if not keys:
        return {}
    decode = resolve_decode(config.decode, training_pattern(shape, config.model.pattern))
    profile = profile_of(config, device, usual_window(decode, shape.shift))
    sequences = sequences_of_replica(config.engine, requests, mesh.data)
    free = profile.free_branches(sequences, mesh.branch)
    branches = free if "decode.branches" in keys else decode.branches
    a_rank = -(-(branches + 1) // mesh.branch)  # with verify=agreement and branches=auto one, too
    values = {
        "decode.branches": free,
        "decode.one_block_from": profile.one_block_from(decode.block_size * a_rank),
        "engine.max_rows": profile.best_rows(),
    }
    log.info(
        "by the profile, with %d in flight %d lookahead branches cost next to nothing; from %s sequences on one block "
        "at a time is best, and steps of %d rows",
        sequences, *values.values(),
    )  # fmt: skip
    return {key: (values[key], PROFILE) for key in keys}


def sequences_of_replica(engine: EngineConfig, requests: int, replicas: int) -> int:
    """Return how many sequences a data replica decodes at once: no more than its share of the requests."""
    return max(1, min(engine.max_sequences, -(-requests // replicas)))
