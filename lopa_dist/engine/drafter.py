"""Drafts of causal models from several sources: masks, the text that the job has written, and each request's own text.

No draft changes a text, so a draft may come from anywhere. A batch job repeats itself: templates, phrases, samples of
one prompt, copies from the prompt. A chain is built one draft at a time, and three sources propose the next token:

- *masks*: what the masks after the last verified token predicted, as far as there were any;
- *text*: what most often followed the last tokens in the answers that this replica has written (`NGrams`;
  SuffixDecoding, arXiv 2411.04975, does this for a server);
- *own*: what followed the last tokens where they last occurred in the request's own prompt and answer (prompt lookup),
  and the token a learned distance back: in a template that repeats a name ten tokens later, whatever the name is
  (`ngram_contexts.py`).

All of them vote (`Mixer`). The chance that a vote is right is measured while the job runs: it is the share of earlier
proposals of the same kind (context and its count; length of the repeated passage; depth and probability of the mask)
that the model then wrote, counted only where all drafts before them were right. Drafts depend only on tokens and on
what masks predicted, which are equal on all ranks of a replica, so all ranks draft the same.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lopa_dist.engine.draft_kinds import DEPTHS, MASK_VOTER, mask_kind
from lopa_dist.engine.mixer import Mixer, Proposal
from lopa_dist.engine.work import Work
from lopa_dist.ragged import Ints

if TYPE_CHECKING:  # figures of drafts are shown without torch
    from lopa_dist.decode import HostState

log = logging.getLogger("lopa_dist")

REMEMBERED = 4096  # the last tokens of a prompt, in which passages are looked for
NOTHING: Ints = np.zeros((0, 0), np.int64)  # no predictions of masks


class Masks(NamedTuple):
    """What masks predicted for the next places of each slot's sequence; W is the most places that they reach."""

    token: Ints  # [S, W]
    probability: NDArray[np.float64]  # [S, W]
    counts: Ints  # [S] places for which there is a prediction

    def of(self, slot: int) -> list[tuple[int, float]]:
        """Return the predicted tokens and their probabilities for the sequence in `slot`."""
        reach = self.counts[slot]
        return list(zip(self.token[slot, :reach].tolist(), self.probability[slot, :reach].tolist(), strict=True))

    def note(self, slots: Ints, token: Ints, bits: Ints) -> None:
        """Store what masks predicted in a step.

        Args:
            slots: ``[n]`` slots of the step's sequences.
            token: ``[n, w]`` tokens; -1 from the first place on that has no prediction.
            bits: ``[n, w]`` bits of their fp32 probabilities.
        """
        reach = min(token.shape[1], self.token.shape[1])
        self.token[slots, :reach] = token[:, :reach]
        self.probability[slots, :reach] = bits[:, :reach].astype(np.int32).view(np.float32)
        self.counts[slots] = (token[:, :reach] >= 0).cumprod(1).sum(1)


class Due(NamedTuple):
    """What was drafted for the sequences that were due; m is `Drafter.most`."""

    slots: Ints  # [n]
    room: Ints  # [n] the most drafts that each chain may have
    counts: Ints  # [n] drafts
    expects_eos: Ints  # [n] 1 if an end-of-text was proposed after the chain
    tokens: Ints  # [n, m]
    ends: NDArray[np.float64]  # [n, m + 1] probability that the accepted part of the chain ends at each depth
    change: Ints  # [2, c] of `State.storage` (`chain_change`)


class Drafter(ABC):
    """Drafts for the sequences of one replica.

    Args:
        eos_ids: tokens that end a text; they are not drafted.
        most: the most drafts of a chain.
        masks: whether what masks predict may be drafted.
        mixer: weighs the proposals.
    """

    def __init__(self, eos_ids: Sequence[int], most: int, masks: bool, mixer: Mixer) -> None:
        self.eos_ids, self.most, self.masks, self.mixer = frozenset(eos_ids), most, masks, mixer
        self.full = False  # whether it was logged that the table is full

    @abstractmethod
    def clear(self) -> None:
        """Forget the texts of all slots."""

    @abstractmethod
    def remember(self, text: Sequence[int], begin: int = 0) -> None:
        """Count the tokens of a text in the table, from number `begin` on."""

    @abstractmethod
    def inherit(self, other: Drafter) -> None:
        """Take over the table of another drafter, and what it learned of all proposals but those of its masks."""

    @abstractmethod
    def admit(self, slot: int, prompt: Sequence[int], work: Work) -> None:
        """Begin the text of a request.

        `work` counts its drafts; the counts are complete after the first `learn` that follows `leave`.
        """

    @abstractmethod
    def leave(self, slot: int) -> None:
        """Forget the text of a slot that becomes free; the next `learn` still learns from it."""

    @abstractmethod
    def hear(
        self, slots: Ints, written: Ints, counts: Ints, masks: Masks, token: Ints = NOTHING, bits: Ints = NOTHING
    ) -> None:
        """Append what a step has written, and note in `masks` what masks predicted after it, if they draft.

        Args:
            slots: ``[n]`` slots of the step; those without a text are skipped.
            written: ``[n, D]`` tokens; the first `counts` of each sequence are new.
            counts: ``[n]`` new tokens.
            masks: of all slots, changed in place.
            token, bits: as in `Masks.note`.
        """

    @abstractmethod
    def verifying(self) -> list[list[tuple[int, int]]]:
        """Return the chains of the last step that `learn` has not seen yet: the tokens and sources of their drafts."""

    @abstractmethod
    def learn(self, total: Work) -> None:
        """Learn from the last step how good its proposals were, and count its text. Count its drafts in `total`, too.

        It may be called late, such as while a device computes: drafting does not wait for it.
        """

    @abstractmethod
    def draft_due(
        self, due: NDArray[np.bool_], host: HostState, places: Ints, worth: float, masks: Masks, from_text: bool
    ) -> Due:
        """Draft for the running sequences that are due.

        Args:
            due: ``[S]`` bool.
            host: of all slots.
            places: `State.chain_places`.
            worth: the least probability of being reached and right at which a draft is worth a row.
            masks: of all slots.
            from_text: whether to draft from text, too; without it, only masks draft.
        """

    @abstractmethod
    def proposed(self, slot: int, more: Sequence[int]) -> list[tuple[int, float]]:
        """Return the tokens that text proposes after those in `slot` and `more`, and the chance of each proposal."""

    @abstractmethod
    def chain_of(self, slot: int) -> list[tuple[int, float]]:
        """Return the drafts of the chain in a slot, and their chances of being right."""

    @abstractmethod
    def full_bytes(self) -> int | None:
        """Return how large the table is if entries were dropped from it because it is full; None: none were."""

    def tell_of_room(self) -> None:
        """Log that the table is full, but only once."""
        if not self.full and (size := self.full_bytes()) is not None:
            self.full = True
            log.info(
                "the table of drafts from text is full (%d MB): from now on, its least recently used entries are "
                "dropped", size >> 20,
            )  # fmt: skip

    def paths(self, slot: int, most: int, masks: Sequence[tuple[int, float]] = ()) -> list[list[int]]:
        """Return alternatives to the chain, the likeliest first: each replaces a draft by another token proposed there.

        Args:
            slot: of a sequence that was drafted for.
            most: the most paths.
            masks: tokens that masks predicted for the chain's places, and their probabilities.

        Returns:
            The tokens of each path, as many as the chain has.
        """
        drafts = self.chain_of(slot)
        chain = [token for token, _ in drafts]
        found: dict[tuple[int, int], float] = {}  # by depth and token
        reached, on_track = 1.0, 0  # on_track is 0 while the chain is what masks predicted
        for depth, (token, chance) in enumerate(drafts):
            proposed = self.proposed(slot, chain[:depth])
            of_mask = self.proposal_of_mask(masks, depth, on_track)
            proposed += [(one.token, self.mixer.chance[one.kind]) for one in of_mask]
            for other, likely in proposed:
                if other != token and other not in self.eos_ids:
                    found[depth, other] = max(found.get((depth, other), 0.0), reached * likely)
            reached, on_track = reached * chance, on_track if of_mask and token == of_mask[0].token else DEPTHS
        best = sorted(found, key=lambda at: (-found[at], at))[:most]
        return [self.onward(slot, [*chain[:depth], other], chain) for depth, other in best]

    def onward(self, slot: int, path: list[int], chain: list[int]) -> list[int]:
        """Return `path`, which has left `chain`, continued until it is as long as `chain`.

        First come the tokens that text proposes, as far as it does, then the tokens of `chain` at these depths.
        """
        while len(path) < len(chain):
            proposed = max(self.proposed(slot, path), key=lambda one: one[1], default=(-1, 0.0))[0]
            if proposed < 0 or proposed in self.eos_ids:
                break
            path.append(proposed)
        return path + chain[len(path) :]

    def proposal_of_mask(self, masks: Sequence[tuple[int, float]], depth: int, on_track: int) -> list[Proposal]:
        """Return what a mask proposes at a depth of the chain; empty if no mask has predicted there.

        Args:
            masks: as in `paths`.
            depth, on_track: as in `mask_kind`.
        """
        if depth >= len(masks):
            return []
        token, probability = masks[depth]
        return [self.mixer.proposal(token, MASK_VOTER, mask_kind(on_track, depth, probability))]
