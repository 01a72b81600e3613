"""Drafting on the host for the sequences of a batch: what it needs of a step, and what it gives back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.decode import HostState, State
from lopa_dist.decode.winner import Winner
from lopa_dist.engine.drafter import Drafter
from lopa_dist.engine.work import Work
from lopa_dist.ragged import Ints
from lopa_dist.rules.causal import brought, proposals, put_chains


class Chains:
    """Lets a `Drafter` draft for the sequences of a batch.

    Args:
        drafter: of the replica.
        slots: of the state.
    """

    def __init__(self, drafter: Drafter, slots: int) -> None:
        self.drafter = drafter
        drafter.texts.clear()
        self.masks: dict[int, list[tuple[int, float]]] = {}  # of sequences to draft for: what masks predicted
        self.ends: NDArray[np.float64] = np.zeros((slots, drafter.most + 1))  # chances that chains end at each depth
        self.predicted: Ints = np.zeros(slots, np.int64)  # places of each chain for which masks predicted a token

    def admit(self, slot: int, prompt: Sequence[int], *works: Work) -> None:
        """Draft for a sequence that begins in `slot`; its drafts are counted in `works`."""
        self.drafter.admit(slot, prompt, *works)
        self.masks[slot] = []

    def leave(self, slot: int) -> None:
        """Forget the sequence in `slot`."""
        self.drafter.leave(slot)
        self.masks.pop(slot, None)

    def told(self, winner: Winner) -> Tensor:
        """Return what the host must know of a step, for its one copy: ``[S x (D + 2 n)]``.

        These are the tokens that the step has written, -1 for none, and what masks predicted behind them: tokens, -1
        for none, and the bits of their probabilities.
        """
        written, proposed = brought(winner), proposals(winner)
        self.shapes = written.shape, proposed.packed[:2].shape
        return torch.cat([written.flatten(), proposed.packed[:2].flatten()])

    def heard(self, slots: Ints, values: Ints) -> None:
        """Take what `told` has sent, for the sequences in `slots`."""
        (count, width), shape = self.shapes
        written = values[: count * width].reshape(count, width)
        token, bits = values[count * width :].reshape(shape)
        predicted = (token >= 0).cumprod(1).sum(1) * self.drafter.masks
        probability = bits.astype(np.int32).view(np.float32)
        for number, (slot, tokens, n, most) in enumerate(
            zip(slots.tolist(), written.tolist(), (written >= 0).sum(1).tolist(), predicted.tolist(), strict=True)
        ):
            if slot in self.drafter.texts:
                self.drafter.wrote(slot, tokens[:n])
                self.masks[slot] = (
                    list(zip(token[number, :most].tolist(), probability[number, :most].tolist(), strict=True))
                    if most
                    else []
                )

    def draft(self, state: State, host: HostState, worth: float, from_text: bool = True) -> HostState:
        """Draft for the sequences that took a step or begin, and return what the host knows then.

        Args:
            state, host: of all slots, of the same step.
            worth, from_text: as of `Drafter.draft`.
        """
        drafter, slots, chains, expects_eos, paths = self.drafter, [], [], [], []
        for slot, masks in self.masks.items():
            if host.done[slot]:
                continue
            most = min(drafter.most, int(host.limit[slot] - 1 - host.complete[slot]))
            text = drafter.draft(slot, most, worth, masks, from_text)
            slots.append(slot)
            chains.append([draft[0] for draft in text.chain])
            expects_eos.append(text.expects_eos)
            if state.config.branches:
                free = state.config.max_branches - max(int(host.branches[slot]), 1)  # the others hold second choices
                paths.append(drafter.paths(slot, free, masks) if free and text.chain else [])
            if drafter.masks:
                # where an end is expected, or the answer's limit is near, a chain is not short for want of sources
                self.predicted[slot] = min(len(masks), len(text.chain) if text.expects_eos else most)
                self.ends[slot] = 0
                self.ends[slot, : len(text.ends)] = text.ends
        self.masks = {}
        return put_chains(state, host, slots, chains, expects_eos, paths) if slots else host
