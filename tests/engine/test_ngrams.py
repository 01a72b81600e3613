"""A table of what came after which contexts."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.engine.ngram_contexts import BACK, NGRAM_CONTEXTS, REACH, TOKEN, back_of, keys
from lopa_dist.engine.ngrams import COUNT, NGrams

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=4)


def backs_of(text: list[int]) -> list[int]:
    return [back_of(text, number) for number in range(len(text))]


def added(texts: list[list[int]], most: int = 10**6) -> NGrams:
    table = NGrams(most)
    for text in texts:
        table.add(text, 0)
    return table


def after(table: NGrams, text: list[int]) -> dict[int, tuple[int, int]]:
    return {number: (token, count) for number, token, count in table.after(text, backs_of(text))}


@given(text=st.lists(st.integers(0, 5), min_size=1, max_size=300))
def test_how_far_back_a_token_had_stood(text: list[int]) -> None:
    for number, token in enumerate(text):
        back = back_of(text, number)
        assert 0 <= back <= REACH
        assert token not in text[max(number - (back or REACH + 1) + 1, 0) : number]
        assert not back or text[number - back] == token


def test_contexts_differ_in_what_they_read() -> None:
    assert len(set(NGRAM_CONTEXTS)) == len(NGRAM_CONTEXTS)
    text = [1, 2, 3, 4, 5, 6]
    for place in range(1, 7):
        other = [*text[:-place], 9, *text[len(text) - place + 1 :]]
        for context, one, two in zip(NGRAM_CONTEXTS, keys(text, [0] * 6, 6), keys(other, [0] * 6, 6), strict=True):
            assert (one != two) == ((place, TOKEN) in context.parts)
    assert keys([1], [0], 1).count(0) == sum(context.length > 1 for context in NGRAM_CONTEXTS)


@given(texts=TEXTS)
def test_what_came_more_often_than_all_else_is_found(texts: list[list[int]]) -> None:
    table = added(texts)
    for number, context in enumerate(NGRAM_CONTEXTS):
        followed: dict[tuple[int, ...], Counter[int]] = {}
        for text in texts:
            told = (text, backs_of(text))
            for end in range(context.length, len(text)):
                parts = tuple(told[kind][end - place] for place, kind in context.parts)
                followed.setdefault(parts, Counter())[told[context.tells][end]] += 1
        for text in texts:
            told = (text, backs_of(text))
            for end in range(context.length, len(text)):
                counts = followed[tuple(told[kind][end - place] for place, kind in context.parts)]
                proposed = after(table, text[:end]).get(number)
                [(came, count)] = counts.most_common(1)
                if 2 * count > counts.total():
                    copied = text[end - came] if 0 < came <= end else None
                    expected = copied if context.tells == BACK else came
                    assert (proposed and proposed[0]) == expected
                assert proposed is None or 1 <= proposed[1] <= count
    assert after(table, [9]) == {}


@given(texts=TEXTS, cuts=st.lists(st.integers(0, 30), max_size=5))
def test_a_text_may_come_in_parts(texts: list[list[int]], cuts: list[int]) -> None:
    parts = NGrams()
    for text in texts:
        ends = [*sorted(cut for cut in cuts if cut < len(text)), len(text)]
        for begin, end in zip([0, *ends], ends, strict=False):
            parts.add(text[:end], begin)
    assert parts.young == added(texts).young


def test_names_and_numbers_of_a_template_are_found_by_where_they_stood() -> None:
    """Of another text with the same words, but for two: 7 and 8 are 17 and 18 there."""
    table = added([[7, 1, 8, 2, 7, 3, 8, 4, 7, 5]])
    text = [17, 1, 18, 2, 17, 3]
    assert any(token == 18 for token, _ in after(table, text).values())
    text += [18, 4]
    assert any(token == 17 for token, _ in after(table, text).values())


def test_counts_end() -> None:
    table = added([[5] * 1000])
    assert after(table, [5, 5])[0] == (5, COUNT)


def test_the_oldest_go_first() -> None:
    table = NGrams(most=18)
    table.add([99, 100, 101], 0)
    for first in range(0, 90, 3):
        table.add([first, first + 1, first + 2], 0)
        assert after(table, [99, 100])[0] == (101, 1)  # what is used stays
        assert len(table.young) + len(table.old) <= 2 * (18 + 2 * len(NGRAM_CONTEXTS))
    assert table.dropped
    assert after(table, [0, 1]) == {}
    assert after(table, [87, 88]) != {}
