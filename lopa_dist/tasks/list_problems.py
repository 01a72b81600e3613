"""Seeded problems about lists and small Latin squares, where tokens that are filled together must fit each other.

The families are ParallelBench's waiting lines and puzzles (arXiv 2510.04767). Copying, reversing and sorting
have one right answer. The others have many, and a model that knows them all is sure of few tokens: every item may come
first in a shuffled list, and the item to insert may stand anywhere, but only once. Whether a token is right depends on
the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product

from lopa_dist.tasks.word_problems import Split, split_of

FAMILIES = ("copy", "reverse", "sort", "shuffle", "insert", "remove", "replace", "latin")
NUMBERS = range(200)
LENGTHS = {"short": range(3, 10), "medium": range(10, 30), "long": range(30, 61), "longest": range(61, 128)}
"""Numbers of items in a list, by kind; all kinds are equally likely. Only the longest lists have numbers above 99."""
LONG_FAMILIES = ("copy", "reverse", "insert", "remove")
"""Families that have the longest lists, too. The others are hard for a small model with lists of any length."""
LONGEST = LENGTHS["longest"][-1]
SYMBOLS = ("a", "b", "c", "d")
BLANK, ROW_END = "_", "/"
BLANKS = range(4, 13)  # of the 16 cells of a square


@dataclass(frozen=True)
class ListProblem:
    """A question, and one right answer of possibly many."""

    family: str
    question: str
    answer: str


def listed(items: list[int]) -> str:
    """Return the items as a text, such as ``"3 17 5"``."""
    return " ".join(map(str, items))


def unlisted(text: str) -> list[int] | None:
    """Return the numbers of a list as `listed` writes it, with any spaces; None if `text` is something else."""
    items = text.split()
    return [int(i) for i in items] if items and all(i.isascii() and i.isdigit() for i in items) else None


def grid(cells: Sequence[str]) -> str:
    """Return 16 cells as a text, such as ``"a b c d / b a d c / ..."``."""
    return f" {ROW_END} ".join(" ".join(cells[i : i + 4]) for i in range(0, 16, 4))


def ungrid(text: str) -> list[str] | None:
    """Return the cells of a square as `grid` writes it; None if `text` has another shape."""
    rows = [row.split() for row in text.split(ROW_END)]
    return [cell for row in rows for cell in row] if [len(row) for row in rows] == [4] * 4 else None


def all_squares() -> Iterator[tuple[str, ...]]:
    """Yield the 576 Latin squares of order 4, row by row."""
    partial: list[tuple[str, ...]] = [()]
    for _ in range(4):
        pairs = product(partial, permutations(SYMBOLS))
        partial = [cells + row for cells, row in pairs if not any(row[i] in cells[i::4] for i in range(4))]
    yield from partial


SQUARES = tuple(all_squares())


def latin(rng: random.Random) -> ListProblem:
    """Return the problem to complete a square with blanks; the answer is the square that it was made from."""
    cells = rng.choice(SQUARES)
    blank = set(rng.sample(range(16), rng.choice(BLANKS)))
    given = [BLANK if i in blank else cell for i, cell in enumerate(cells)]
    return ListProblem("latin", f"complete : {grid(given)}", grid(cells))


def random_length(rng: random.Random, family: str, longest: int) -> int:
    """Return a random number of items for a list of at most `longest`: its kind is drawn first, then the number."""
    allowed = [lengths for kind, lengths in LENGTHS.items() if kind != "longest" or family in LONG_FAMILIES]
    kinds = [range(lengths.start, min(lengths.stop, longest + 1)) for lengths in allowed]
    return rng.choice(rng.choice([lengths for lengths in kinds if lengths]))


def list_problem(rng: random.Random, family: str, length: int) -> ListProblem:
    """Return a problem about a list of distinct numbers; as its answer, each right result is equally likely."""
    *items, new = rng.sample(NUMBERS if length in LENGTHS["longest"] else range(100), length + 1)
    result, place = list(items), rng.randrange(length)
    order = family
    if family == "reverse":
        result.reverse()
    elif family == "sort":
        result.sort()
    elif family == "shuffle":
        rng.shuffle(result)
    elif family == "insert":
        order = f"insert {new} anywhere"
        result.insert(rng.randrange(length + 1), new)
    elif family == "remove":
        order = "remove any"
        del result[place]
    elif family == "replace":
        order = f"replace any by {new}"
        result[place] = new
    return ListProblem(family, f"{order} : {listed(items)}", listed(result))


def random_problem(rng: random.Random, family: str, longest: int = LONGEST) -> ListProblem:
    """Return a problem of `family` with at most `longest` items (3 or more), from either side of the split."""
    return latin(rng) if family == "latin" else list_problem(rng, family, random_length(rng, family, longest))


def problems(split: Split, seed: int) -> Iterator[ListProblem]:
    """Yield an endless stream of problems of one side of the split, the families in turn.

    Training uses any seed. For tests, seed 1 may be looked at while tuning; seed 2 is kept apart as the final test.
    """
    rng = random.Random(f"lists-{split}-{seed}")
    while True:
        for family in FAMILIES:
            problem = random_problem(rng, family)
            while split_of(problem.question) != split:
                problem = random_problem(rng, family)
            yield problem


CHECKS: dict[str, Callable[[list[int], int | None, list[int]], bool]] = {
    "copy": lambda items, new, answer: answer == items,
    "reverse": lambda items, new, answer: answer == items[::-1],
    "sort": lambda items, new, answer: answer == sorted(items),
    "shuffle": lambda items, new, answer: sorted(answer) == sorted(items),
    "insert": lambda items, new, answer: any(answer == [*items[:i], new, *items[i:]] for i in range(len(items) + 1)),
    "remove": lambda items, new, answer: any(answer == items[:i] + items[i + 1 :] for i in range(len(items))),
    "replace": lambda items, new, answer: any(answer == [*items[:i], new, *items[i + 1 :]] for i in range(len(items))),
}
"""By family: whether an answer is right, given the question's items and the new one that it names, if any."""


def is_completed(given: list[str], answer: list[str]) -> bool:
    """Return whether `answer` is a Latin square that keeps the `given` cells."""
    rows = [answer[i : i + 4] for i in range(0, 16, 4)]
    lines = rows + [answer[i::4] for i in range(4)]
    fits = all(g in (BLANK, a) for g, a in zip(given, answer, strict=True))
    return fits and all(sorted(line) == list(SYMBOLS) for line in lines)


def is_right(question: str, text: str) -> bool:
    """Return whether `text` is one of the right answers to `question`."""
    order, _, rest = question.partition(" : ")
    if order == "complete":
        given, cells = ungrid(rest), ungrid(text)
        return given is not None and cells is not None and is_completed(given, cells)
    items, answer = unlisted(rest), unlisted(text)
    new = next((int(word) for word in order.split() if word.isdigit()), None)
    return items is not None and answer is not None and CHECKS[order.split()[0]](items, new, answer)
