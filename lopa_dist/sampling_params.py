"""Prompts of a call from Python, how each is answered, and the items of a job that they become."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, TypeVar

from lopa_dist.tasks.batch_line import BadLine, bad_line, read_request, samples_of
from lopa_dist.tasks.names import line_name
from lopa_dist.tasks.response_format import TRIES
from lopa_dist.tasks.task import Item, Origin

T = TypeVar("T")
Prompt = str | Sequence[Mapping[str, Any]]
"""A text, or the messages of a chat, each with `role` and `content`."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request is answered. Where a field is None, the decode options decide."""

    temperature: float | None = None  # 0 is greedy
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None  # with it, a prompt gets the same text wherever it stands in the batch
    max_tokens: int | None = None
    stop: str | Sequence[str] = ()  # the text ends before the earliest of these
    n: int = 1  # answers to the prompt, each an output
    logprobs: bool = False  # whether to return each token's log probability, step and way
    response_format: Mapping[str, Any] | None = None  # {"type": "json_object"} or a json_schema, as in OpenAI's API
    tries: int = TRIES  # the most answers to generate until one has this format

    def __new__(cls, *_: Any, **given: Any) -> SamplingParams:
        """Return a new object; raise a ValueError with the known names for an argument that has another name."""
        known = [entry.name for entry in fields(cls)]
        for name in given.keys() - known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"SamplingParams has no {name}: {hint}")
        return super().__new__(cls)


def items_of(
    prompts: Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    keep_bad: bool = False,
    argument: str = "prompts",
) -> list[Item]:
    """Return prompts as a job's items, named like the lines of a file, so that a job would draw the same tokens.

    With `keep_bad`, a prompt that cannot be used becomes an item with an error. Otherwise it raises a ValueError, whose
    message calls the prompt ``argument[index]``, with the caller's name for the prompts.
    """
    prompts = listed(prompts, argument)
    params = params_for(sampling, len(prompts), argument)
    items = []
    for index, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
        name = f"{argument}[{index}]"
        try:
            items += items_of_one(prompt, asked, index)
        except BadLine as error:
            if not keep_bad:
                raise ValueError(f"{name}: {error}") from error
            given = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}  # for the output
            items.append(replace(bad_line(index + 1, ""), error=str(error), **given))  # prompts have no lines
    return items


def items_of_one(prompt: Prompt, asked: SamplingParams, index: int) -> list[Item]:
    """Return the items of one prompt; raise a BadLine that says what is wrong with it."""
    if isinstance(prompt, Mapping) and "role" in prompt:
        raise BadLine("the prompt is a single message: a chat is a list of messages, and prompts a list of chats")
    is_chat = isinstance(prompt, Sequence) and all(isinstance(message, Mapping) for message in prompt)
    if not isinstance(prompt, str) and not is_chat:
        form = 'a prompt is a string, or a chat as a list of {"role": "...", "content": "..."}'
        raise BadLine(f"the prompt is of type {type(prompt).__name__}: {form}")
    given = {key: value for key, value in asdict(asked).items() if value is not None and key != "stop"}
    given["stop"] = list(asked.stop) if isinstance(asked.stop, tuple) else [] if asked.stop is None else asked.stop
    given |= {"prompt": prompt} if isinstance(prompt, str) else {"messages": [dict(turn) for turn in prompt]}
    request = read_request(given)
    if isinstance(asked.tries, bool) or not isinstance(asked.tries, int) or asked.tries < 1:
        raise BadLine(f"tries={asked.tries!r} must be an integer of at least 1")
    if request["response_format"] is not None:
        request["response_format"] = replace(request["response_format"], tries=asked.tries)
    return samples_of(Origin(index + 1, line_name(index + 1)), request)


def listed(given: Iterable[T], name: str, of: str = "strings or chats") -> list[T]:
    """Return what is given for an argument, called `name`, as a list: any iterable, such as a table's column.

    Raises:
        ValueError: it is one string, or a whole table, or no iterable; the message says what it is a list `of`.
    """
    if isinstance(given, str):
        raise ValueError(f"{name} is one string: give a list, even for a single prompt")
    if isinstance(given, Mapping) or hasattr(given, "columns"):  # whose iterator gives the names of the columns
        raise ValueError(f"{name} is of type {type(given).__name__}: give a list of {of}, such as one of its columns")
    if not isinstance(given, Iterable):
        raise ValueError(f"{name} is of type {type(given).__name__}: give a list of {of}")
    return list(given)


def listed_texts(given: Iterable[str], name: str, number: int, of: str) -> list[str]:
    """Return the list of strings that are given for an argument, called `name`: one for each of `number` prompts.

    In errors, the prompts are called by the name `of`.
    """
    texts = listed(given, name, "strings")
    if len(texts) != number:
        raise ValueError(f"{name}: {len(texts)} for {number} {of}; give one string for each")
    for index, text in enumerate(texts):
        check_text(text, f"{name}[{index}]")
    return texts


def params_for(given: SamplingParams | Sequence[SamplingParams] | None, number: int, prompts: str) -> Any:
    """Return the sampling parameters of each of `number` prompts; raise a ValueError if they are something else."""
    params = for_each(SamplingParams() if given is None else given, number, "sampling parameters", prompts)
    if not all(isinstance(one, SamplingParams) for one in params):
        raise ValueError("sampling: give SamplingParams(temperature=..., ...), or a list with one for each prompt")
    return params


def for_each(given: Any, number: int, name: str, prompts: str) -> Sequence[Any]:
    """Return what is given for each of `number` prompts: an iterable has one for each, anything else is for all."""
    if getattr(given, "ndim", None) == 0:  # a number of numpy's or torch's
        given = given.item()
    each = list(given) if isinstance(given, Iterable) and not isinstance(given, str | Mapping) else [given] * number
    if len(each) != number:
        raise ValueError(f"{len(each)} {name} for {number} {prompts}: give one, or one for each")
    return each


def check_text(text: Any, what: str) -> None:
    """Raise a ValueError that says what was given instead if `text` is not a string."""
    if not isinstance(text, str):
        raise ValueError(f"{what}: give a string, not {text!r} ({type(text).__name__})")
