"""Seeded grade-school word problems with chain-of-thought answers: the embedded model's world.

A problem is a start number and 2 to 4 steps of ``+``, ``-`` or ``x`` with small numbers. Every step sentence has
the same number of tokens in every wording, so the length of an answer follows from its question; the wording itself
(synonyms, and sentence forms whose choice must agree across positions) is free, so a model cannot be sure of every
token at once and the order of filling matters.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import add, mul, sub
from typing import Literal, NamedTuple, TypeVar

NAMES = [
    "Alice", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Henry", "Iris", "Jack", "Kate", "Leo", "Maria",
    "Noah", "Olga", "Paul", "Quinn", "Rosa", "Sam", "Tina", "Uma", "Victor", "Wendy", "Zoe",
]  # fmt: skip
OBJECTS = [
    "apples", "books", "coins", "pens", "cards", "shells", "stamps", "stones", "marbles", "cookies", "ribbons",
    "candles", "flowers", "pencils", "stickers", "buttons", "balls", "cups", "keys", "photos",
]  # fmt: skip

OPENINGS = ("First", "Initially", "Originally", "Clearly")
CONNECTIVES = ("Then", "Next", "After", "Now", "Afterwards", "Later")
HAS = ("has", "owns", "holds", "keeps")
WE = ("we", "they", "people")
GET = ("get", "find", "count", "see")
SO = ("so", "hence", "thus", "therefore")
STARTING_TAILS = ("altogether", "overall", "exactly")
TAILS = ("of them", "in total", "now altogether", "now overall")
ENDINGS = ("Finally", "Ultimately", "Lastly", "Eventually")
LAST_TAILS = ("of them", "in total", "left now", "left today")

ADD_EVENTS = (
    "{name} buys {n} more .",
    "Then a friend gives {name} {n} more .",
    "{name} finds {n} more {obj} .",
    "Then {name} gets {n} {obj} from a sister .",
)
SUBTRACT_EVENTS = (
    "{name} gives {n} away .",
    "Then {name} loses {n} {obj} .",
    "{name} sells {n} of them .",
    "Then {name} gives {n} {obj} to a brother .",
)
MULTIPLY_EVENTS = (
    "Then the number of {obj} grows {n} times .",
    "{name} ends up with {n} times as many .",
    "A prize makes it {n} times as many {obj} .",
)
STARTS = (
    "{name} has {n} {obj} .",
    "{name} starts with {n} {obj} .",
    "There are {n} {obj} in the box of {name} .",
)
QUESTIONS = (
    "How many {obj} does {name} have now ?",
    "How many {obj} are there in the end ?",
    "What is the final number of {obj} ?",
)

START_RANGE = range(2, 16)
ADDEND_RANGE = range(2, 13)
FACTORS = (2, 3)
RESULT_RANGE = range(1, 51)
STEP_RANGE = range(2, 5)
APPLY = {"+": add, "-": sub, "x": mul}

T = TypeVar("T")


def drawing(values: Sequence[T]) -> Callable[[Callable[[int], int]], T]:
    """Return a function that takes a generator's `getrandbits` and draws one of `values`.

    It draws what `random.choice` does, from as many random bits, but in half the time: most problems are drawn only to
    see on which side of the split they are.
    """
    bits, count = len(values).bit_length(), len(values)

    def draw(getrandbits: Callable[[int], int]) -> T:
        while (number := getrandbits(bits)) >= count:
            pass
        return values[number]

    return draw


draw_start, draw_addend, draw_factor = drawing(START_RANGE), drawing(ADDEND_RANGE), drawing(FACTORS)
draw_count, draw_operator = drawing(STEP_RANGE), drawing("++--x")

Split = Literal["train", "held_out"]
HELD_OUT_SHARE = 20  # one problem in this many is held out


class Operation(NamedTuple):
    """One computation ``before operator operand = after``."""

    before: int
    operator: str  # "+", "-" or "x"
    operand: int
    after: int


@dataclass(frozen=True)
class WordProblem:
    """A question, one worded answer, and the steps by which a solver computes its number."""

    question: str
    answer: str
    steps: tuple[Operation, ...]

    @property
    def result(self) -> int:
        """The number after ``####``."""
        return self.steps[-1].after


def signature(steps: tuple[Operation, ...]) -> str:
    """Return the computation alone, by which problems are split: ``"7+3x2"`` for a start of 7, then +3, then x2."""
    return f"{steps[0].before}" + "".join([f"{operator}{operand}" for _, operator, operand, _ in steps])


def split_of(text: str) -> Split:
    """Return which side of the split a problem is on, by a hash of its `text`: the same in any process and version."""
    digest = hashlib.sha256(text.encode()).digest()
    return "held_out" if int.from_bytes(digest[:4], "little") % HELD_OUT_SHARE == 0 else "train"


def random_steps(rng: random.Random) -> tuple[Operation, ...]:
    """Return 2 to 4 operations, the first one on a random start, whose results are all in 1..50."""
    value, steps = draw_start(rng.getrandbits), []
    for _ in range(draw_count(rng.getrandbits)):
        steps.append(random_operation(rng, value))
        value = steps[-1].after
    return tuple(steps)


def random_operation(rng: random.Random, value: int) -> Operation:
    """Return one operation on `value` whose result is in 1..50."""
    getrandbits = rng.getrandbits
    while True:
        operator = draw_operator(getrandbits)
        operand = draw_factor(getrandbits) if operator == "x" else draw_addend(getrandbits)
        after = APPLY[operator](value, operand)
        if after in RESULT_RANGE:
            return Operation(value, operator, operand, after)


def word_step(rng: random.Random, step: Operation, name: str) -> str:
    """Return the sentence of one step, which has 11 tokens in each of its three forms."""
    equation = f"{step.before} {step.operator} {step.operand} = {step.after}"
    form = rng.randrange(3)
    if form == 0:
        return f"{rng.choice(CONNECTIVES)} {name} {rng.choice(HAS)} {equation} {rng.choice(TAILS)} ."
    if form == 1:
        return f"{rng.choice(CONNECTIVES)} {rng.choice(WE)} {rng.choice(GET)} {equation} {rng.choice(TAILS)} ."
    return f"{equation} , {rng.choice(SO)} {name} {rng.choice(HAS)} {step.after} ."


def word_answer(rng: random.Random, steps: tuple[Operation, ...], name: str) -> str:
    """Return an answer: an opening (6 tokens), one sentence per step (11 each), a closing (7), and ``#### N`` (2)."""
    parts = [f"{rng.choice(OPENINGS)} {name} {rng.choice(HAS)} {steps[0].before} {rng.choice(STARTING_TAILS)} ."]
    parts += [word_step(rng, step, name) for step in steps]
    last = steps[-1].after
    parts.append(f"{rng.choice(ENDINGS)} {name} {rng.choice(HAS)} {last} {rng.choice(LAST_TAILS)} .")
    return " ".join([*parts, f"#### {last}"])


def word_question(rng: random.Random, steps: tuple[Operation, ...], name: str, obj: str) -> str:
    """Return the story: a start, one event per step, and the question."""
    events = {"+": ADD_EVENTS, "-": SUBTRACT_EVENTS, "x": MULTIPLY_EVENTS}
    parts = [rng.choice(STARTS).format(name=name, n=steps[0].before, obj=obj)]
    parts += [rng.choice(events[s.operator]).format(name=name, n=s.operand, obj=obj) for s in steps]
    return " ".join([*parts, rng.choice(QUESTIONS).format(name=name, obj=obj)])


def word_problem(rng: random.Random, steps: tuple[Operation, ...]) -> WordProblem:
    """Return a problem that puts the computation `steps` into words."""
    name, obj = rng.choice(NAMES), rng.choice(OBJECTS)
    return WordProblem(word_question(rng, steps, name, obj), word_answer(rng, steps, name), steps)


def problems(split: Split, seed: int) -> Iterator[WordProblem]:
    """Yield an endless stream of problems of one side of the split.

    Training uses any seed. For tests, seed 1 may be looked at while tuning; seed 2 is kept apart as the final test.
    """
    rng = random.Random(f"{split}-{seed}")
    while True:
        steps = random_steps(rng)
        if split_of(signature(steps)) == split:
            yield word_problem(rng, steps)
