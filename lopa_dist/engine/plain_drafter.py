"""The drafter in Python: what the one in C (`c_drafter.py`) does, for machines without a C compiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lopa_dist.engine.chain_change import change_of
from lopa_dist.engine.draft_kinds import (
    BITS,
    DEPTHS,
    HOPES,
    MASK_VOTER,
    MATCH,
    OF_MASKS,
    OF_PASSAGES,
    PASSAGES,
    VOTERS,
    source_of,
)
from lopa_dist.engine.drafter import NOTHING, REMEMBERED, Drafter, Due, Masks
from lopa_dist.engine.mixer import Decision, Mixer, Proposal
from lopa_dist.engine.ngram_contexts import back_of
from lopa_dist.engine.ngrams import ENTRY_BYTES, NGrams
from lopa_dist.engine.work import Work
from lopa_dist.ragged import Ints

if TYPE_CHECKING:
    from lopa_dist.decode import HostState


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


class PlainDrafter(Drafter):
    """A `Drafter` whose texts and table are in Python."""

    def __init__(self, eos_ids: Sequence[int], most: int, masks: bool) -> None:
        super().__init__(eos_ids, most, masks, Mixer(VOTERS, HOPES, trusted=MASK_VOTER))
        self.table = NGrams()
        self.texts: dict[int, Text] = {}  # by slot
        # chains of the last step, for `learn`: text, drafts, `Text.refused`, and where in the text the chain began
        self.verified: list[tuple[Text, list[Decision], Decision | None, int]] = []

    def clear(self) -> None:
        """See `Drafter`."""
        self.texts.clear()

    def remember(self, text: Sequence[int], begin: int = 0) -> None:
        """See `Drafter`."""
        self.table.add(text, begin)
        self.tell_of_room()

    def full_bytes(self) -> int | None:
        """See `Drafter`."""
        return 2 * self.table.most * ENTRY_BYTES if self.table.dropped else None

    def inherit(self, other: Drafter) -> None:
        """See `Drafter`."""
        assert isinstance(other, PlainDrafter)
        self.table, self.mixer, self.full = other.table, other.mixer, other.full
        self.mixer.forget(OF_MASKS)

    def admit(self, slot: int, prompt: Sequence[int], work: Work) -> None:
        """See `Drafter`."""
        skipped = max(len(prompt) - REMEMBERED, 0)
        text = Text(list(prompt[:skipped]), [0] * skipped, len(prompt), work)
        text.extend(prompt[skipped:])
        self.texts[slot] = text

    def leave(self, slot: int) -> None:
        """See `Drafter`."""
        del self.texts[slot]

    def hear(
        self, slots: Ints, written: Ints, counts: Ints, masks: Masks, token: Ints = NOTHING, bits: Ints = NOTHING
    ) -> None:
        """See `Drafter`."""
        for slot, tokens, count in zip(slots.tolist(), written.tolist(), counts.tolist(), strict=True):
            if slot in self.texts:
                self.wrote(slot, tokens[:count])
        if self.masks:
            masks.note(slots, token, bits)

    def verifying(self) -> list[list[tuple[int, int]]]:
        """See `Drafter`."""
        return [[(draft.token, source_of(draft)) for draft in chain] for _, chain, _, _ in self.verified]

    def wrote(self, slot: int, tokens: Sequence[int]) -> None:
        """Append the tokens that a step has written in `slot`, and keep the verified chain for `learn`."""
        text = self.texts[slot]
        self.verified.append((text, text.chain, text.refused, len(text.tokens)))
        text.chain, text.refused = [], None
        text.extend(tokens)

    def learn(self, total: Work) -> None:
        """See `Drafter`."""
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
        """See `Drafter`."""
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

    def proposed(self, slot: int, more: Sequence[int]) -> list[tuple[int, float]]:
        """See `Drafter`."""
        text = self.texts[slot]
        length = len(text.tokens)
        for token in more:
            text.append(token)
        found = [(one.token, self.mixer.chance[one.kind]) for one in self.proposals(text)]
        text.cut(length)
        return found

    def chain_of(self, slot: int) -> list[tuple[int, float]]:
        """See `Drafter`."""
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
