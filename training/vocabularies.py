"""The vocabularies of the embedded models: all words for which their tokenizers have a token."""

from __future__ import annotations

from lopa_dist.tasks import list_problems as lp
from lopa_dist.tasks import word_problems as wp


def problem_words() -> list[str]:
    """Return every word that a word problem or its answer can have, sorted; each number from 0 to 99 is a word."""
    texts = [*wp.ADD_EVENTS, *wp.SUBTRACT_EVENTS, *wp.MULTIPLY_EVENTS, *wp.STARTS, *wp.QUESTIONS]
    words = {word for text in texts for word in text.split() if not word.startswith("{")}
    for phrases in (
        wp.NAMES, wp.OBJECTS, wp.OPENINGS, wp.CONNECTIVES, wp.HAS, wp.WE, wp.GET, wp.SO, wp.STARTING_TAILS, wp.TAILS,
        wp.ENDINGS, wp.LAST_TAILS,
    ):  # fmt: skip
        words.update(word for phrase in phrases for word in phrase.split())
    return sorted(words | {"+", "-", "x", "=", ",", ".", "?", "####"} | {str(n) for n in range(100)})


def list_words() -> list[str]:
    """Return every word that a list problem or its answer can have, sorted."""
    words = {"complete", "anywhere", "any", "by", ":", lp.BLANK, lp.ROW_END, *lp.SYMBOLS, *lp.CHECKS}
    return sorted(words | {str(n) for n in lp.NUMBERS})
