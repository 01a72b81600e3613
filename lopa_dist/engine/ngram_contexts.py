"""Contexts of drafts from text: the parts of the text before a token from which it is predicted.

Batch jobs repeat phrases. They also repeat templates, with other names and numbers each time. So there are two kinds of
contexts. One tells which token comes next. The other tells how far back the next token last occurred: it predicts what
a template repeats of its own text, whatever that text is. The parts of a context are tokens before the place that it
predicts, or how far back these tokens had last occurred.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

TOKEN, BACK = range(2)  # kinds of what a context tells, and of its parts
REACH = 128  # how many tokens back an earlier occurrence is looked for
PARTS = 5  # the most parts of a context


class NgramContext(NamedTuple):
    """A context: what it tells, and its parts, each with its place (counted back from the text's end) and its kind."""

    tells: int
    parts: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        """Return how many tokens a text must have for this context."""
        return max(place for place, _ in self.parts)


NGRAM_CONTEXTS = tuple(
    NgramContext(tells, tuple((place, kind) for place, kind in enumerate(parts, 1) if kind is not None))
    for tells, parts in (
        (TOKEN, (TOKEN, TOKEN)),
        (TOKEN, (TOKEN, TOKEN, TOKEN, TOKEN, TOKEN)),
        (TOKEN, (None, TOKEN, TOKEN, TOKEN)),
        (TOKEN, (TOKEN, TOKEN, BACK)),
        (BACK, (None, TOKEN, TOKEN, TOKEN)),
        (BACK, (TOKEN, BACK)),
        (BACK, (BACK, BACK, BACK, BACK)),
    )
)


def back_of(tokens: Sequence[int], number: int) -> int:
    """Return how far before token `number` the same token last occurred; 0: not within `REACH` tokens."""
    token = tokens[number]
    for back in range(1, min(number, REACH) + 1):
        if tokens[number - back] == token:
            return back
    return 0


def keys(tokens: Sequence[int], backs: Sequence[int], end: int) -> list[int]:
    """Return the key of each context at the place `end`; 0: the text before it is too short for the context.

    Args:
        tokens, backs: the text's tokens, and how far back each had last occurred.
        end: how many tokens come before the place.
    """
    return [
        hash((number, *((backs if kind else tokens)[end - place] for place, kind in context.parts))) or 1
        if end >= context.length
        else 0
        for number, context in enumerate(NGRAM_CONTEXTS)
    ]
