"""What a task gives to a job: items to generate for, and a judgement of what came out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from lopa_dist.tasks.response_format import ResponseFormat

Form = Literal["simple", "chat", "completion"]


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """How a request wants its tokens drawn; None: as the decode config says."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None


DEFAULT = RequestSampling()


@dataclass(frozen=True, slots=True)
class Origin:
    """The input line that an item was made from, and in which convention it was written."""

    line: int
    custom_id: str  # as the user wrote it; the item's own id differs where a line asks for several samples
    form: Form = "simple"  # chat, completion: OpenAI Batch lines
    sample: int = 0
    model: str | None = None  # what the line calls the model; echoed, never loaded


@dataclass(frozen=True, slots=True)
class Continuation:
    """A text whose likelihood is asked for."""

    text: str
    text_in_chat: str  # the same, as it stands behind a chat's last turn
    behind: Item | None = None  # whose prompt it stands behind, in both forms; None: it begins a document


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to generate for: a prompt, chat messages, or the reason why its line is unusable.

    With `continuations`, nothing is generated: they are scored instead.

    A benchmark gives both prompt and messages; the job keeps the one that fits the model (`jobs/run/prompts.py`).
    """

    custom_id: str
    prompt: str | None = None
    messages: list[dict[str, str]] | None = None
    max_new_tokens: int | None = None  # None: the decode config's
    error: str | None = None
    prefix: str = ""  # how the prompt begins, or its last message, where many items' do: few-shot examples
    reference: Any = field(default=None, compare=False)  # what `score` compares with
    answer_prefix: str = ""  # with messages: how the assistant's turn begins
    stop: tuple[str, ...] = ()  # the text ends before the earliest of these
    sampling: RequestSampling = DEFAULT
    token_steps: bool = False  # whether the result tells how each token was written
    suffix: str | None = None  # the text behind the answer, which has `max_new_tokens` tokens or ends before
    response_format: ResponseFormat | None = None  # what the answer must be; None: any text
    origin: Origin | None = None
    metadata: dict[str, Any] | None = None  # what the input says besides, which passes through to the results
    continuations: tuple[Continuation, ...] = ()


@dataclass(frozen=True)
class Score:
    """Whether a text is right, the answer that was read from it, and what other rules of reading say."""

    correct: bool | None  # None: the task has metrics, but none of them says so
    extracted: str | None
    also: Mapping[str, bool] = field(default_factory=dict)  # rule: right or not; `correct_RULE`, `accuracy_RULE`
    reason: str = ""  # why it is not right, where that is known
    metrics: Mapping[str, Any] = field(default_factory=dict)  # as the task's own library has them
    expected: str | None = None  # a right answer, where the task knows one


class Task(Protocol):
    """A named source of items."""

    name: str

    def items(self) -> Iterable[Item]:
        """Return the items, in input order."""

    def score(self, item: Item, text: str) -> Score | None:
        """Judge a text; None if the task has no right answers.

        Any exception but `CannotJudge` leaves this one text unjudged: it says nothing of the text.
        """


class Likely(Protocol):
    """How likely a model finds a text."""

    @property
    def loglikelihood(self) -> float:
        """In nats."""

    @property
    def greedy(self) -> bool:
        """Whether it is what the model would have written."""


@runtime_checkable
class LikelihoodTask(Task, Protocol):
    """A task that may ask how likely given texts are, of each item or of none."""

    scores: bool  # whether it does
    masks: int  # of a text, where the model is a masked one

    def score_likelihoods(self, item: Item, likelihoods: Sequence[Likely]) -> Score | None:
        """Judge by the likelihoods of an item's continuations, in order."""


@runtime_checkable
class TotallingTask(Task, Protocol):
    """A task with metrics that are more than a mean over its items."""

    def totals(self, lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
        """Return metrics by name for each part of the task, from the lines of `results.jsonl`."""


class CannotJudge(ValueError):
    """The task can judge no answer at all, as the message says: that ends the job."""


def score_of(task: Task, item: Item, text: str) -> Score | None:
    """Return what the task says of a text.

    Raises:
        CannotJudge: it says something else than a `Score`, as a task of the user's own may.
    """
    score = task.score(item, text)
    if score is None or isinstance(score, Score):
        return score
    raise CannotJudge(f"task {task.name}: score() returned {score!r}: return a Score(correct, extracted), or None")


class Cancelled(Exception):
    """Judging was cancelled, so there is no verdict."""


@runtime_checkable
class SlowTask(Task, Protocol):
    """A task whose judging takes long and mostly waits: threads may call `score`, several at a time."""

    def cancel(self) -> None:
        """From now on `score` raises `Cancelled`, soon also where it is under way."""
