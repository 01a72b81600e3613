"""The drafter in C: the same drafts as `Drafter`'s, for all sequences of a step in one call, at about 2 us each."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lopa_dist.c_library import DOUBLE, INT, LONG, P, Unavailable, load_or_why, memory
from lopa_dist.decode import HostState
from lopa_dist.engine.draft_kinds import HOPES, MASK_VOTER, OF_MASKS, SOURCES, VOTERS
from lopa_dist.engine.drafter import NOTHING, REMEMBERED, Drafter, Due, Masks
from lopa_dist.engine.mixer import CHANCES, LEANS, Mixer
from lopa_dist.engine.ngram_contexts import NGRAM_CONTEXTS, PARTS
from lopa_dist.engine.ngrams import MOST
from lopa_dist.engine.work import Work
from lopa_dist.ragged import Ints

SOURCE = Path(__file__).with_name("drafter.c")
ENTRY_BYTES = 64  # of a table's entry, including its share of the room that the table keeps free
FUNCTIONS = {
    "drafter_new": (P, (LONG, LONG, P, LONG, P, LONG, P, P, P, P, P, P, P)),
    "drafter_free": (None, (P,)),
    "drafter_admit": (None, (P, LONG, P, LONG, LONG)),
    "drafter_leave": (None, (P, LONG)),
    "drafter_hear": (None, (P, P, LONG, P, P, LONG, P, P, LONG, P, P, P, LONG)),
    "drafter_remember": (None, (P, P, LONG, LONG)),
    "drafter_proposed": (LONG, (P, LONG, P, LONG, P, P)),
    "drafter_dropped": (LONG, (P,)),
    "drafter_num_verified": (LONG, (P,)),
    "drafter_verifying": (LONG, (P, LONG, P, P)),
    "drafter_learn": (None, (P, P, P)),
    "drafter_draft_due": (LONG, (P, P, P, P, P, LONG, P, DOUBLE, P, P, P, LONG, INT, P, P)),
    "drafter_chain": (LONG, (P, LONG, P, P)),
}


@cache
def found() -> ctypes.CDLL | str:
    """Return the C library, or why there is none."""
    return load_or_why(SOURCE, FUNCTIONS)


def fault() -> str | None:
    """Return why the drafter in C cannot be used here; None: it can."""
    library = found()
    return library if isinstance(library, str) else None


def context_rows() -> Ints:
    """Return the contexts as C reads them, one row each: `tells`, length, number of parts, their places and kinds."""
    rows = np.zeros((len(NGRAM_CONTEXTS), 3 + 2 * PARTS), np.int64)
    for row, context in zip(rows, NGRAM_CONTEXTS, strict=True):
        count = len(context.parts)
        row[:3] = context.tells, context.length, count
        row[3 : 3 + count], row[3 + PARTS : 3 + PARTS + count] = np.transpose(context.parts)
    return rows


def numbers(values: Sequence[int]) -> Ints:
    """Return integers as an array that C can read."""
    return np.ascontiguousarray(values, np.int64)


class ArrayMixer(Mixer):
    """A mixer whose numbers are arrays that C reads and writes."""

    def __init__(self, voters: int, hope: Sequence[float], trusted: int) -> None:
        super().__init__(voters, hope, trusted)
        for name in ("tried", "right", "chance", "weights"):
            setattr(self, name, np.array(getattr(self, name)))


class CDrafter(Drafter):
    """A `Drafter` whose texts and table are in C."""

    def __init__(self, eos_ids: Sequence[int], most: int, masks: bool, entries: int = MOST) -> None:
        super().__init__(eos_ids, most, masks, ArrayMixer(VOTERS, HOPES, trusted=MASK_VOTER))
        self.entries = entries
        self.works: dict[int, Work] = {}  # by slot
        self.left: list[Work] = []  # of the texts that have left since the last `learn`
        library = found()
        if isinstance(library, str):
            raise Unavailable(library)
        self.library = library
        self.hope, self.leans, self.chances = np.array(HOPES), np.array(LEANS), np.array(CHANCES)
        mixer, eos, contexts = self.mixer, numbers(sorted(self.eos_ids)), context_rows()
        arrays = mixer.tried, mixer.right, mixer.chance, mixer.weights, self.hope, self.leans, self.chances
        self.own = self.library.drafter_new(
            entries, most, eos.ctypes.data, len(eos), contexts.ctypes.data, len(NGRAM_CONTEXTS),
            *(np.asarray(array).ctypes.data for array in arrays),
        )  # fmt: skip

    def __del__(self) -> None:
        if own := getattr(self, "own", None):
            self.library.drafter_free(own)
            self.own = None

    def inherit(self, other: Drafter) -> None:
        """See `Drafter`. Contents are swapped with `other`, because C holds pointers to the arrays."""
        assert isinstance(other, CDrafter)
        for name in ("own", "hope", "leans", "chances", "mixer", "works", "left", "full"):
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, theirs)
            setattr(other, name, mine)
        self.mixer.forget(OF_MASKS)

    def clear(self) -> None:
        """See `Drafter`."""
        for slot in list(self.works):
            self.leave(slot)

    def remember(self, text: Sequence[int], begin: int = 0) -> None:
        """See `Drafter`."""
        tokens = numbers(text)
        self.library.drafter_remember(self.own, memory(tokens), len(tokens), begin)
        self.tell_of_room()

    def full_bytes(self) -> int | None:
        """See `Drafter`."""
        return 2 * self.entries * ENTRY_BYTES if self.library.drafter_dropped(self.own) else None

    def admit(self, slot: int, prompt: Sequence[int], work: Work) -> None:
        """See `Drafter`."""
        tokens = numbers(prompt)
        self.library.drafter_admit(self.own, slot, memory(tokens), len(tokens), REMEMBERED)
        self.works[slot] = work

    def leave(self, slot: int) -> None:
        """See `Drafter`."""
        self.library.drafter_leave(self.own, slot)
        self.left.append(self.works.pop(slot))

    def hear(
        self, slots: Ints, written: Ints, counts: Ints, masks: Masks, token: Ints = NOTHING, bits: Ints = NOTHING
    ) -> None:
        """See `Drafter`."""
        slots, written, counts = (np.ascontiguousarray(x, np.int64) for x in (slots, written, counts))
        of_masks: tuple[Any, ...] = (None, None, 0, None, None, None, 0)
        if self.masks:
            token, bits = (np.ascontiguousarray(x, np.int64) for x in (token, bits))
            of_masks = (
                memory(token), memory(bits), token.shape[1], memory(masks.token), memory(masks.probability),
                memory(masks.counts), masks.token.shape[1],
            )  # fmt: skip
        self.library.drafter_hear(
            self.own, memory(slots), len(slots), memory(written), memory(counts), written.shape[1], *of_masks
        )

    def verifying(self) -> list[list[tuple[int, int]]]:
        """See `Drafter`."""
        found = []
        for number in range(self.library.drafter_num_verified(self.own)):
            tokens, sources = np.zeros((2, self.most), np.int64)
            count = self.library.drafter_verifying(self.own, number, memory(tokens), memory(sources))
            found.append(list(zip(tokens[:count].tolist(), sources[:count].tolist(), strict=True)))
        return found

    def learn(self, total: Work) -> None:
        """See `Drafter`."""
        works, self.left = [total, *self.left], []
        counts = np.zeros((len(works), 2, len(SOURCES)), np.int64)
        self.library.drafter_learn(self.own, memory(counts[0]), memory(counts[1:]))
        for work, (verified, accepted) in zip(works, counts.tolist(), strict=True):
            for source, (tried, right) in enumerate(zip(verified, accepted, strict=True)):
                if tried:
                    work.verified_from[source] += tried
                if right:
                    work.accepted_from[source] += right
        self.tell_of_room()

    def draft_due(
        self, due: NDArray[np.bool_], host: HostState, places: Ints, worth: float, masks: Masks, from_text: bool
    ) -> Due:
        """See `Drafter`."""
        most, m = len(due), self.most
        made = np.empty(most * (4 + m + 2 * (2 * m + 2)), np.int64)
        ends: NDArray[np.float64] = np.empty((most, m + 1))
        n = self.library.drafter_draft_due(
            self.own, memory(due), memory(host.done), memory(host.limit), memory(host.complete), most, memory(places),
            worth, memory(masks.token), memory(masks.probability), memory(masks.counts), masks.token.shape[1],
            from_text, memory(made), memory(ends),
        )  # fmt: skip
        slots, room, counts, eos = made[: 4 * n].reshape(4, n)
        tokens, change = made[4 * n : (4 + m) * n].reshape(n, m), made[(4 + m) * n : (4 + m + 2 * (2 * m + 2)) * n]
        return Due(slots, room, counts, eos, tokens, ends[:n], change.reshape(2, -1))

    def chain_of(self, slot: int) -> list[tuple[int, float]]:
        """See `Drafter`."""
        tokens, chances = np.zeros(self.most, np.int64), np.zeros(self.most)
        count = self.library.drafter_chain(self.own, slot, memory(tokens), memory(chances))
        return list(zip(tokens[:count].tolist(), chances[:count].tolist(), strict=True))

    def proposed(self, slot: int, more: Sequence[int]) -> list[tuple[int, float]]:
        """See `Drafter`."""
        after, tokens, chances = numbers(more), np.zeros(VOTERS, np.int64), np.zeros(VOTERS)
        count = self.library.drafter_proposed(
            self.own, slot, memory(after), len(after), memory(tokens), memory(chances)
        )
        return list(zip(tokens[:count].tolist(), chances[:count].tolist(), strict=True))
