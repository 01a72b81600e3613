"""Drafts of causal models from several sources: masks, the text that the job has written, and each request's own text.

No draft changes a text, so a draft may come from anywhere. A batch job repeats itself: templates, phrases, samples of
one prompt, copies from the prompt. A chain is built one draft at a time, and three sources propose the next token:

- *masks*: what the masks after the last verified token predicted, as far as there were any;
- *text*: what most often followed the last tokens in the answers that this replica has written (`NGrams`;
  SuffixDecoding, arXiv 2411.04975, does this for a server);
- *own*: what followed the last tokens where they last occurred in the request's own prompt and answer (prompt lookup),
  and the token a learned distance back: in a template that repeats a name ten tokens later, whatever the name is
  (`contexts.py`).

All of them vote (`Mixer`). The chance that a vote is right is measured while the job runs: it is the share of earlier
proposals of the same kind (context and its count; length of the repeated passage; depth and probability of the mask)
that the model then wrote, counted only where all drafts before them were right. Drafts depend only on tokens and on
what masks predicted, which are equal on all ranks of a replica, so all ranks draft the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.engine.chain_change import change_of
from lopa_dist.engine.mixer import Decision, Mixer, Proposal
from lopa_dist.engine.ngram_contexts import NGRAM_CONTEXTS, TOKEN, back_of
from lopa_dist.engine.ngrams import COUNT, ENTRY_BYTES, NGrams
from lopa_dist.engine.work import Work
from lopa_dist.models.config import ModelConfig
from lopa_dist.ragged import Ints

if TYPE_CHECKING:  # figures of drafts are shown without torch
    from lopa_dist.decode import HostState

log = logging.getLogger("lopa_dist")

SOURCES = ("masks", "text", "own")
MASKS, TEXT, OWN = range(len(SOURCES))

HOPE = 0.5  # chance of a proposal from text, before any of its kind was made; a mask's comes from its probability
MATCH = 8  # the most tokens of a repeated passage that are compared
REMEMBERED = 4096  # the last tokens of a prompt, in which passages are looked for

# numbers of voters: the contexts, then passages, then masks
PASSAGES, MASK_VOTER = len(NGRAM_CONTEXTS), len(NGRAM_CONTEXTS) + 1
VOTERS = len(NGRAM_CONTEXTS) + 2
# numbers of kinds of proposals: by context and count, by a passage's length, then by a mask's depth and probability
BITS = [min(count.bit_length(), 7) for count in range(COUNT + 1)]
OF_PASSAGES = 8 * len(NGRAM_CONTEXTS)
OF_MASKS = OF_PASSAGES + MATCH + 1
LEVELS = 8  # of a mask's probability (`level`)
DEPTHS = 16  # of masks' proposals; once a chain has left what masks predicted, later ones are counted separately
KINDS = OF_MASKS + 2 * DEPTHS * LEVELS
HOPES = [HOPE] * OF_MASKS + [1 - 0.75 * 0.5 ** (kind % LEVELS) for kind in range(KINDS - OF_MASKS)]
SOURCE_OF = [*(TEXT if context.tells == TOKEN else OWN for context in NGRAM_CONTEXTS), OWN, MASKS]  # by voter


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


@dataclass
class Text:
    """The text of a sequence in flight, and what was drafted for it."""

    tokens: list[int]  # of the prompt and the answer
    backs: list[int]  # how far back each token had last occurred (`back_of`)
    counted: int  # how many tokens are counted in the table
    work: Work  # in which its drafts are counted
    index: dict[tuple[int, int], int] = field(default_factory=dict)  # by two tokens: the place that last followed them
    chain: list[Decision] = field(default_factory=list)  # drafts that the next forward verifies
    refused: Decision | None = None  # the decision after the chain's last one, if it was not drafted
    ends: list[float] = field(default_factory=list)  # probabilities that the chain's accepted part ends at each depth
    expects_eos: bool = False  # whether an end-of-text was proposed after the chain

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens, and index the passages that they continue."""
        for token in tokens:
            if len(self.tokens) > 1:
                self.index[self.tokens[-2], self.tokens[-1]] = len(self.tokens)
            self.append(token)

    def append(self, token: int) -> None:
        """Append a token without indexing the passage that it continues."""
        self.tokens.append(token)
        self.backs.append(back_of(self.tokens, len(self.tokens) - 1))

    def cut(self, length: int) -> None:
        """Drop all tokens after the first `length`."""
        del self.tokens[length:], self.backs[length:]


class Drafter:
    """Drafts for the sequences of one replica.

    Args:
        eos_ids: tokens that end a text; they are not drafted.
        most: the most drafts of a chain.
        masks: whether what masks predict may be drafted.
    """

    def __init__(self, eos_ids: Sequence[int], most: int, masks: bool) -> None:
        self.eos_ids, self.most, self.masks = frozenset(eos_ids), most, masks
        self.full = False  # whether it was logged that the table is full
        self.table, self.mixer = NGrams(), Mixer(VOTERS, HOPES, trusted=MASK_VOTER)
        self.texts: dict[int, Text] = {}  # by slot
        # chains of the last step, for `learn`: text, drafts, `Text.refused`, and where in the text the chain began
        self.verified: list[tuple[Text, list[Decision], Decision | None, int]] = []

    def clear(self) -> None:
        """Forget the texts of all slots."""
        self.texts.clear()

    def remember(self, text: Sequence[int], begin: int = 0) -> None:
        """Count the tokens of a text in the table, from number `begin` on."""
        self.table.add(text, begin)
        self.tell_of_room()

    def tell_of_room(self) -> None:
        """Log that the table is full, but only once."""
        if self.table.dropped and not self.full:
            self.full = True
            self.say_full(2 * self.table.most * ENTRY_BYTES)

    def say_full(self, size: int) -> None:
        """Log that the table has `size` bytes and is full."""
        log.info(
            "the table of drafts from text is full (%d MB): from now on, its least recently used entries are dropped",
            size >> 20,
        )

    def inherit(self, other: Drafter) -> None:
        """Take over the table of another drafter, and what it learned of all proposals but those of its masks."""
        self.table, self.mixer, self.full = other.table, other.mixer, other.full
        self.mixer.forget(OF_MASKS)

    def admit(self, slot: int, prompt: Sequence[int], work: Work) -> None:
        """Begin the text of a request.

        `work` counts its drafts; the counts are complete after the first `learn` that follows `leave`.
        """
        skipped = max(len(prompt) - REMEMBERED, 0)
        text = Text(list(prompt[:skipped]), [0] * skipped, len(prompt), work)
        text.extend(prompt[skipped:])
        self.texts[slot] = text

    def leave(self, slot: int) -> None:
        """Forget the text of a slot that becomes free; the next `learn` still learns from it."""
        del self.texts[slot]

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
        for slot, tokens, count in zip(slots.tolist(), written.tolist(), counts.tolist(), strict=True):
            if slot in self.texts:
                self.wrote(slot, tokens[:count])
        if self.masks:
            masks.note(slots, token, bits)

    def verifying(self) -> list[list[tuple[int, int]]]:
        """Return the chains of the last step that `learn` has not seen yet: the tokens and sources of their drafts."""
        return [[(draft.token, source_of(draft)) for draft in chain] for _, chain, _, _ in self.verified]

    def wrote(self, slot: int, tokens: Sequence[int]) -> None:
        """Append the tokens that a step has written in `slot`, and keep the verified chain for `learn`."""
        text = self.texts[slot]
        self.verified.append((text, text.chain, text.refused, len(text.tokens)))
        text.chain, text.refused = [], None
        text.extend(tokens)

    def learn(self, total: Work) -> None:
        """Learn from the last step how good its proposals were, and count its text. Count its drafts in `total`, too.

        It may be called late, such as while a device computes: drafting does not wait for it.
        """
        verified, self.verified = self.verified, []
        for text, chain, refused, begin in verified:
            right = 0
            for draft, token in zip([*chain, refused], text.tokens[begin:], strict=False):
                if draft is None:
                    break
                self.mixer.learn(draft, token)
                if draft is refused or draft.token != token:
                    break
                right += 1
            sources = [source_of(draft) for draft in chain]
            for work in (total, text.work):
                work.verified_from.update(sources)
                work.accepted_from.update(sources[:right])
            self.table.add(text.tokens, text.counted, text.backs)
            self.tell_of_room()
            text.counted = len(text.tokens)

    def draft_due(
        self, due: NDArray[np.bool_], host: HostState, places: Ints, worth: float, masks: Masks, from_text: bool
    ) -> Due:
        """Draft for the running sequences that are due.

        Args:
            due: ``[S]`` bool.
            host: of all slots.
            places: `State.chain_places`.
            worth, from_text: as in `draft`.
            masks: of all slots.
        """
        slots = (due & (host.done == 0)).nonzero()[0]
        complete, count = host.complete[slots], len(slots)
        room = np.minimum(self.most, host.limit[slots] - 1 - complete)
        tokens, ends = np.zeros((count, self.most), np.int64), np.zeros((count, self.most + 1))
        counts, eos = np.zeros((2, count), np.int64)
        for number, slot in enumerate(slots.tolist()):
            text = self.draft(slot, int(room[number]), worth, masks.of(slot), from_text)
            counts[number], eos[number] = len(text.chain), text.expects_eos
            tokens[number, : len(text.chain)] = [draft.token for draft in text.chain]
            ends[number, : len(text.ends)] = text.ends
        return Due(slots, room, counts, eos, tokens, ends, change_of(places, slots, complete, tokens, counts, eos))

    def draft(
        self, slot: int, most: int, worth: float, masks: Sequence[tuple[int, float]] = (), from_text: bool = True
    ) -> Text:
        """Return the text of a sequence with a new chain of drafts (`Text.chain`).

        Args:
            slot: of the sequence.
            most: the most drafts.
            worth: the least probability of being reached and right at which a draft is worth a row.
            masks: tokens that masks predicted for the chain's places, and their probabilities.
            from_text: whether to draft from text, too; without it, masks alone draft.
        """
        text = self.texts[slot]
        text.chain, text.ends, text.expects_eos, text.refused = chain, ends, _, _ = [], [], False, None
        length, on_track, reached = len(text.tokens), 0, 1.0  # on_track is 0 while the chain is what masks predicted
        for depth in range(most if from_text else min(most, len(masks))):
            proposals = self.proposals(text) if from_text else []
            of_mask = self.proposal_of_mask(masks, depth, on_track)
            proposals += of_mask
            draft = self.mixer.decide(proposals)
            after = reached * draft.chance
            if draft.token < 0 or after < worth or draft.token in self.eos_ids:
                text.expects_eos = draft.token in self.eos_ids and after >= worth
                text.refused = draft
                break
            ends.append(reached - after)
            chain.append(draft)
            text.append(draft.token)
            reached, on_track = after, on_track if of_mask and draft.token == of_mask[0].token else DEPTHS
        text.cut(length)
        ends.append(reached)
        return text

    def proposals(self, text: Text) -> list[Proposal]:
        """Return what the table and the text itself propose as the next token."""
        proposal, found = self.mixer.proposal, []
        for number, token, count in self.table.after(text.tokens, text.backs):
            found.append(proposal(token, number, 8 * number + BITS[count]))
        passage, length = self.passage(text)
        if passage:
            found.append(proposal(text.tokens[passage], PASSAGES, OF_PASSAGES + length))
        return found

    def proposal_of_mask(self, masks: Sequence[tuple[int, float]], depth: int, on_track: int) -> list[Proposal]:
        """Return what a mask proposes at a depth of the chain; empty if no mask has predicted there.

        Args:
            masks: as in `draft`.
            depth, on_track: as in `mask_kind`.
        """
        if depth >= len(masks):
            return []
        token, probability = masks[depth]
        return [self.mixer.proposal(token, MASK_VOTER, mask_kind(on_track, depth, probability))]

    def paths(self, slot: int, most: int, masks: Sequence[tuple[int, float]] = ()) -> list[list[int]]:
        """Return alternatives to the chain, the likeliest first: each replaces a draft by another token proposed there.

        Args:
            slot, masks: as in `draft`, which must have been called before.
            most: the most paths.

        Returns:
            The tokens of each path, as many as the chain has.
        """
        drafts = self.chain_of(slot)
        chain = [token for token, _ in drafts]
        found: dict[tuple[int, int], float] = {}  # by depth and token
        reached, on_track = 1.0, 0  # on_track is as in `draft`
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

    def proposed(self, slot: int, more: Sequence[int]) -> list[tuple[int, float]]:
        """Return the tokens that text proposes after those in `slot` and `more`, and the chance of each proposal."""
        text = self.texts[slot]
        length = len(text.tokens)
        for token in more:
            text.append(token)
        found = [(one.token, self.mixer.chance[one.kind]) for one in self.proposals(text)]
        text.cut(length)
        return found

    def chain_of(self, slot: int) -> list[tuple[int, float]]:
        """Return the drafts of the chain in a slot, and their chances of being right."""
        return [(draft.token, draft.chance) for draft in self.texts[slot].chain]

    def passage(self, text: Text) -> tuple[int, int]:
        """Return the place after the last earlier occurrence of the final tokens (0: none), and how many match."""
        tokens = text.tokens
        if len(tokens) < 2:
            return 0, 0
        at, length = text.index.get((tokens[-2], tokens[-1]), 0), 2
        while 0 < length < MATCH and at > length and tokens[at - length - 1] == tokens[-length - 1]:
            length += 1
        return at, length


def source_of(draft: Decision) -> int:
    """Return which of `SOURCES` a draft is from: masks if they predicted it, else the surest voter that proposed it."""
    best = max(
        (one for one in draft.proposals if one.token == draft.token),
        key=lambda one: (one.voter == MASK_VOTER, one.lean),
    )
    return SOURCE_OF[best.voter]


def mask_kind(on_track: int, depth: int, probability: float) -> int:
    """Return the kind of a mask's proposal.

    Args:
        on_track: 0 while the chain is what masks predicted, then DEPTHS.
        depth: of the place in the chain; all depths from `DEPTHS` - 1 on have the same kind.
        probability: of the predicted token.
    """
    return OF_MASKS + (on_track + min(depth, DEPTHS - 1)) * LEVELS + level(probability)


def level(probability: float) -> int:
    """Return the level of a mask's probability p: how many times 1 - p must be doubled to reach 0.5, at most 7."""
    rest, halved = 1.0 - probability, 0
    while rest < 0.5 and halved < LEVELS - 1:
        rest, halved = 2 * rest, halved + 1
    return halved


def drafter_for(config: DecodeConfig, model: ModelConfig) -> Drafter | None:
    """Return the drafter of a model, as `config` says; None if nothing is drafted from text."""
    if not config.drafts_text:
        return None
    from lopa_dist.engine import c_drafter  # which imports this module

    kind = Drafter if c_drafter.fault() else c_drafter.CDrafter
    return kind(model.eos_ids if config.stop_at_eos else (), config.max_drafts, config.drafts_masks and model.has_mask)
