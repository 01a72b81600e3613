"""What followed which contexts in the texts of a job: a table of bounded size."""

from __future__ import annotations

from collections.abc import Sequence

from lopa_dist.engine.ngram_contexts import NGRAM_CONTEXTS, TOKEN, back_of, keys

COUNT = 255  # the largest count; the low 8 bits of an entry are its count, the bits above are what it tells
MOST = 2**20  # entries of the young table, and of the old one
ENTRY_BYTES = 100  # of a Python dictionary's entry, its two integers included


class NGrams:
    """For each context, what followed it most often, as far as a single count can tell.

    An entry is one integer. It holds what the context tells (a token, or how far back the next token last occurred),
    and how much more often that came than anything else since it took the entry (the majority vote of Boyer and Moore).
    Contexts are identified by their hash. Where two share a hash, a draft may be wrong, but no text.

    There are two tables. When the young one is full, it replaces the old one. What is found in the old one is copied to
    the young one, so the entries that are dropped are those that were not used for long.

    Args:
        most: entries of each table.
    """

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.young: dict[int, int] = {}
        self.old: dict[int, int] = {}
        self.dropped = False  # whether any entries were ever dropped

    def add(self, tokens: Sequence[int], begin: int, backs: Sequence[int] | None = None) -> None:
        """Count the tokens of a text from number `begin` on, each in the contexts before it.

        Args:
            tokens: of the text.
            begin: number of the first token that is counted.
            backs: how far back each token had last occurred; None: they are looked up here.
        """
        young, old = self.young, self.old
        if backs is None:
            backs = [back_of(tokens, number) for number in range(len(tokens))]
        for number in range(begin, len(tokens)):
            told = tokens[number], backs[number]
            for context, key in zip(NGRAM_CONTEXTS, keys(tokens, backs, number), strict=True):
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
        """Return what the table proposes after a text: the number of each context, its token, and the entry's count."""
        found, end = [], len(tokens)
        for number, (context, key) in enumerate(zip(NGRAM_CONTEXTS, keys(tokens, backs, end), strict=True)):
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
