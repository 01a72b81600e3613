"""Which token came after which others in the texts of a job: a table of n-grams, bounded in memory."""

from __future__ import annotations

from collections.abc import Sequence

ORDERS = (6, 5, 4, 3, 2, 1)  # how many tokens an n-gram's context has
LONGEST = ORDERS[0]
COUNT = 255  # the largest count, in the low 8 bits of an entry; the token is above them
MOST = 2**20  # entries, with as many older ones
ENTRY_BYTES = 100  # of a Python dictionary's entry with two integers of its own


class NGrams:
    """For each context of 1 to 6 tokens, the token that followed it most often, as far as a single count can tell.

    An entry is one integer: a token, and how much more often it came than others did since it took the entry (the
    majority vote of Boyer and Moore). Contexts are known by their hash. Where two share one, a draft may be wrong, but
    no text.

    Entries are in two tables. When the young one is full, it replaces the old one, and what is looked up in the old one
    moves to the young one; so what was not used for long goes first.

    Args:
        most: entries of each table.
    """

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.young: dict[int, int] = {}
        self.old: dict[int, int] = {}
        self.dropped = False  # whether entries were dropped, ever

    def add(self, text: Sequence[int], begin: int) -> None:
        """Count the tokens of `text` from number `begin` on, each in the contexts that stand before it."""
        young, old = self.young, self.old
        for number in range(begin, len(text)):
            token = text[number]
            context = tuple(text[max(number - LONGEST, 0) : number])
            for order in ORDERS:
                if order > number:
                    continue
                key = hash(context[-order:])
                entry = young.get(key)
                if entry is None:
                    entry = old.get(key)
                if entry is None:
                    young[key] = token << 8 | 1
                elif entry >> 8 == token:
                    young[key] = entry + (entry & COUNT < COUNT)
                else:
                    young[key] = entry - 1 if entry & COUNT > 1 else token << 8 | 1
        if len(young) > self.most:
            self.dropped |= bool(old)
            self.young, self.old = {}, young

    def after(self, context: tuple[int, ...]) -> int | None:
        """Return the entry of exactly this context, as ``token << 8 | count``; None: there is none."""
        key = hash(context)
        entry = self.young.get(key)
        if entry is None and self.old:
            entry = self.old.get(key)
            if entry is not None:
                self.young[key] = entry
        return entry
