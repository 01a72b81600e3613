"""Drafting on the host for the sequences of a batch: what the host needs from a step, and the drafts it returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lopa_dist.decode import HostState, State
from lopa_dist.decode.winner import Winner
from lopa_dist.engine.drafter import Drafter, Due, Masks
from lopa_dist.engine.work import Work
from lopa_dist.ragged import Ints
from lopa_dist.rules.causal import proposals, put_chains


class Expected(NamedTuple):
    """How chains that are drafted from text alone are expected to end."""

    ends: NDArray[np.float64]  # [n, m + 1] probability that the accepted part of the chain ends at each depth
    drafts: Ints  # [n] drafts of the chain
    room: Ints  # [n] drafts that the chain has room for


class Chains:
    """Drafts for the sequences of a batch, with a `Drafter`.

    Args:
        drafter: the replica's.
        slots: number of the state's slots.
    """

    def __init__(self, drafter: Drafter, slots: int) -> None:
        self.drafter = drafter
        drafter.clear()
        self.due = np.zeros(slots, bool)  # sequences to draft for: they took a step, or have just begun
        most = drafter.most
        # what masks predicted after each sequence's last token
        self.masks = Masks(np.zeros((slots, most), np.int64), np.zeros((slots, most)), np.zeros(slots, np.int64))
        self.ends: NDArray[np.float64] = np.zeros((slots, most + 1))  # probabilities that chains end at each depth
        # what the last `draft` drafted with text, and how far masks reached in each slot; None: text did not draft
        self.with_text: tuple[Due, Ints] | None = None
        self.predicted: Ints = np.zeros(slots, np.int64)  # places of each chain for which masks predicted a token

    def admit(self, slot: int, prompt: Sequence[int], work: Work) -> None:
        """Take the text of a new sequence in `slot`, whose drafts will be counted in `work`."""
        self.drafter.admit(slot, prompt, work)

    def begin(self, slots: Sequence[int]) -> None:
        """Begin to draft for the new sequences in `slots`."""
        self.due[slots], self.masks.counts[slots] = True, 0

    def leave(self, slot: int) -> None:
        """Forget the sequence in `slot`, which is finished."""
        self.drafter.leave(slot)

    def to_send(self, winner: Winner) -> list[Tensor]:
        """Return what the step's one copy to the host must hold: ``[S x D]`` and, if masks draft, ``[2 x S x n]``.

        The first has the tokens that the step has written, followed by tokens that do not count. The second has what
        masks predicted after the written tokens: tokens, -1 for none, and the bits of their probabilities.
        """
        tensors = [winner.token, *([proposals(winner).packed[:2]] if self.drafter.masks else [])]
        self.shapes = [one.shape for one in tensors]
        return [one.flatten() for one in tensors]

    def received(self, slots: Ints, counts: Ints, *sent: Ints) -> None:
        """Take the host's copy of what `to_send` returned, for the sequences in `slots` with `counts` new tokens."""
        written, *proposed = (one.reshape(shape) for one, shape in zip(sent, self.shapes, strict=True))
        self.drafter.hear(slots, written, counts, self.masks, *(proposed[0] if proposed else ()))
        self.due[slots] = True

    def draft(self, state: State, host: HostState, worth: float, from_text: bool, foresee: bool) -> HostState:
        """Draft for the sequences that took a step or have just begun, and return what the host knows afterwards.

        Args:
            state, host: of all slots, after the same step.
            worth, from_text: as in `Drafter.draft_due`.
            foresee: whether to work out what drafts from text would bring (`expected`) even if text does not draft.
        """
        drafter, masks, places = self.drafter, self.masks, state.chain_places
        self.with_text = None
        if not from_text and foresee:
            no_masks = masks._replace(counts=np.zeros_like(masks.counts))
            self.with_text = drafter.draft_due(self.due, host, places, worth, no_masks, True), no_masks.counts
        made = drafter.draft_due(self.due, host, places, worth, masks, from_text)
        if from_text:
            self.with_text = made, masks.counts
        slots = made.slots
        self.due.fill(False)
        if not len(slots):
            return host
        paths: list[list[list[int]]] = []
        if state.config.branches:
            for number, slot in enumerate(slots.tolist()):
                free = state.config.max_branches - int(host.branches[slot])  # the others hold second choices
                wanted = free and made.counts[number]
                paths.append(drafter.paths(slot, free, masks.of(slot)) if wanted else [])
        if drafter.masks:
            # a chain may be short because an end-of-text is expected or the answer's limit is near: places after that
            # do not count as predicted
            reach = np.where(made.expects_eos, made.counts, made.room)
            self.predicted[slots] = np.minimum(masks.counts[slots], reach)
            self.ends[slots] = made.ends
        if not (state.config.branches or made.counts.any() or made.expects_eos.any()):  # as `spawn` left it
            return host
        return put_chains(state, host, slots, made.counts, made.expects_eos, made.change, paths)

    def expected(self) -> Expected | None:
        """Return how the chains of the last `draft` that are from text alone are expected to end; None: not known.

        They are returned only once, and not after the step.
        """
        if self.with_text is None:
            return None
        (made, reached), self.with_text = self.with_text, None
        bare = reached[made.slots] == 0
        return Expected(made.ends[bare], made.counts[bare], made.room[bare]) if bare.any() else None
