"""The words of a command line in Hydra's syntax: as people type them, as Hydra reads them, and what it says of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from lopa_dist.checks import did_you_mean
from lopa_dist.own_code import is_own


def as_hydra_reads(arguments: list[str]) -> list[str]:
    """Return the arguments of a command line in the form that Hydra reads.

    If they name a model by its path alone, ``model=local`` is added, so that the embedded model's own settings do not
    apply. The user's own task, ``task=FILE.py:CLASS``, becomes ``task=own`` with ``task.name=FILE.py:CLASS``. The value
    of `task.prompt` is quoted, because its braces, colons and commas are plain text. A path that begins with ``~/`` is
    one in the home directory, though shells leave it as it is after a ``=``.
    """
    arguments = [
        f"{key}={quoted(os.path.expanduser(value))}"
        if value.startswith("~/") and "," not in value and not a.startswith("-")
        else a
        for a in arguments
        for key, _, value in [a.partition("=")]
    ]
    arguments = [
        new for a in arguments
        for new in (["task=own", f"task.name={a[5:]}"] if a.startswith("task=") and is_own(a[5:]) else [a])
    ]  # fmt: skip
    key = "task.prompt="
    arguments = [
        key + quoted(a.removeprefix(key)) if a.startswith(key) and a[len(key) : len(key) + 1] not in ("'", '"') else a
        for a in arguments
    ]
    at = next((i for i, a in enumerate(arguments) if a.startswith("model.path=")), None)
    if at is None or any(a.startswith("model=") for a in arguments):
        return arguments
    return [*arguments[:at], "model=local", *arguments[at:]]


def keys_in(overrides: Iterable[str]) -> frozenset[str]:
    """Return the keys that `overrides` give a value."""
    return frozenset(override.lstrip("+~").partition("=")[0] for override in overrides)


def is_setting(override: Override) -> bool:
    """Return whether an override gives one setting a value, as ``decode.drafts=8`` does."""
    key, changes = override.get_key_element(), override.type is OverrideType.CHANGE
    return changes and not override.is_sweep_override() and "." in key and not key.startswith("hydra.")


def typed(key: str, value: Any) -> str:
    """Return a setting as one types it into a shell, where Hydra needs quotes around ``=``, brackets or spaces."""
    text = quoted(str(value))
    if text == str(value):
        return f"{key}={text}"
    for_shell = re.sub(r'([\\"$`])', r"\\\1", f"{key}={text}")
    return f'"{for_shell}"'


def quoted(text: str) -> str:
    """Return a text as a value that Hydra reads back unchanged: in quotes, unless it is a plain word or number."""
    return text if re.fullmatch(r"[\w./:@%+-]+", text, re.ASCII) else in_quotes(text)


def in_quotes(text: str) -> str:
    """Return a text as a value that Hydra reads as a text, also if it looks like a number."""
    escaped = re.sub(r"(\\+)(?='|$)", r"\1\1", text).replace("'", "\\'")  # a backslash is special only before a quote
    return f"'{escaped}'"


def hydra_message(error: HydraException) -> str:
    """Return what Hydra says of a command line that it cannot compose, without its internals."""
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        return omegaconf_message(cause)
    if isinstance(error, OverrideParseException):
        key, equals, value = error.override.partition("=")
        if not equals:
            return f"{error.override}: settings are KEY=VALUE, and a value with spaces is in quotes"
        return f"{error.override}: cannot be read; if the value is one text, quote it twice: {typed(key, value)}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        if group.startswith("model/"):  # a hub id
            path = f"{group.removeprefix('model/')}/{name}"
            return f"model={path}: not a preset; a checkpoint's folder or hub id is given as model.path={path}"
        hint = did_you_mean(name, error.options)
        return f"{group}={name}: no such preset{hint} There are {', '.join(error.options)}"
    text = str(error).split("\nConfig search path")[0].strip()
    first, *others = text.splitlines()
    if (named := re.search(r"full_key: ?(\S*)", text)) and "raised while composing config" in first:
        return ": ".join(filter(None, [first.split(":")[0], named[1], others[0]]))  # of a preset's file
    return text


def key_in(message: str) -> str | None:
    """Return the key that does not exist according to Hydra's `message`; None if it says something else."""
    found = re.search(r"Key '[^']*' not in .*?full_key: (\S+)", message, re.DOTALL)
    return found[1] if found else None


def omegaconf_message(error: OmegaConfBaseException) -> str:
    """Return OmegaConf's message with the key in front and without internals."""
    first = str(error).splitlines()[0]
    return f"{error.full_key}: {first}" if error.full_key else first
