"""What came behind which contexts in the texts of a job: a table that is bounded in memory."""

from __future__ import annotations

from collections.abc import Sequence

from lopa_dist.engine.contexts import CONTEXTS, TOKEN, back_of, keys

COUNT = 255  # the largest count, in the low 8 bits of an entry; what it tells is above them
MOST = 2**20  # entries, with as many older ones
ENTRY_BYTES = 100  # of a Python dictionary's entry with two integers of its own


class NGrams:
    """For each context what came behind it most often, as far as a single count can tell.

    An entry is one integer: a token, or how far back the next one had stood, and how much more often that came than
    others did since it took the entry (the majority vote of Boyer and Moore). Contexts are known by their hash. Where
    two share one, a draft may be wrong, but no text.

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

    def add(self, tokens: Sequence[int], begin: int, backs: Sequence[int] | None = None) -> None:
        """Count the tokens of a text from number `begin` on, each in the contexts that stand before it.

        Args:
            tokens: of the text.
            begin: number of the first one that counts.
            backs: how far back each token had stood; None: it is looked up.
        """
        young, old = self.young, self.old
        if backs is None:
            backs = [back_of(tokens, number) for number in range(len(tokens))]
        for number in range(begin, len(tokens)):
            told = tokens[number], backs[number]
            for context, key in zip(CONTEXTS, keys(tokens, backs, number), strict=True):
                if not key:
                    continue
                came = told[context.tells]
                entry = young.get(key)
                if entry is None:
                    entry = old.get(key)
                if entry is None:
                    young[key] = came << 8 | 1
                elif entry >> 8 == came:
                    young[key] = entry + (entry & COUNT < COUNT)
                else:
                    young[key] = entry - 1 if entry & COUNT > 1 else came << 8 | 1
        if len(young) > self.most:
            self.dropped |= bool(old)
            self.young, self.old = {}, young

    def after(self, tokens: Sequence[int], backs: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return what the table proposes behind a text: the context's number, the token, and the entry's count."""
        found, end = [], len(tokens)
        for number, (context, key) in enumerate(zip(CONTEXTS, keys(tokens, backs, end), strict=True)):
            entry = self.young.get(key)
            if entry is None and self.old:
                entry = self.old.get(key)
                if entry is not None:
                    self.young[key] = entry
            if entry is None:
                continue
            came = entry >> 8
            if context.tells == TOKEN:
                found.append((number, came, entry & COUNT))
            elif 0 < came <= end:
                found.append((number, tokens[end - came], entry & COUNT))
        return found
