"""The description of each setting: its default, its meaning, and the values that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, is_dataclass
from functools import lru_cache
from typing import Any

import yaml

from lopa_dist.checks import written
from lopa_dist.config import AUTO_CHOICES, Config, DecodeOptions
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.setting_keys import keys_of

KINDS = {
    "IntOrAuto": "an integer, auto",
    "int": "an integer",
    "float": "a number",
    "bool": "true, false",
    "None": "null",
    "list[str]": "a list",
    "dict[str, Any]": "names and values",
}


@dataclass(frozen=True)
class Setting:
    """A key of the configuration, as its dataclass describes it."""

    key: str
    default: Any
    meaning: str
    allowed: str  # its choices, or what kind of value it takes
    details: str  # what else its section's docstring says of it; often nothing


def settings_of(section: Any = Config, prefix: str = "") -> Iterator[Setting]:
    """Yield every key below a section, in the order of its fields."""
    for key, owner, entry in keys_of(section, prefix):
        if not is_dataclass(make := entry.default_factory):
            default = entry.default if make is MISSING else make()
            meaning = documented_field(entry, owner).metadata["meaning"]
            yield Setting(key, default, meaning, allowed(entry, owner), details(entry.name, owner))


def documented_field(entry: Field[Any], section: Any) -> Field[Any]:
    """Return the field that says what a setting means: `DecodeOptions` only widens some fields of `DecodeConfig`."""
    return DecodeConfig.__dataclass_fields__[entry.name] if section is DecodeOptions else entry


def allowed(entry: Field[Any], section: Any) -> str:
    """Return what values a setting takes, in words."""
    choices = documented_field(entry, section).metadata.get("choices")
    if choices:
        more = ("auto",) if section is DecodeOptions and entry.name in AUTO_CHOICES else ()
        return ", ".join([*more, *map(written, choices)])
    kinds = [kind.strip() for kind in str(entry.type).split("|")]
    words = [KINDS[kind] for kind in kinds if kind in KINDS]
    if "str" in kinds:
        words.insert(len(words) - ("None" in kinds), "auto" if "int" in kinds else "a text")
    words = ", ".join(words).split(", ")
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def details(name: str, section: Any) -> str:
    """Return the paragraphs of a section's description that begin with a setting's name, and the lists below them."""
    its_own, inside = [], False
    for paragraph in description(section).split("\n\n"):
        inside = paragraph.startswith(f"`{name}`") or (inside and paragraph.startswith("- "))
        its_own += [paragraph] if inside else []
    return "\n\n".join(its_own)


def description(section: Any) -> str:
    """Return what a section's docstring says, without its list of errors."""
    documented = DecodeConfig if section is DecodeOptions else section
    return inspect.cleandoc(str(documented.__doc__)).split("\n\nRaises:")[0]


def shown(value: Any) -> str:
    """Return a value as one writes it on the command line."""
    return remembered(value) if isinstance(value, str | int | float | None) else in_yaml(value)


@lru_cache(maxsize=4096, typed=True)  # typed, because 1, 1.0 and true are equal
def remembered(value: str | float | None) -> str:
    """Return what `in_yaml` does: a report of many runs shows the same few values thousands of times."""
    return in_yaml(value)


def in_yaml(value: Any) -> str:
    """Return the first line of a value in YAML, with lists and dictionaries in brackets."""
    return yaml.safe_dump(value, default_flow_style=True).splitlines()[0]
