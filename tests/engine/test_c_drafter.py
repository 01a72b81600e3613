"""The drafter in C drafts what the one in Python does, and learns the same."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lopa_dist.decode import HostState
from lopa_dist.engine import c_drafter, mixer
from lopa_dist.engine import ngram_contexts as contexts
from lopa_dist.engine.c_drafter import CDrafter
from lopa_dist.engine.draft_kinds import DEPTHS, LEVELS, MASK_VOTER, MASKS, MATCH, OF_MASKS, OWN, SOURCES, TEXT, VOTERS
from lopa_dist.engine.drafter import Masks
from lopa_dist.engine.drafters import drafter_for
from lopa_dist.engine.ngrams import COUNT, NGrams
from lopa_dist.engine.plain_drafter import PlainDrafter
from lopa_dist.engine.work import Work
from lopa_dist.models.transformer import Transformer
from lopa_dist.ragged import Ints
from tests.engine.test_causal import causal

pytestmark = pytest.mark.skipif(c_drafter.fault() is not None, reason=f"no C here: {c_drafter.fault()}")


SLOTS = 10
OF_MASK_VOTER = MASK_VOTER, VOTERS + MASK_VOTER  # its weights
NOBODY = 9  # a slot without a text, which takes part in steps as an idle one does


def known(**fields: Ints) -> HostState:
    """What the host knows; what is not given is 0."""
    nothing = np.zeros_like(next(iter(fields.values())))
    return HostState(**dict.fromkeys(HostState._fields, nothing) | fields)


class Both:
    """Two drafters that are told the same, and must do the same."""

    def __init__(self, seed: int, most: int, masks: bool, entries: int) -> None:
        self.random, self.most = random.Random(seed), most
        self.one, self.other = PlainDrafter([0, 9], most, masks), CDrafter([0, 9], most, masks, entries)
        self.one.table = NGrams(entries)
        self.works: dict[int, tuple[Work, Work]] = {}
        self.of_all = Work(), Work()
        self.left: list[tuple[Work, Work]] = []
        self.masks = [
            Masks(np.zeros((SLOTS, most), np.int64), np.zeros((SLOTS, most)), np.zeros(SLOTS, np.int64))
            for _ in range(2)
        ]

    def tokens(self, count: int) -> list[int]:
        return [self.random.choice([1, 1, 2, 3, 4, 9, 10**5]) for _ in range(count)]

    def admit(self, slot: int) -> None:
        prompt = self.tokens(self.random.randint(1, 12))
        self.works[slot] = Work(), Work()
        for drafter, work in zip((self.one, self.other), self.works[slot], strict=True):
            drafter.admit(slot, prompt, work)

    def due(self) -> tuple[NDArray[np.bool_], HostState]:
        """Sequences for which drafts are due, and what the host knows; some others are done, or not due."""
        chosen = self.random.sample(sorted(self.works), self.random.randint(1, len(self.works)))
        due, done = np.zeros(SLOTS, bool), np.ones(SLOTS, np.int64)
        due[chosen], done[chosen] = True, 0
        due[NOBODY] = True
        done[[slot for slot in self.works if slot not in chosen]] = self.random.randint(0, 1)
        complete = np.array([self.random.randint(0, 9) for _ in range(SLOTS)])
        limit = complete + np.array([self.random.randint(1, self.most + 4) for _ in range(SLOTS)])
        return due, known(done=done, complete=complete, limit=limit)

    def step(self) -> None:
        """Draft for some sequences, write what was drafted in part, and learn from it."""
        due, host = self.due()
        slots = (due & (host.done == 0)).nonzero()[0]
        count, wide = len(slots), self.most
        predicted = np.array([self.tokens(wide) for _ in slots])
        predicted[np.arange(wide) >= np.array([[self.random.randint(0, wide)] for _ in slots])] = -1
        chances = np.array([[self.random.random() for _ in range(wide)] for _ in slots], np.float32)
        worth, from_text = self.random.choice([0.0, 0.1, 0.4]), self.random.random() < 0.9
        places = np.array([[7, 900, 2000, 3000], [40, 3 * wide, 1, 1]])
        first, second = (
            d.draft_due(due, host, places, worth, masks, from_text)
            for d, masks in zip((self.one, self.other), self.masks, strict=True)
        )
        for mine, theirs in zip(first, second, strict=True):
            assert np.array_equal(mine, theirs)
        for slot in slots.tolist():
            assert self.one.chain_of(slot) == self.other.chain_of(slot)
            assert self.one.proposed(slot, [3, 1]) == self.other.proposed(slot, [3, 1])
            paths = [d.paths(slot, 3, self.masks[0].of(slot)) for d in (self.one, self.other)]
            assert paths[0] == paths[1]
        written, counts = np.full((count, self.most + 1), -1), np.zeros(count, np.int64)
        for number in range(count):
            right = self.random.randint(0, int(first.counts[number]))
            written[number, :right] = first.tokens[number, :right]
            written[number, right] = self.random.choice([1, 2, 3, 9])
            counts[number] = right + 1
        for drafter, masks in zip((self.one, self.other), self.masks, strict=True):
            heard = np.append(slots, NOBODY)
            rows = [np.vstack([x, x[-1:]]) for x in (written, predicted, chances.view(np.int32).astype(np.int64))]
            drafter.hear(heard, rows[0], np.append(counts, 1), masks, *(rows[1:] if drafter.masks else ()))
        for mine, theirs in zip(*self.masks, strict=True):
            assert np.array_equal(mine, theirs)
        assert self.one.verifying() == self.other.verifying()
        if self.random.random() < 0.3:  # a sequence may end before it is learned from
            slot = int(self.random.choice(slots))
            for drafter in (self.one, self.other):
                drafter.leave(slot)
            self.left.append(self.works.pop(slot))
        if self.random.random() < 0.7:
            for drafter, total in zip((self.one, self.other), self.of_all, strict=True):
                drafter.learn(total)
            self.equal()

    def equal(self) -> None:
        for name in ("tried", "right", "chance", "weights"):
            assert np.array_equal(getattr(self.one.mixer, name), getattr(self.other.mixer, name)), name
        for mine, theirs in [self.of_all, *self.left]:
            assert mine.verified_from == theirs.verified_from
            assert mine.accepted_from == theirs.accepted_from


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    most=st.integers(1, 9) | st.just(20),
    masks=st.booleans(),
    entries=st.sampled_from([3, 40, 10**6]),
)
def test_it_does_what_the_one_in_python_does(seed: int, most: int, masks: bool, entries: int) -> None:
    both = Both(seed, most, masks, entries)
    for _ in range(14):
        while len(both.works) < 4:
            both.admit(next(slot for slot in range(NOBODY) if slot not in both.works))
        both.step()


def test_a_table_is_inherited() -> None:
    """And how sure texts are; what was counted of masks is forgotten."""
    found, nowhere = [], np.zeros((2, 4), np.int64)
    for kind in (PlainDrafter, CDrafter):
        old, new, fresh = kind([0], 4, True), kind([0], 4, True), kind([0], 4, True)
        old.remember([1, 2, 3, 4])
        old.admit(0, [1], Work())
        masks, bits = Masks(np.array([[2]]), np.array([[0.9]]), np.array([1])), np.array([[0x3F666666]])  # of 0.9
        for token in (2, 3, 5, 2, 3):
            old.draft_due(np.array([True]), known(limit=np.array([3])), nowhere, 0.0, masks, True)
            old.hear(np.array([0]), np.array([[token]]), np.array([1]), masks, masks.token, bits)
            old.learn(Work())
        new.inherit(old)
        new.clear()
        new.admit(1, [1, 2], Work())
        none = Masks(np.zeros((2, 1), np.int64), np.zeros((2, 1)), np.zeros(2, np.int64))
        drafted = new.draft_due(np.array([False, True]), known(limit=np.array([5, 5])), nowhere, 0.0, none, True)
        mine, begun = new.mixer, fresh.mixer
        found.append([*(x.tolist() for x in drafted), list(mine.chance), [list(x) for x in mine.weights]])
        assert np.array_equal(mine.chance[OF_MASKS:], begun.chance[OF_MASKS:])
        assert not np.array_equal(mine.chance[:OF_MASKS], begun.chance[:OF_MASKS])
        for own, first in zip(mine.weights, begun.weights, strict=True):
            assert [own[i] for i in OF_MASK_VOTER] == [first[i] for i in OF_MASK_VOTER]
    assert found[0] == found[1]


@pytest.mark.parametrize("in_c", [False, True])
def test_a_full_table_is_said_once(caplog: pytest.LogCaptureFixture, in_c: bool) -> None:
    drafter = CDrafter([0], 4, False, entries=10) if in_c else PlainDrafter([0], 4, False)
    drafter.table = NGrams(10)
    with caplog.at_level(logging.INFO, "lopa_dist"):
        for first in range(1, 200):
            drafter.remember([first, first + 1, first + 2])
    assert [record.message.split(" (")[0] for record in caplog.records] == ["the table of drafts from text is full"]


def test_an_engine_has_it(small_model: Transformer) -> None:
    assert isinstance(drafter_for(causal(drafts=4), small_model.config), CDrafter)


def test_without_a_compiler_python_drafts(small_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_drafter, "fault", lambda: "there is no C compiler")
    assert type(drafter_for(causal(drafts=4), small_model.config)) is PlainDrafter


def test_c_has_the_numbers_of_python() -> None:
    source = c_drafter.SOURCE.read_text(encoding="utf-8")
    for text in (
        f"COUNT = {COUNT}, MATCH = {MATCH}, LEVELS = {LEVELS}, DEPTHS = {DEPTHS}, SOURCES = {len(SOURCES)}, ",
        f"MASKS = {MASKS}, TEXT = {TEXT}, OWN = {OWN} ",
        f"TOKEN = {contexts.TOKEN}, BACK = {contexts.BACK}, REACH = {contexts.REACH}, PARTS = {contexts.PARTS}, ",
        f"DIFFERENT = {mixer.DIFFERENT}, STEPS = {mixer.STEPS}, SCALE = {mixer.SCALE}, WIDE = {mixer.WIDE} ",
        f"DECAY = {mixer.DECAY}, RATE = {mixer.RATE}, DOUBT = {mixer.DOUBT};",
    ):
        assert text in source
    assert int(source.split("MOST_VOTERS = ")[1].split(" ")[0]) >= VOTERS
