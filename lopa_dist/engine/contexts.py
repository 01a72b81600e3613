"""What of the text before a token may tell it: the contexts of drafts from text.

In batch jobs phrases come back, and templates do, in which names and numbers are others each time. So contexts are of
two kinds. One tells which token comes next. The other tells how far back the next token has stood before: what a
template repeats of its own text, whatever it is. The parts of a context are tokens, or how far back these had stood.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

TOKEN, BACK = range(2)  # of what a context tells, and of what its parts are
REACH = 128  # tokens in which is looked for an earlier one
PARTS = 5  # of a context at most


class Context(NamedTuple):
    """A context: what it tells, and its parts, each as a place counted from the text's end and a kind."""

    tells: int
    parts: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        """Return how many tokens a text must have."""
        return max(place for place, _ in self.parts)


CONTEXTS = tuple(
    Context(tells, tuple((place, kind) for place, kind in enumerate(parts, 1) if kind is not None))
    for tells, parts in (
        (TOKEN, (TOKEN,)),
        (TOKEN, (TOKEN, TOKEN)),
        (TOKEN, (TOKEN, TOKEN, TOKEN)),
        (TOKEN, (TOKEN, TOKEN, TOKEN, TOKEN, TOKEN)),
        (TOKEN, (None, TOKEN, TOKEN, TOKEN)),
        (BACK, (TOKEN, TOKEN)),
        (BACK, (None, TOKEN, TOKEN)),
        (BACK, (None, TOKEN, TOKEN, TOKEN)),
        (BACK, (TOKEN, BACK)),
        (BACK, (BACK, TOKEN, TOKEN)),
        (BACK, (BACK, BACK, BACK)),
        (BACK, (BACK, BACK, BACK, BACK)),
    )
)


def back_of(tokens: Sequence[int], number: int) -> int:
    """Return how far before token `number` the same one stands; 0: not among the last `REACH` tokens."""
    token = tokens[number]
    for back in range(1, min(number, REACH) + 1):
        if tokens[number - back] == token:
            return back
    return 0


def keys(tokens: Sequence[int], backs: Sequence[int], end: int) -> list[int]:
    """Return a key for each context of the place `end`; 0: the text is too short for it.

    Args:
        tokens, backs: of the text, and how far back each had stood.
        end: how many tokens stand before the place.
    """
    return [
        hash((number, *((backs if kind else tokens)[end - place] for place, kind in context.parts))) or 1
        if end >= context.length
        else 0
        for number, context in enumerate(CONTEXTS)
    ]
