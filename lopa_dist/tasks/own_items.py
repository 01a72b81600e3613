"""Checks of the items of the user's own task, whose fields may hold values of any type."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import NoneType
from typing import Any

from lopa_dist.checks import in_a_line
from lopa_dist.own_code import own_line
from lopa_dist.tasks.batch_line import BadLine, integer, read_sampling, read_stop, read_suffix, shown
from lopa_dist.tasks.response_format import ResponseFormat
from lopa_dist.tasks.task import Continuation, Item, RequestSampling

FIELDS: dict[str, tuple[tuple[type, ...], str]] = {  # of an item: their types, and these in words
    "prompt": ((str, NoneType), "a text"),
    "messages": ((list, NoneType), "a list"),
    "prefix": ((str,), "a text"),
    "suffix": ((str, NoneType), "a text"),
    "stop": ((tuple, list), "a tuple of texts"),
    "sampling": ((RequestSampling,), "a RequestSampling"),
    "response_format": ((ResponseFormat, NoneType), "a ResponseFormat"),
    "continuations": ((tuple, list), "a tuple"),
}
INTEGERS = ("max_new_tokens", "top_k", "seed")


@contextmanager
def named(what: str) -> Iterator[None]:
    """Turn an error of the user's own code into a ValueError that says what failed, `what`, and where.

    A ValueError or OSError passes unchanged.
    """
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        raise ValueError(f"{what}: {own_line(error)}{in_a_line(error)}") from error


def checked(items: Callable[[], Iterable[Any]], name: str) -> Iterator[Item]:
    """Yield the items of the user's own task.

    Args:
        items: of the task.
        name: what ``task=`` names.

    Raises:
        ValueError: one cannot be used, which the message shows, or `items` fails.
    """
    with named(f"task={name}: items() failed"):
        for item in items():
            if why := why_unusable(item):
                raise ValueError(f"task={name}: items() gave {item!r}, which {why} (docs/inputs.md#a-task-of-your-own)")
            yield replace(item, stop=tuple(item.stop)) if isinstance(item.stop, list) else item


def why_unusable(item: Any) -> str:
    """Return why an item cannot be used; empty if it can, or if it says itself why not (`Item.error`)."""
    if not isinstance(item, Item):
        return "is not an Item"
    if not isinstance(item.custom_id, str):
        return f"has custom_id={shown(item.custom_id)}, which is not a text"
    if item.error:
        return ""
    for field, (types, words) in FIELDS.items():
        if not isinstance(getattr(item, field), types):
            return f"has {field}={shown(getattr(item, field))}, which is not {words}"
    if item.prompt is None and item.messages is None and not item.continuations:
        return "has neither prompt nor messages"
    turns = [turn if isinstance(turn, dict) else {} for turn in item.messages or ()]
    if not all(isinstance(turn.get(key), str) for turn in turns for key in ("role", "content")):
        return "has messages that are not all {'role': TEXT, 'content': TEXT}"
    if not all(isinstance(one, Continuation) for one in item.continuations):
        return "has continuations that are not all Continuations"
    sampling = asdict(item.sampling)
    for field, value in {"max_new_tokens": item.max_new_tokens, **sampling}.items():
        if field in INTEGERS and value is not None and type(value) is not int:
            return f"has {field}={shown(value)}, which is not an int"
    try:
        integer({"max_new_tokens": item.max_new_tokens}, "max_new_tokens", 1)
        read_stop(list(item.stop))
        read_sampling(sampling)
        read_suffix(item.suffix or "", item.max_new_tokens is not None)
        item.custom_id.encode()
        json.dumps([sampling, item.reference])
        json.dumps(item.metadata, sort_keys=True)
    except BadLine as error:
        return f"cannot be used: {error}"
    except UnicodeEncodeError:
        return "has a custom_id that UTF-8 cannot hold"
    except (TypeError, ValueError) as error:
        return f"has sampling, metadata or a reference that JSON cannot hold ({error})"
    return ""
