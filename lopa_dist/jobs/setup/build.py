"""The one way to an engine: find and read a checkpoint, load it on this rank's device, run it with any decode options.

Jobs, traces, profiles, benchmarks and `lopa_dist.LLM` all build their engines here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lopa_dist.config import ModelOptions
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.scoring import ScoringEngine
from lopa_dist.jobs.setup.resolve import choose_dtype
from lopa_dist.kernels.dispatch import hopper
from lopa_dist.models.adapter import load_adapter
from lopa_dist.models.checkpoint import DTYPES, load_model
from lopa_dist.models.config_file import read_config
from lopa_dist.models.families import training_pattern
from lopa_dist.models.files import CheckpointError, find, revision, same_revision
from lopa_dist.models.tokenizer import chat_templates, load_tokenizer, text_of
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Relay, Solo
from lopa_dist.parallel.group import Group

log = logging.getLogger("lopa_dist")


class EngineBuilder:
    """A checkpoint on a device, and engines that run it.

    Its configuration and tokenizer are read at once; its weights only by `load`, because a job may turn out to have
    nothing left to generate.

    Attributes:
        folder: where the checkpoint is.
        shape: the model's configuration.
        pattern: how it was trained to see text, which decode options set to ``auto`` follow.
        dtype: the name of the weights' precision.
        tokenizer: the checkpoint's own.
        merged: where the adapter is that is merged into the weights; None: there is none.

    Raises:
        CheckpointError: there is no such checkpoint, or it cannot be used.
    """

    def __init__(self, options: ModelOptions, device: torch.device) -> None:
        self.options, self.device = options, device
        self.folder = find(options.path)
        adapter = None if options.lora is None else find(options.lora, "model.lora")
        self.merged = adapter if options.merged_lora else None
        self.shape = read_config(self.folder, None if self.merged else adapter, self.merged)
        self.pattern = training_pattern(self.shape, options.pattern)
        self.dtype = choose_dtype(options, device)
        self.tokenizer = load_tokenizer(self.folder, self.merged)
        self.model: Transformer | None = None
        self._tensor = Relay(Solo())

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer's tokens."""
        return text_of(self.tokenizer, tokens)

    @cached_property
    def revision(self) -> str:
        """A hash of the checkpoint's content (`models.files.revision`)."""
        return revision(self.folder)

    @cached_property
    def adapter_revision(self) -> str | None:
        """A hash of the content of the LoRA adapter; None if there is none."""
        lora = self.options.lora
        return None if lora is None else revision(find(lora, "model.lora"))

    @property
    def drafts_revision(self) -> str:
        """What drafts are learned on: the checkpoint's `revision`, and that of an adapter merged into it."""
        merged = self.adapter_revision if self.merged else None
        return self.revision if merged is None else f"{self.revision}+{merged}"

    def addresses(self) -> list[int]:
        """Return where the weights are in memory; empty before they are loaded."""
        return [weight.data_ptr() for weight in self.model.parameters()] if self.model is not None else []

    def changed_since(self, weights: Mapping[str, Any]) -> str:
        """Return in words which weights are others than a report says (`weights`); empty if all are the same."""
        merged = self.adapter_revision if self.merged else None
        checkpoint, adapter = f"the checkpoint {self.options.path}", f"model.lora={self.options.lora}"
        found = (checkpoint, "revision", self.revision), (adapter, "lora", merged)
        return " and ".join(
            f"{name} has changed since the run (revision {weights[key]}, now {now})"
            for name, key, now in found
            if key in weights and not same_revision(weights[key], now)
        )

    def load(self, warn: bool = True, tensor: Communicator | None = None) -> Transformer:
        """Return the model, adapted, split and quantised as the options say.

        The first call loads the weights; a later one only gives them another `tensor` group, whose size and this rank's
        place in it must stay as they were. With `warn`, warn of an adapter for another model, and of fp8 if it is
        emulated.
        """
        self._tensor.connect(tensor or Solo())
        if self.model is not None:
            return self.model
        options = self.options
        if warn and options.quantization == "fp8" and self.device.type != "cuda":
            log.warning(
                "WARNING: model.quantization=fp8 is emulated on a CPU, slower than model.quantization=none: "
                "it shows what fp8 does to the texts, and nothing of its speed"
            )
        if warn and options.quantization == "int8" and self.device.type != "cuda":
            log.warning(
                "WARNING: model.quantization=int8 is slower than none on a CPU, 2 to 4 times for 0.5B parameters: each "
                "step widens the weights. It only saves memory"
            )
        if warn and options.quantization == "int8" and self.device.type == "cuda" and hopper(self.device):
            log.warning(
                "WARNING: model.quantization=int8 is slower than none on this GPU, 1.3 to 2.1 times in its products: "
                "model.quantization=fp8 takes as little memory, and is faster than none"
            )
        adapter = (
            load_adapter(find(options.lora, "model.lora"), options.lora_rows) if options.lora is not None else None
        )
        known = adapter.base_revision if adapter else None
        if known is not None and not same_revision(known, self.revision):
            raise CheckpointError(
                f"model.lora={options.lora}: its drafts were learned on another checkpoint than the one at "
                f"{options.path} (revision {known}, not {self.revision}); leave it out, or learn again with this one"
            )
        if warn and adapter and (message := adapter.mismatch(options.path)):
            log.warning("WARNING: %s", message)
        if warn and self.merged and options.chat_template != "never":
            self.tell_of_template(self.merged)
        dtype = DTYPES[self.dtype]
        self.model = load_model(self.folder, dtype, self.device, adapter, self._tensor, options.quantization)
        return self.model

    def tell_of_template(self, merged: Path) -> None:
        """Log which chat template is used if an adapter that is merged has one."""
        theirs, ours = chat_templates(merged), chat_templates(self.folder)
        if theirs and not ours:
            log.info("prompts go through the chat template of model.lora=%s", self.options.lora)
        elif theirs not in ({}, ours):
            log.warning(
                "WARNING: model.lora=%s has another chat template than the checkpoint, whose own is used; if it was "
                "trained with its own, take a copy of the checkpoint's folder with that template", self.options.lora,
            )  # fmt: skip

    def scoring_engine(self, decode: DecodeConfig, options: EngineConfig, masks: int, group: Group) -> ScoringEngine:
        """Return an engine that scores texts on this rank of `group`, whose replicas have no branches.

        Args:
            decode: what rows see, without any ``auto``.
            options: how the model is run.
            masks: how many are drawn for a text, if the model is a masked one.
            group: the ranks that make the same call.
        """
        model = self.load(tensor=group.tensor)
        return ScoringEngine(model, decode, options, masks, group.stop.level, group.tensor)

    def engine(
        self,
        decode: DecodeConfig,
        options: EngineConfig,
        group: Group | None = None,
        on_step: Callable[[Engine], None] | None = None,
    ) -> Engine:
        """Return an engine on this rank of `group`, or on this process alone.

        Args:
            decode: how masks are filled, without any ``auto`` (see `resolve.resolve_decode`).
            options: how the model is run.
            group: the ranks that make the same call.
            on_step: as for `Engine`.
        """
        if group is None:
            return Engine(self.load(), decode, Solo(), options, on_step, text_of=self.text_of)
        branch, branches = group.mesh.branch, decode.max_branches
        if branch > branches and not decode.causal and group.world.rank == 0:
            log.warning(
                "with decode.branches=%d, %d of the %d branch ranks of a replica do nothing: write parallel.data=auto "
                "parallel.branch=auto, which makes replicas of them, or decode.branches=%d",
                decode.branches, branch - branches, branch, branch - 1,
            )  # fmt: skip
        model = self.load(tensor=group.tensor)
        stop, watched = group.stop.level, group.failures.watched
        return Engine(model, decode, group.comm, options, on_step, stop, group.tensor, watched, self.text_of)
