"""One line of a batch file: checked, and made into the items that it asks for.

There are two conventions. A simple line is the request itself (``{"prompt": "..."}``). An OpenAI Batch line wraps the
request (``{"custom_id", "method": "POST", "url": "/v1/chat/completions", "body": {...}}``). In both, every field means
what it means in OpenAI's API; ``top_k`` is an addition. A null field counts as not given. All other fields of a simple
line pass through to its results. If it has no ``custom_id``, ``id`` names it; `Fields` says where else the prompt and
the name may be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

from lopa_dist.encodable import encodable
from lopa_dist.tasks.names import line_name, sample_name
from lopa_dist.tasks.prompt_template import Template, fill, in_json, names_in
from lopa_dist.tasks.response_format import MissingLibrary, ResponseFormat
from lopa_dist.tasks.task import DEFAULT, Form, Item, Origin, RequestSampling

PROMPTS = ("prompt", "messages")
LIMITS = ("max_tokens", "max_completion_tokens")
SAMPLING = ("temperature", "top_p", "top_k", "seed")
OPTIONS = (*LIMITS, *SAMPLING, "stop", "n", "logprobs", "suffix", "response_format")
KNOWN = (*PROMPTS, *OPTIONS)
NAMES = ("custom_id", "id")
ENVELOPE = ("custom_id", "method", "url", "body")
URLS: dict[str, Form] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
LABELS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")  # change no text
NEUTRAL: dict[str, tuple[Any, ...]] = {  # fields of the API that are only accepted with these values, which do nothing
    "stream": (False,),
    "echo": (False,),
    "best_of": (1,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
}
MOST_SAMPLES = 128
UNDECODED = "\ufffd"  # what an invalid or still incomplete character is decoded to
LONGEST_SHOWN = 100  # characters of a value in a message


class BadLine(ValueError):
    """An error that says what is wrong with a line, and what to do."""


@dataclass(frozen=True)
class Fields:
    """Where the prompt and the name of a simple line are.

    Attributes:
        column: the field that holds the prompt, or the messages as a list; None: `prompt` or `messages`.
        template: a prompt with fields in braces, in place of a column.
        id: the field that names the request; None: `custom_id` or `id`.
        table: whether lines are rows of a table, of which columns that are options pass through, too.
    """

    column: str | None = None
    template: Template | None = None
    id: str | None = None
    table: bool = False

    @property
    def named(self) -> bool:
        """Whether all lines are simple ones, whatever their fields are called."""
        return self.column is not None or self.template is not None


BY_NAME = Fields()


def items_of(raw: dict[str, Any], number: int, fields: Fields = BY_NAME, **defaults: Any) -> list[Item]:
    """Return the items of line `number`, one per sample, or one item with an error if the line is bad.

    Args:
        raw: the line's fields; one that is null counts as not given, but passes through.
        number: of the line, from 1.
        fields: where the prompt and the name are.
        defaults: options for lines that do not give them.
    """
    whole, raw = raw, given_fields(raw)
    wrapped = not fields.named and is_wrapped(raw)
    form: Form = "chat" if wrapped else "simple"
    custom_id, model = line_name(number), None
    metadata = None if wrapped else passing(whole, raw, fields)
    try:
        if fields.id is not None and not wrapped and fields.id not in raw:
            raise BadLine(f"{fields.id} is empty, and task.id={fields.id} names requests by it; give it a value")
        names = NAMES[:1] if wrapped else NAMES if fields.id is None else (fields.id,)
        custom_id = request_name(raw, names) or custom_id
        if wrapped:
            form, request = unwrap(raw)
            model = request.get("model")
        else:
            request = own_fields(raw, fields)
            if not fields.named and not raw.keys() & {*PROMPTS} and (null := sorted(whole.keys() & {*PROMPTS})):
                raise BadLine(f"{null[-1]} is null; give it a text, or leave the line out")
            request |= prompt_of(whole, fields)
        base = read_request(defaults | request, fields.column or "prompt")
        return samples_of(Origin(number, custom_id, form, model=model), base | {"metadata": metadata})
    except BadLine as error:
        given = None if wrapped else raw.get(fields.column or PROMPTS[0])
        prompt = given if isinstance(given, str) else None  # for the table of results
        return [replace(bad_line(number, str(error), custom_id, form), metadata=metadata, prompt=prompt)]


def is_wrapped(raw: dict[str, Any]) -> bool:
    """Return whether a line is an OpenAI Batch line, or meant to be; a text `body` beside a prompt is only data."""
    if isinstance(raw.get("body"), dict):
        return True
    return not raw.keys() & {*PROMPTS} and bool(raw.keys() & {"body", "url", "method"})


def samples_of(origin: Origin, request: dict[str, Any]) -> list[Item]:
    """Return the items of a request, one for each of its `samples`. All its other entries are fields of an `Item`."""
    fields = {key: value for key, value in request.items() if key != "samples"}
    several = request["samples"] > 1
    return [
        Item(
            sample_name(origin.custom_id, sample) if several else origin.custom_id,
            origin=replace(origin, sample=sample),
            **fields,
        )
        for sample in range(request["samples"])
    ]


def bad_line(number: int, message: str, custom_id: str | None = None, form: Form = "simple") -> Item:
    """Return the item of a line that cannot be used."""
    custom_id = custom_id or line_name(number)
    return Item(custom_id, error=f"line {number}: {message}", origin=Origin(number, custom_id, form))


def given_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null: in Parquet, every row has every column."""
    return {key: value for key, value in fields.items() if value is not None}


def request_name(raw: dict[str, Any], keys: Sequence[str]) -> str | None:
    """Return a request's name from the first of the `keys` that its line has; None if it has none of them."""
    for key in keys:
        if key in raw:
            name = raw[key]
            if key != "custom_id" and is_number(name) and name == name // 1:
                name = str(int(name))  # a table whose column of integers has gaps holds floats
            if not isinstance(name, str) or not name:
                raise BadLine(f"{key} must be a non-empty string" + (" or an integer" if key != "custom_id" else ""))
            return name
    return None


def own_fields(given: dict[str, Any], fields: Fields) -> dict[str, Any]:
    """Return the request of a simple line, whose fields that are not null are `given`.

    A field with the name of an option is that option, wherever the prompt is. Fields called `prompt` and `messages` are
    only data if the prompt has another name.
    """
    known = OPTIONS if fields.named else KNOWN
    request = {key: given[key] for key in known if key in given}
    others = {key: value for key, value in given.items() if key not in (*known, NAMES[0], fields.column)}
    refuse_unsupported(others)
    if not fields.named:
        refuse_misspelt(request, others)
    return request


def passing(raw: dict[str, Any], given: dict[str, Any], fields: Fields) -> dict[str, Any] | None:
    """Return the fields of a simple line that pass through to its results; None if there are none.

    Args:
        raw: the line.
        given: those of its fields that are not null.
        fields: where the prompt and the name are.
    """
    elsewhere = {fields.column} if fields.named else {*PROMPTS}
    elsewhere |= set() if fields.table else {*OPTIONS}
    if fields.id is None:
        elsewhere |= {NAMES[0]} if NAMES[0] in given or fields.table else {*NAMES}
    metadata = {key: value for key, value in raw.items() if key not in elsewhere}
    # only values that JSON has: Parquet also has dates and NaN
    return json.loads(json.dumps(metadata, default=in_json), parse_constant=lambda _: None) if metadata else None


def prompt_of(raw: dict[str, Any], fields: Fields) -> dict[str, Any]:
    """Return the prompt or the messages of a line if `fields` says where they are; else nothing."""
    if fields.template is not None:
        names = names_in(fields.template)
        none = [name for name in names if is_nothing(raw.get(name))]
        if none or all(is_blank(raw[name]) for name in names):
            empty = how_empty(raw, none[0]) if none else f"{names[0]} is empty"
            raise BadLine(f"{empty}, and task.prompt asks for it; give it a value, or leave the line out")
        return {"prompt": fill(fields.template, raw)}
    if fields.column is None:
        return {}
    if raw.get(fields.column) is None:
        raise BadLine(f"{how_empty(raw, fields.column)}; give it a prompt, or leave the line out")
    value = raw[fields.column]
    return {"messages" if isinstance(value, list) else "prompt": value}


def how_empty(raw: dict[str, Any], name: str) -> str:
    """Return in words why a line has no value in the field `name`."""
    return f"{name} is {'missing' if name not in raw else 'null' if raw[name] is None else 'not a number'}"


def is_nothing(value: Any) -> bool:
    """Return whether a value is null, or NaN, which stands for null in tables of numbers."""
    return value is None or (isinstance(value, float) and value != value)


def is_blank(value: Any) -> bool:
    """Return whether a value is a text that is empty or only white space."""
    return isinstance(value, str) and not value.strip()


def refuse_misspelt(request: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Raise a BadLine for fields that look like an option that the line does not have."""
    given = {*request, *PROMPTS} if request.keys() & {*PROMPTS} else {*request}
    missing = [key for key in KNOWN if key not in given]  # prompt_id beside a prompt is no misspelt prompt
    for key in metadata:
        if near := get_close_matches(key, missing, 1, 0.8):
            raise BadLine(
                f"unknown field {key!r}; did you mean {near[0]}? If it is only to pass through, rename it, or name "
                "the prompt's field: task.column=prompt"
            )


def refuse_unknown(request: dict[str, Any], known: tuple[str, ...]) -> None:
    """Raise a BadLine for fields that are not `known`, which would be ignored."""
    if unknown := sorted(set(request) - set(known)):
        raise BadLine(f"unknown field {', '.join(map(repr, unknown))}; known: {', '.join(known)}")


def unwrap(raw: dict[str, Any]) -> tuple[Form, dict[str, Any]]:
    """Return the form and the body of an OpenAI Batch line, without the fields that do nothing."""
    of_text = "; if it is the prompt itself, give task.column=body" if isinstance(raw.get("body"), str) else ""
    if not of_text:
        refuse_unknown(raw, ENVELOPE)
    if raw.get("method", "POST") != "POST":
        raise BadLine('method must be "POST"')
    if not isinstance(raw.get("body"), dict):
        raise BadLine(f'body must be an object: {{"messages": [...]}} or {{"prompt": "..."}}{of_text}')
    body = given_fields(raw["body"])
    form: Form = "completion" if "prompt" in body else "chat"
    url = raw.get("url")
    if url is not None:
        if not isinstance(url, str) or url not in URLS:
            raise BadLine(f"url must be {' or '.join(URLS)}")
        form = URLS[url]
        needed = "messages" if form == "chat" else "prompt"
        if needed not in body:
            raise BadLine(f"{url} needs {needed} in body")
    if not isinstance(body.get("model", ""), str):
        raise BadLine("model must be a string")
    refuse_unsupported(body)
    request = {key: value for key, value in body.items() if key not in NEUTRAL and key not in LABELS}
    refuse_unknown(request, ("model", *KNOWN))
    return form, request


def refuse_unsupported(fields: dict[str, Any]) -> None:
    """Raise a BadLine for fields of the API that would change the answer."""
    refused = []
    for key, values in NEUTRAL.items():
        value = fields.get(key, values[0])
        if not any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in values):
            refused.append(key)
    if refused:
        verb, them = ("is", "it") if len(refused) == 1 else ("are", "them")
        raise BadLine(f"{', '.join(refused)} {verb} not supported; remove {them}")


def read_request(request: dict[str, Any], column: str = "prompt") -> dict[str, Any]:
    """Return the fields of an `Item` that a request gives, and `samples`; errors call the prompt by its `column`."""
    prompt, messages = request.get("prompt"), request.get("messages")
    if prompt == "":
        raise BadLine(f"{column} is empty; give it a text, or leave the line out")
    if prompt is None and messages is None:
        raise BadLine("no prompt or messages in it; if the field of the prompt has another name, give task.column=NAME")
    if prompt is not None and messages is not None:
        raise BadLine("give either prompt or messages, not both")
    if prompt is not None and not isinstance(prompt, str):
        remedy = "write one line for each prompt" if isinstance(prompt, list) else "put it in quotes"
        raise BadLine(f"{column} must be a text; {remedy}")
    if is_blank(prompt):
        raise BadLine(f"{column} has nothing but white space; give it a text, or leave the line out")
    if all(key in request for key in LIMITS):
        raise BadLine("give either max_tokens or max_completion_tokens")
    limit = integer(request, LIMITS[0], 1) or integer(request, LIMITS[1], 1)
    return {
        "prompt": prompt,
        "messages": None if messages is None else read_messages(messages),
        "max_new_tokens": limit,
        "stop": read_stop(request.get("stop", [])),
        "suffix": read_suffix(request.get("suffix", ""), limit is not None),
        "samples": integer(request, "n", 1, MOST_SAMPLES) or 1,
        "response_format": read_response_format(request.get("response_format", {"type": "text"})),
        "token_steps": read_logprobs(request.get("logprobs", False), messages is not None),
        "sampling": read_sampling(request) if any(key in request for key in SAMPLING) else DEFAULT,
    }


def read_sampling(request: dict[str, Any]) -> RequestSampling:
    """Return how the request wants its tokens drawn."""
    return RequestSampling(
        temperature=number(request, "temperature", lambda t: t >= 0, "of at least 0"),
        top_p=number(request, "top_p", lambda p: 0 < p <= 1, "above 0 and at most 1"),
        top_k=integer(request, "top_k", 0),
        seed=integer(request, "seed", -(2**63), 2**63 - 1),
    )


def read_logprobs(value: Any, chat: bool) -> bool:
    """Return whether the tokens' probabilities are asked for: with true or, in a completion, with 0."""
    if isinstance(value, bool):
        return value
    if value != 0 or chat:
        zero = "" if chat else ", or 0"
        raise BadLine(f"logprobs={shown(value)} must be true or false{zero}: other tokens' probabilities are not kept")
    return True


def integer(request: dict[str, Any], key: str, least: int, most: int | None = None) -> int | None:
    """Return the integer field `key`, which must be from `least` to `most`; None if it is not given.

    20.0 is one, too: pandas writes columns of integers so if some are missing.
    """
    value = request.get(key)
    if value is None:
        return None
    whole = isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
    if not whole or isinstance(value, bool) or value < least or (most is not None and value > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise BadLine(f"{key}={shown(value)} must be an integer {allowed}")
    return int(value)


def number(request: dict[str, Any], key: str, fits: Callable[[float], bool], allowed: str) -> float | None:
    """Return the number field `key`, which must be finite and pass `fits`; None if it is not given."""
    value = request.get(key)
    if value is None:
        return None
    try:
        found = float(value) if is_number(value) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        found = math.inf
    if not math.isfinite(found) or not fits(found):
        raise BadLine(f"{key}={shown(value)} must be a number {allowed}")
    return found


def is_number(value: Any) -> bool:
    """Return whether a value is a number, also one of numpy's, but not a bool, which to Python is an int."""
    return isinstance(value, Real) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """Return a value as text for a message, cut if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists of lists of lists
        text = f"(a {type(value).__name__})"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def read_stop(value: Any) -> tuple[str, ...]:
    """Return the stop strings of a field, which has one or a list of them."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise BadLine("stop must be a non-empty string or a list of them")
    if any(UNDECODED in encodable(stop) for stop in stops):  # the text would end where a step ends within a character
        raise BadLine(
            "stop must contain neither U+FFFD, which stands for bytes that are no character, nor half of a surrogate "
            "pair"
        )
    return tuple(stops)


def read_response_format(value: Any) -> ResponseFormat | None:
    """Return what the answer must be; None if any text will do."""
    try:
        return ResponseFormat.of(value)
    except MissingLibrary:
        raise
    except ValueError as error:
        raise BadLine(f"response_format={shown(value)}: {error}") from error


def read_suffix(value: Any, limited: bool) -> str | None:
    """Return the text after an answer; None if there is none.

    Args:
        value: of the field.
        limited: whether the line limits the tokens of the answer.
    """
    if not isinstance(value, str):
        raise BadLine(f"suffix={shown(value)} must be a string")
    if value and not limited:
        raise BadLine("suffix needs max_tokens: how many tokens there are between the two texts, at most")
    return value or None


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Return chat messages; content in parts becomes one text, and missing content beside tool calls an empty text."""
    if not isinstance(value, list) or not value:
        raise BadLine('messages must be a non-empty list of {"role": "...", "content": "..."}')
    messages = []
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            raise BadLine(f'messages[{number}] must be {{"role": "...", "content": "..."}}, not {shown(message)}')
        if not isinstance(message.get("role"), str):
            raise BadLine(f'messages[{number}] has no role; give it one: "system", "user" or "assistant"')
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(map(part_text, content))
        if content is None and message.get("tool_calls"):
            content = ""
        if not isinstance(content, str):
            there = "has no content" if content is None else f"has the content {shown(content)}"
            raise BadLine(f"messages[{number}] ({message['role']}) {there}; give it a text")
        messages.append({**message, "content": content})
    last = messages[-1]
    if last["role"] != "assistant" and is_blank(last["content"]):
        which = f"messages[{len(messages) - 1}] ({last['role']}), the last one,"
        raise BadLine(f"{which} is empty; give it a text, or leave the line out")
    if all(is_blank(message["content"]) for message in messages):
        raise BadLine("messages have no text; give them one, or leave the line out")
    return messages


def part_text(part: Any) -> str:
    """Return the text of a content part."""
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise BadLine('content parts must be {"type": "text", "text": "..."}: these models read only text')
    return str(part["text"])
