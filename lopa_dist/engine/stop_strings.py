"""Sequences end once their text has a stop string, so that nothing is generated that would be cut off.

Only tokens that are final count: those of complete blocks, or verified ones. Ending early does not change where the
finished text is cut: it is cut at the stop string that is complete first, which it already has (`finished_text`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

TextOf = Callable[[Sequence[int]], str]
MARGIN = 8  # more tokens that are decoded before a possible stop string: some tokens have no character of their own


def has_stop(text_of: TextOf, tokens: Sequence[int], seen: int, stops: Sequence[str]) -> bool:
    """Return whether a text has one of the stop strings.

    Only the text's end is decoded, and all of it if the end has one, so a long answer is not decoded again in every
    step.

    Args:
        text_of: decodes tokens.
        tokens: of the text.
        seen: how many of the first tokens are known to have none.
        stops: the stop strings; not empty.
    """

    def has(tokens: Sequence[int]) -> bool:
        text = text_of(tokens)
        return any(stop in text for stop in stops)

    longest = max(len(stop.encode()) for stop in stops)  # a token may be a byte, or more
    end = tokens[max(0, seen - MARGIN - longest) :]
    return has(end) and has(tokens)
