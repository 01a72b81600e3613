"""A table of what followed which tokens."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.engine.ngrams import COUNT, LONGEST, ORDERS, NGrams

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=4)


def added(texts: list[list[int]], most: int = 10**6) -> NGrams:
    table = NGrams(most)
    for text in texts:
        table.add(text, 0)
    return table


@given(texts=TEXTS)
def test_a_token_that_followed_more_often_than_all_others_is_found(texts: list[list[int]]) -> None:
    table = added(texts)
    followed: dict[tuple[int, ...], Counter[int]] = {}
    for text in texts:
        for number, token in enumerate(text):
            for order in ORDERS:
                if order <= number:
                    followed.setdefault(tuple(text[number - order : number]), Counter())[token] += 1
    for context, counts in followed.items():
        [(token, count)] = counts.most_common(1)
        entry = table.after(context)
        assert entry is not None
        if 2 * count > counts.total():
            assert entry >> 8 == token
        assert entry >> 8 in counts
        assert 1 <= entry & COUNT <= counts[entry >> 8]
    assert table.after((9,)) is None


@given(texts=TEXTS, cuts=st.lists(st.integers(0, 30), max_size=5))
def test_a_text_may_come_in_parts(texts: list[list[int]], cuts: list[int]) -> None:
    parts = NGrams()
    for text in texts:
        ends = [*sorted(cut for cut in cuts if cut < len(text)), len(text)]
        for begin, end in zip([0, *ends], ends, strict=False):
            parts.add(text[:end], begin)
    assert parts.young == added(texts).young


def test_counts_end() -> None:
    table = added([[5] * 1000])
    assert table.after((5,)) == 5 << 8 | COUNT


def test_the_oldest_go_first() -> None:
    table = NGrams(most=3 * LONGEST)
    table.add([100, 101], 0)
    for first in range(0, 60, 3):
        table.add([first, first + 1, first + 2], 0)
        assert table.after((100,)) == 101 << 8 | 1  # what is used stays
        assert len(table.young) + len(table.old) <= 2 * (3 * LONGEST + 3)
    assert table.dropped
    assert table.after((0,)) is None
    assert table.after((57,)) is not None
