"""The keys of settings, and what a misspelt one was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import Field, fields, is_dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, OverrideType
from hydra.errors import HydraException

from lopa_dist.checks import UserError
from lopa_dist.config import Config

HERE = Path(__file__).parent
CONF = HERE / "conf" if (HERE / "conf").is_dir() else HERE.parent / "conf"  # in a wheel, and in a checkout


@cache
def groups() -> frozenset[str]:
    """Return the folders of presets in `conf`."""
    return frozenset(path.name for path in CONF.iterdir() if path.is_dir())


def check_keys(overrides: list[str]) -> None:
    """Raise a UserError that suggests the nearest known keys for a misspelt one, before Hydra composes anything."""
    known = [key for key, *_ in keys_of()]
    sections = {key.rpartition(".")[0] for key in known} - groups() - {""}
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if key in groups() and value.startswith("../"):
            raise UserError(f"{override}: a preset is named without its folder")
        if key in groups() and (wrong := next(no_names(override), None)) is not None:
            raise UserError(f"{override}: {wrong} is not the name of a preset; leave out {key} for the usual one")
        if "=" in override and key in sections and not value.lstrip().startswith("{"):
            names = [one for one in known if one.rpartition(".")[0] == key]
            raise UserError(f"{override}: {key} has no presets, but the settings {', '.join(names)}")
        if "=" not in override or key.startswith(("hydra", "-")) or key in groups() or "/" in key or "@" in key:
            continue
        if key not in known:
            near = nearest(key, {*known, *groups()})  # a set: some keys are groups, too
            if key.split(".")[-1] == "n":  # its name in a line of a file and in `SamplingParams`
                near = ["task.samples"]
            if key == "task.stop":
                raise UserError("task.stop: no such key; stop strings are a line's own: give the input a field stop")
            if near:
                raise UserError(f"{key}: no such key; did you mean {', '.join(near)}? `lopa-dist explain` lists all")
            section = key.split(".")[0]
            names = [k for k in known if k.startswith(f"{section}.")]
            names = names or sorted({k.split(".")[0] for k in known} | groups())
            raise UserError(f"{key}: no such key (CHANGELOG.md has those that are gone). Known: {', '.join(names)}")


def no_names(override: str) -> Iterator[str]:
    """Yield the values of an override, several in a sweep, that cannot name a preset: numbers, truth values, null."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:  # which says more when it composes
        return
    if parsed.type is OverrideType.DEL:
        return
    value = parsed.value()
    for one in value.list if isinstance(value, ChoiceSweep) else [value]:
        if one is None or isinstance(one, bool | int | float):
            yield "null" if one is None else str(one)


def nearest(key: str, known: Iterable[str]) -> list[str]:
    """Return up to three `known` keys that `key` may be meant for, the most alike first.

    Their last part is nearly the same as that of `key`, or begins with it. If some of them are in the same section,
    only these are returned; otherwise, if some have exactly the same last part, only those.
    """
    section, _, name = key.rpartition(".")
    parts = {one: one.rpartition(".") for one in known if one != "task.name"}  # which presets set
    likeness = {one: SequenceMatcher(None, name, last).ratio() for one, (_, _, last) in parts.items()}
    close = [one for one in sorted(parts) if likeness[one] >= 0.75 or (name and parts[one][2].startswith(name))]
    close.sort(key=lambda one: -likeness[one])
    beside = [one for one in close if section and parts[one][0] == section]
    return (beside or [one for one in close if parts[one][2] == name] or close)[:3]


def keys_of(section: Any = Config, prefix: str = "") -> Iterator[tuple[str, Any, Field[Any]]]:
    """Yield the dotted name of each setting and section below a section, the dataclass that has it, and its field."""
    for entry in fields(section):
        key = prefix + entry.name
        yield key, section, entry
        if is_dataclass(entry.default_factory):
            yield from keys_of(entry.default_factory, f"{key}.")
