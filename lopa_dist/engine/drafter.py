"""Drafts of causal models from several sources: masks, the text that the job has written, and each request's own text.

No draft changes a text, so a draft may come from anywhere, and a batch job repeats itself: templates, phrases, samples
of one prompt, copies from the prompt. Three sources propose the next token of a chain, one draft after another:

- *masks*: what the masks behind the last verified token predicted, as far as there were any;
- *text*: what most often followed the last tokens in the answers that this replica has written (`NGrams`;
  SuffixDecoding, arXiv 2411.04975, does that for a server);
- *own*: what followed the last tokens where they stood before, in the request's own prompt and answer (prompt lookup).

The surest source drafts. How sure a source is, is measured while the job runs: the share of its earlier proposals of
the same kind (order of the n-gram and its count; length of the repeated passage; depth and probability of the mask)
that the model then wrote, where all drafts before them had been right. Nothing but tokens decides, so all ranks of a
replica propose the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.engine.ngrams import COUNT, ENTRY_BYTES, LONGEST, ORDERS, NGrams
from lopa_dist.engine.work import Work
from lopa_dist.models.config import ModelConfig
from lopa_dist.ragged import Ints

log = logging.getLogger("lopa_dist")

SOURCES = ("masks", "text", "own")
MASKS, TEXT, OWN = range(len(SOURCES))

DECAY = 0.998  # weight of a proposal of the same kind, one proposal later
HOPE = 0.5  # probability that the text's proposal is right, before any of its kind was made; a mask's is its own
SURE = 0.85  # at this probability no shorter context is looked at
MATCH = 8  # tokens of a repeated passage that are compared at most
REMEMBERED = 4096  # tokens of a prompt in which passages are looked for: its last ones

# kinds of proposals, numbered: text by order and count, own by the passage's length, masks by depth and probability
BITS = [min(count.bit_length(), 7) for count in range(COUNT + 1)]
OF_OWN = 8 * (LONGEST + 1)
OF_MASKS = OF_OWN + MATCH + 1
LEVELS = 8  # of a mask's probability p: how many times 1 - p halves from 1
DEPTHS = 16
OF_BOTH = OF_MASKS + 2 * DEPTHS * LEVELS  # a mask and the text propose the same
KINDS = OF_BOTH + 2 * LEVELS


NOTHING: Ints = np.zeros((0, 0), np.int64)  # predicted by masks

Draft: TypeAlias = tuple[int, float, int, int, int, int, int]
"""A draft of a chain: its token, the chance that the model writes it if it wrote those before it, and its source; what
the texts proposed at its place, token and kind, and what a mask did. A token of -1: nothing."""


class Masks(NamedTuple):
    """What masks predicted for the next places of each slot's sequence; W is how many places they may reach."""

    token: Ints  # [S, W]
    probability: NDArray[np.float64]  # [S, W]
    counts: Ints  # [S] places for which there is a prediction

    def of(self, slot: int) -> list[tuple[int, float]]:
        """Return the tokens and probabilities for one sequence."""
        reach = self.counts[slot]
        return list(zip(self.token[slot, :reach].tolist(), self.probability[slot, :reach].tolist(), strict=True))

    def note(self, slots: Ints, token: Ints, bits: Ints) -> None:
        """Take what masks predicted in a step.

        Args:
            slots: ``[n]`` of its sequences.
            token: ``[n, w]``; -1 from the first place on for which there is none.
            bits: ``[n, w]`` of their probabilities.
        """
        reach = min(token.shape[1], self.token.shape[1])
        self.token[slots, :reach] = token[:, :reach]
        self.probability[slots, :reach] = bits[:, :reach].astype(np.int32).view(np.float32)
        self.counts[slots] = (token[:, :reach] >= 0).cumprod(1).sum(1)


class Drafted(NamedTuple):
    """What was drafted for sequences; m is `Drafter.most`."""

    tokens: Ints  # [n, m]
    counts: Ints  # [n] drafts
    ends: NDArray[np.float64]  # [n, m + 1] chance that what is accepted of the chain ends at each depth
    expects_eos: NDArray[np.bool_]  # [n] whether an end-of-text was proposed behind the chain


@dataclass
class Text:
    """The text of a sequence in flight, and what was drafted for it."""

    tokens: list[int]  # of the prompt and the answer
    counted: int  # tokens that were counted in the table
    work: Work  # in which its drafts are counted
    index: dict[tuple[int, int], int] = field(default_factory=dict)  # by two tokens: where the next one stands, lastly
    chain: list[Draft] = field(default_factory=list)  # that the next forward verifies, or the last one did
    ends: list[float] = field(default_factory=list)  # probabilities that what is accepted of it ends at each depth
    expects_eos: bool = False  # whether an end-of-text was proposed behind the chain

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        texts, index = self.tokens, self.index
        for token in tokens:
            if len(texts) > 1:
                index[texts[-2], texts[-1]] = len(texts)
            texts.append(token)


class Drafter:
    """Drafts for the sequences of one replica.

    Args:
        eos_ids: tokens that end a text; they are not drafted.
        most: drafts of a chain.
        masks: whether what masks predict may be drafted.
    """

    def __init__(self, eos_ids: Sequence[int], most: int, masks: bool) -> None:
        self.eos_ids, self.most, self.masks = frozenset(eos_ids), most, masks
        self.table = NGrams()
        self.tried, self.right = [0.0] * KINDS, [0.0] * KINDS
        self.hope = [HOPE] * OF_MASKS + [1 - 0.75 * 0.5 ** (kind % LEVELS) for kind in range(KINDS - OF_MASKS)]
        self.chance = self.hope.copy()
        self.texts: dict[int, Text] = {}  # by slot
        self.verified: list[tuple[Text, list[Draft], int]] = []  # chains of the last step, to learn from

    def clear(self) -> None:
        """Forget the texts of all slots."""
        self.texts.clear()

    def remember(self, text: Sequence[int], begin: int = 0) -> None:
        """Add the tokens of a text from number `begin` on to the table."""
        full = self.table.dropped
        self.table.add(text, begin)
        if self.table.dropped and not full:
            self.say_full(2 * self.table.most * ENTRY_BYTES)

    def say_full(self, size: int) -> None:
        """Log that the table has `size` bytes and is full."""
        log.info(
            "the table of drafts from text is full (%d MB): from now on what was not used for long is dropped",
            size >> 20,
        )

    def inherit(self, other: Drafter) -> None:
        """Take over the table of another drafter, and how sure its texts were; masks are others now."""
        self.table = other.table
        for own, theirs in ((self.tried, other.tried), (self.right, other.right), (self.chance, other.chance)):
            own[:OF_MASKS] = theirs[:OF_MASKS]

    def admit(self, slot: int, prompt: Sequence[int], work: Work) -> None:
        """Begin the text of a request, whose drafts are counted in `work` when it has left and was learned from."""
        text = Text([], len(prompt), work)
        text.tokens.extend(prompt[: max(len(prompt) - REMEMBERED, 0)])
        text.extend(prompt[len(text.tokens) :])
        self.texts[slot] = text

    def leave(self, slot: int) -> None:
        """Forget the text of a slot that becomes free, once it was learned from."""
        del self.texts[slot]

    def hear(
        self, slots: Ints, written: Ints, counts: Ints, masks: Masks, token: Ints = NOTHING, bits: Ints = NOTHING
    ) -> None:
        """Append what a step has written, and note in `masks` what masks predicted behind it, if they draft.

        Args:
            slots: ``[n]`` of the step; those of no text are left out.
            written: ``[n, D]`` tokens, of each sequence as many as `counts` ``[n]`` says.
            counts: new tokens.
            masks: of all slots.
            token, bits: as of `Masks.note`.
        """
        for slot, tokens, count in zip(slots.tolist(), written.tolist(), counts.tolist(), strict=True):
            if slot in self.texts:
                self.wrote(slot, tokens[:count])
        if self.masks:
            masks.note(slots, token, bits)

    def verifying(self) -> list[list[tuple[int, int]]]:
        """Return the chains of the last step that wait to be learned from: the drafts' tokens and sources."""
        return [[(token, source) for token, _, source, *_ in chain] for _, chain, _ in self.verified]

    def wrote(self, slot: int, tokens: Sequence[int]) -> None:
        """Append the tokens that a step has written."""
        text = self.texts[slot]
        self.verified.append((text, text.chain, len(text.tokens)))
        text.chain = []
        text.extend(tokens)

    def learn(self, total: Work) -> None:
        """Learn from the last step: how good its proposals were, and its text. Count its drafts in `total`, too.

        It may be called late, as while a device computes: no proposal needs it.
        """
        verified, self.verified = self.verified, []
        for text, chain, begin in verified:
            tokens, sources, right = text.tokens, [source for _, _, source, *_ in chain], 0
            for (draft, _, _, text_token, text_kind, mask, mask_kind), token in zip(
                chain, tokens[begin : begin + len(chain)], strict=False
            ):
                if text_token >= 0:
                    self.count(text_kind, text_token == token)
                if mask >= 0:
                    self.count(mask_kind, mask == token)
                if draft != token:
                    break
                right += 1
            for work in (total, text.work):
                work.verified_from.update(sources)
                work.accepted_from.update(sources[:right])
            self.remember(tokens, text.counted)
            text.counted = len(tokens)

    def count(self, kind: int, right: bool) -> None:
        """Count a proposal whose place was reached."""
        self.tried[kind] = tried = DECAY * self.tried[kind] + 1
        self.right[kind] = accepted = DECAY * self.right[kind] + right
        self.chance[kind] = (accepted + self.hope[kind]) / (tried + 1)

    def draft_all(self, slots: Ints, most: Ints, worth: float, masks: Masks, from_text: bool = True) -> Drafted:
        """Draft chains for several sequences: the arguments of `draft` for each, but `masks` of all slots."""
        count = len(slots)
        tokens, counts = np.zeros((count, self.most), np.int64), np.zeros(count, np.int64)
        ends, eos = np.zeros((count, self.most + 1)), np.zeros(count, bool)
        for number, slot in enumerate(slots.tolist()):
            text = self.draft(slot, int(most[number]), worth, masks.of(slot), from_text)
            counts[number], eos[number] = len(text.chain), text.expects_eos
            tokens[number, : len(text.chain)] = [draft[0] for draft in text.chain]
            ends[number, : len(text.ends)] = text.ends
        return Drafted(tokens, counts, ends, eos)

    def draft(
        self, slot: int, most: int, worth: float, masks: Sequence[tuple[int, float]] = (), from_text: bool = True
    ) -> Text:
        """Draft a chain for a sequence, `Text.chain`.

        Args:
            slot: of the sequence.
            most: drafts.
            worth: probability that a draft is reached and right, below which it is not worth a row.
            masks: tokens that masks predicted for the chain's places, and their probabilities.
            from_text: whether text may draft.
        """
        text = self.texts[slot]
        tokens, index, chances = text.tokens, text.index, self.chance
        young, after, old = self.table.young.get, self.table.after, self.table.old
        text.chain, text.ends, text.expects_eos = chain, ends, _ = [], [], False
        context, end = tuple(tokens[-LONGEST:]), len(tokens)
        passage, length = self.passage(text) if from_text else (0, 0)
        on_track, reached = 0, 1.0  # 0 while the chain is what the masks predicted
        known = len(context) * from_text  # last tokens that may stand together in the table
        for depth in range(most if from_text else min(most, len(masks))):
            token, chance, source, kind = -1, 0.0, TEXT, 0
            longest = 0
            for order in range(min(known, LONGEST), 0, -1):
                part = context[-order:]
                entry = young(hash(part)) or (after(part) if old else None)
                if entry:
                    longest = longest or order
                    if (found := chances[8 * order + BITS[entry & COUNT]]) > chance:
                        token, chance, kind = entry >> 8, found, 8 * order + BITS[entry & COUNT]
                        if chance > SURE:
                            break
            known = (longest + 1) * from_text  # with the next token
            if passage and (found := chances[OF_OWN + length]) > chance:
                token, chance, source, kind = tokens[passage], found, OWN, OF_OWN + length
            proposed, mask, mask_kind = token, -1, 0
            if depth < len(masks):
                mask, probability = masks[depth]
                mask_kind = OF_MASKS + (on_track + depth) * LEVELS + level(probability)
                if mask == token:
                    kind = mask_kind = OF_BOTH + LEVELS * (on_track > 0) + level(probability)
                    chance, source = max(chance, chances[kind]), MASKS
                elif chances[mask_kind] > chance:
                    token, chance, source = mask, chances[mask_kind], MASKS
            before, reached = reached, reached * chance
            if token < 0 or reached < worth:
                reached = before
                break
            if token in self.eos_ids:
                text.expects_eos, reached = True, before
                break
            ends.append(before - reached)
            chain.append((token, chance, source, proposed, kind, mask, mask_kind))
            if mask != token:
                on_track = DEPTHS
            if passage and tokens[passage] == token and passage + 1 < end:
                passage, length = passage + 1, min(length + 1, MATCH)
            elif from_text:
                passage, length = index.get((context[-1], token), 0), 2
            context = (*context[-LONGEST + 1 :], token)
        ends.append(reached)
        return text

    def paths(self, slot: int, most: int, masks: Sequence[tuple[int, float]] = ()) -> list[list[int]]:
        """Return other drafts than the chain's, the likeliest first: each takes what another source proposed somewhere.

        Args:
            slot, masks: as of `draft`, which was called before.
            most: paths.

        Returns:
            Tokens, as many as the chain has.
        """
        tokens, drafts = self.tokens_of(slot), self.chain_of(slot)
        chain = [token for token, _ in drafts]
        found: dict[tuple[int, int], float] = {}  # by depth and token
        passage, length = self.passage_of(slot)
        reached, straight = 1.0, True
        for depth, (token, chance) in enumerate(drafts):
            proposed = list(self.in_table([*tokens[-LONGEST:], *chain[:depth]]))
            if passage and straight:
                proposed.append((tokens[passage], self.chance[OF_OWN + length]))
                straight = tokens[passage] == token and passage + 1 < len(tokens)
                passage, length = passage + 1, min(length + 1, MATCH)
            if depth < len(masks):
                proposed.append((masks[depth][0], self.chance[OF_MASKS + depth * LEVELS + level(masks[depth][1])]))
            for other, likely in proposed:
                if other != token and other not in self.eos_ids:
                    found[depth, other] = max(found.get((depth, other), 0.0), reached * likely)
            reached *= chance
        best = sorted(found, key=lambda at: (-found[at], at))[:most]
        return [self.onward(tokens, [*chain[:depth], other], chain) for depth, other in best]

    def onward(self, tokens: list[int], path: list[int], chain: list[int]) -> list[int]:
        """Return `path`, which leaves `chain`, with what the table says further on, and then as the chain goes on."""
        while len(path) < len(chain):
            proposed = max(self.in_table([*tokens[-LONGEST:], *path]), key=lambda one: one[1], default=(-1, 0.0))[0]
            if proposed < 0 or proposed in self.eos_ids:
                break
            path.append(proposed)
        return path + chain[len(path) :]

    def in_table(self, context: list[int]) -> Iterator[tuple[int, float]]:
        """Yield the tokens that the table proposes behind a context, by order, and their chances."""
        for order in ORDERS:
            entry = self.table.after(tuple(context[-order:])) if order <= len(context) else None
            if entry is not None:
                yield entry >> 8, self.chance_of(order, entry & COUNT)

    def chance_of(self, order: int, count: int) -> float:
        """Return how sure the table is behind a context of `order` tokens, whose entry has this count."""
        return self.chance[8 * order + BITS[count]]

    def tokens_of(self, slot: int) -> list[int]:
        """Return the prompt and the text in a slot."""
        return self.texts[slot].tokens

    def chain_of(self, slot: int) -> list[tuple[int, float]]:
        """Return the drafts in a slot, and their chances."""
        return [(token, chance) for token, chance, *_ in self.texts[slot].chain]

    def passage_of(self, slot: int) -> tuple[int, int]:
        """As `passage`, of the text in a slot."""
        return self.passage(self.texts[slot])

    def passage(self, text: Text) -> tuple[int, int]:
        """Return where the passage goes on that stands lastly at the text's end, and how long it is; 0: nowhere."""
        tokens = text.tokens
        if len(tokens) < 2:
            return 0, 0
        at, length = text.index.get((tokens[-2], tokens[-1]), 0), 2
        while 0 < length < MATCH and at > length and tokens[at - length - 1] == tokens[-length - 1]:
            length += 1
        return at, length


def level(probability: float) -> int:
    """Return the level of a mask's probability p: how many times 1 - p is halved, at most 7."""
    rest, halved = 1.0 - probability, 0
    while rest < 0.5 and halved < LEVELS - 1:
        rest, halved = 2 * rest, halved + 1
    return halved


def drafter_for(config: DecodeConfig, model: ModelConfig) -> Drafter | None:
    """Return what drafts for a model as `config` says; None if its masks alone do."""
    if not config.drafts_text:
        return None
    from lopa_dist.engine import c_drafter  # which has what is above

    kind = Drafter if c_drafter.fault() else c_drafter.CDrafter
    return kind(model.eos_ids if config.stop_at_eos else (), config.max_drafts, config.drafts_masks and model.has_mask)
