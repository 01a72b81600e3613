"""Kinds of proposals for the next token of a draft, by their number, and the sources that drafts are counted by."""

from __future__ import annotations

from lopa_dist.engine.mixer import Decision
from lopa_dist.engine.ngram_contexts import NGRAM_CONTEXTS, TOKEN
from lopa_dist.engine.ngrams import COUNT

SOURCES = ("masks", "text", "own")
MASKS, TEXT, OWN = range(len(SOURCES))

HOPE = 0.5  # chance of a proposal from text, before any of its kind was made; a mask's comes from its probability
MATCH = 8  # the most tokens of a repeated passage that are compared

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
