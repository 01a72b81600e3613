"""What a task gives to a job: items to generate for, and a judgement of what came out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    custom_id: str  # as the user wrote it; the item's own id differs if a line asks for several samples
    form: Form = "simple"  # chat, completion: OpenAI Batch lines
    sample: int = 0
    model: str | None = None  # what the line calls the model; echoed, never loaded
    # if there are several files: which one, and the line in it; no part of what makes an input the same (`HashedItems`)
    where: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Continuation:
    """A text whose likelihood is asked for."""

    text: str
    text_in_chat: str  # the same, as it stands after a chat's last turn
    after: Item | None = None  # the item whose prompt it follows, in both forms; None: it begins a document
    spaces: bool = False  # whether white space at the prompt's end belongs to it, as in lm-evaluation-harness


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
    prefix: str = ""  # the beginning of the prompt, or of the last message, that many items share: few-shot examples
    reference: Any = field(default=None, compare=False)  # what `score` compares with
    answer_prefix: str = ""  # with messages: how the assistant's turn begins
    stop: tuple[str, ...] = ()  # the text ends before the earliest of these
    sampling: RequestSampling = DEFAULT
    token_steps: bool = False  # whether the result tells how each token was written
    suffix: str | None = None  # the text after the answer, which has `max_new_tokens` tokens or ends earlier
    response_format: ResponseFormat | None = None  # what the answer must be; None: any text
    origin: Origin | None = None
    metadata: dict[str, Any] | None = None  # other fields of the input, which pass through to the results
    continuations: tuple[Continuation, ...] = ()


@dataclass(frozen=True)
class Score:
    """Whether a text is right, the answer that was read from it, and what other rules of reading say."""

    correct: bool | None  # None: the task has metrics, but none of them says whether it is right
    extracted: str | None
    also: Mapping[str, bool] = field(default_factory=dict)  # by RULE: `correct_RULE` and `accuracy_RULE`
    reason: str = ""  # why it is not right, if that is known
    metrics: Mapping[str, Any] = field(default_factory=dict)  # as the task's own library has them
    expected: str | None = None  # a right answer, if the task knows one

    def fields(self) -> dict[str, Any]:
        """Return the fields of a result line that tell the score; `is_of_a_verdict` knows them."""
        line: dict[str, Any] = {"correct": self.correct, "extracted": self.extracted}
        line |= {"expected": self.expected} if self.expected is not None else {}
        line |= {f"correct_{rule}": right for rule, right in self.also.items()}
        line |= {"reason": self.reason} if self.reason else {}
        return line | ({"metrics": self.metrics} if self.metrics else {})


def is_of_a_verdict(key: str) -> bool:
    """Return whether a field of a result line tells a score, or why there is none."""
    return key.startswith("correct_") or key in ("correct", "extracted", "expected", "reason", "metrics", "unjudged")


class Task(Protocol):
    """A named source of items."""

    name: str

    def items(self) -> Iterable[Item]:
        """Return the items, in input order."""

    def score(self, item: Item, text: str) -> Score | None:
        """Return the score of a text; None if the task has no right answers.

        Any exception but `CannotJudge` leaves this one text unjudged, neither right nor wrong.
        """


class Likely(Protocol):
    """How likely a model finds a text."""

    @property
    def loglikelihood(self) -> float:
        """The log likelihood of the text, in nats."""

    @property
    def greedy(self) -> bool:
        """Whether the text is what the model would have written, choosing greedily."""


@runtime_checkable
class LikelihoodTask(Task, Protocol):
    """A task that may ask how likely given texts are, for all of its items or for none."""

    scores: bool  # whether it asks for that
    masks: int  # how many masks are drawn for a text, if the model is a masked one

    def score_likelihoods(self, item: Item, likelihoods: Sequence[Likely]) -> Score | None:
        """Return the score of an item by the likelihoods of its continuations, in order."""


@runtime_checkable
class TotallingTask(Task, Protocol):
    """A task with metrics that are more than a mean over its items."""

    def totals(self, lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
        """Return metrics by name for each part of the task, from the lines of `results.jsonl`."""


class CannotJudge(ValueError):
    """An error that ends the job: the task can judge no answer at all, for the reason in the message."""


def why_unjudged(error: BaseException) -> str:
    """Return what results say of an error of a task's code, by which an answer is not judged."""
    return f"{type(error).__name__}: {error}"[:500]


def score_of(task: Task, item: Item, text: str, likelihoods: Sequence[Likely] | None = None) -> Score | None:
    """Return what the task says of a text or, if there are some, of the likelihoods of an item's continuations.

    Raises:
        CannotJudge: the task, which may be the user's own, returned neither a `Score` that can be written nor None.
    """
    if likelihoods is None:
        return checked(task, "score", task.score(item, text))
    assert isinstance(task, LikelihoodTask)
    return checked(task, "score_likelihoods", task.score_likelihoods(item, likelihoods))


def checked(task: Task, function: str, score: Any) -> Score | None:
    """Return what a function of the task returned, with flags and a reason as JSON has them.

    Raises:
        CannotJudge: as for `score_of`.
    """
    if score is None:
        return None
    returned = f"task {task.name}: {function}() returned"
    if not isinstance(score, Score):
        raise CannotJudge(f"{returned} {score!r}: return a Score(correct, extracted), or None")
    score = replace(
        score,
        correct=as_flag(score.correct),
        also={rule: as_flag(right) for rule, right in score.also.items()},
        reason="" if score.reason is None else score.reason,
    )
    texts = all(isinstance(one, str | None) for one in (score.extracted, score.expected))
    if not (isinstance(score.correct, bool | None) and texts and isinstance(score.reason, str)):
        raise CannotJudge(
            f"{returned} {score!r}: `correct` is True, False or None, `extracted` and "
            "`expected` are texts or None, and `reason` is a text"
        )
    if not all(isinstance(rule, str) and isinstance(right, bool) for rule, right in score.also.items()):
        raise CannotJudge(f"{returned} also={score.also!r}: give True or False for each rule")
    try:
        json.dumps(score.metrics)
    except (TypeError, ValueError) as error:
        raise CannotJudge(f"{returned} metrics that JSON cannot hold: {error}") from error
    return score


def as_flag(value: Any) -> Any:
    """Return 0, 1 and flags of other libraries, such as numpy's, as False and True; any other value unchanged."""
    return bool(value) if type(value).__name__.startswith(("bool", "int")) and value in (0, 1) else value


class Cancelled(Exception):
    """Judging was cancelled, so there is no verdict."""


@runtime_checkable
class SlowTask(Task, Protocol):
    """A task whose judging takes long and mostly waits: threads may call `score`, several at a time."""

    def cancel(self) -> None:
        """Make `score` raise `Cancelled` from now on, and soon also in calls that are under way."""
