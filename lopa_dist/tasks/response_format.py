"""The format that an answer must have: JSON, perhaps by a schema. It is checked when the answer is complete."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lopa_dist.optional import lacking

TRIES = 3  # what users of other engines usually allow
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")  # of a JSON schema
OPENAI = ("text", "json_object", "json_schema")  # types of a `response_format`
KEYWORDS = {"$schema", "$ref", "properties", "items", "enum", "const", "anyOf", "oneOf", "allOf"}  # of one without type
LONGEST = 200  # characters of a reason


class MissingLibrary(ValueError):
    """An error for a format that cannot be checked because a library is missing: no line of the input is at fault."""


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """A JSON object, or what a schema describes.

    Attributes:
        schema: as JSON; None: any object will do.
        tries: the most answers to generate, each with random numbers of its own.
    """

    schema: str | None = None
    tries: int = TRIES

    @classmethod
    def of(cls, value: Any) -> ResponseFormat | None:
        """Return the format that OpenAI's `response_format`, or a schema alone, asks for; None if any text will do.

        Raises:
            MissingLibrary: schemas need one that is not installed.
            ValueError: an unknown format, or an invalid schema.
        """
        kind = value.get("type") if isinstance(value, Mapping) else None
        if isinstance(value, Mapping) and kind not in OPENAI and (is_types(kind) or KEYWORDS & value.keys()):
            kind, value = "json_schema", {"json_schema": {"schema": value}}
        if kind == "text":
            return None
        if kind == "json_object":
            return cls()
        if kind != "json_schema":
            raise ValueError('must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", ...}')
        wrapped = value.get("json_schema")
        schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else None
        if not isinstance(schema, Mapping):
            raise ValueError('a json_schema needs {"json_schema": {"schema": {...}}}')
        try:
            text = json.dumps(schema, sort_keys=True)
            validator(text)
        except ValueError:
            raise
        except Exception as error:  # what libraries raise for schemas that are nested too deeply or have odd types
            raise ValueError(f"the json_schema cannot be used ({type(error).__name__}: {error})"[:LONGEST]) from error
        return cls(text)

    def failure(self, text: str) -> str:
        """Return why a text does not have the format; empty if it does."""
        try:
            value = json.loads(text, parse_constant=refuse)
        except (ValueError, RecursionError) as error:
            return f"not JSON ({error})"
        if self.schema is None:
            return "" if isinstance(value, dict) else f"JSON, but {type(value).__name__} instead of an object"
        try:
            wrong = next(validator(self.schema).iter_errors(value), None)
        except Exception as reason:  # references to what is not in the schema, and invalid patterns
            return f"JSON, but the schema cannot be applied ({reason})"[:LONGEST]
        return "" if wrong is None else f"not of the schema ({wrong.json_path}: {wrong.message})"[:LONGEST]


def is_types(value: Any) -> bool:
    """Return whether a value is what a JSON schema has as its `type`: one type, or a list of those that are allowed."""
    return value in TYPES or (isinstance(value, list) and bool(value) and all(one in TYPES for one in value))


@lru_cache(maxsize=256)
def validator(schema: str) -> Any:
    """Return a validator for a schema, which reads no file and no network; raise a ValueError if it is no schema."""
    try:
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry
    except ImportError as error:
        raise MissingLibrary(f"a json_schema {lacking('jsonschema', error, 'json')}") from error
    content = json.loads(schema)
    kind = validator_for(content)
    try:
        kind.check_schema(content)
    except SchemaError as error:
        reason = f"the json_schema is not a valid JSON Schema ({error.json_path}: {error.message})"
        raise ValueError(reason[:LONGEST]) from error
    return kind(content, registry=Registry())


def refuse(name: str) -> Any:
    """Raise a ValueError: NaN and infinities are not JSON."""
    raise ValueError(f"{name} is not JSON")
