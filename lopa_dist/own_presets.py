"""Presets in folders of the user's own, which a command line names by Hydra's `--config-dir` or `hydra.searchpath`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from lopa_dist.checks import UserError
from lopa_dist.overrides import hydra_message, quoted

SEARCH_PATH = "hydra.searchpath"
OF_FILES = "file://"
LONG = {"-cd": "--config-dir", "-cn": "--config-name", "-cp": "--config-path", "-p": "--package", "-c": "--cfg"}


def joined(arguments: Sequence[str]) -> list[str]:
    """Return a command line with each of Hydra's flags and its value in one word, as in ``--config-dir=FOLDER``."""
    found: list[str] = []
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        flag = LONG.get(flag, flag)
        if flag not in LONG.values():
            found.append(word)
            continue
        if not equals and (value := next(words, "")) == "":
            raise UserError(f"{word}: needs a value")
        found.append(f"{flag}={os.path.expanduser(value)}")
    return found


def named(flag: str, arguments: Iterable[str]) -> str | None:
    """Return the value of a flag in a command line whose flags are `joined`; None if it is not there."""
    values = [word.partition("=")[2] for word in arguments if word.startswith(f"{flag}=")]
    return values[-1] if values else None


def search_path(arguments: Sequence[str]) -> list[str]:
    """Return where a command line, whose flags are `joined`, has Hydra look for presets, after the package's own.

    Raises:
        UserError: the folder of `--config-dir` does not exist, or `hydra.searchpath` cannot be read.
    """
    asked = [word for word in arguments if word.lstrip("+").startswith(f"{SEARCH_PATH}=")]
    try:
        value = OverridesParser.create().parse_overrides(asked[-1:])[0].value() if asked else []
    except HydraException as error:
        raise UserError(hydra_message(error)) from error
    places = [str(getattr(one, "text", one)) for one in (value if isinstance(value, list) else [value])]
    if (folder := named("--config-dir", arguments)) is None:
        return places
    own = Path(folder).absolute()
    if not own.is_dir():
        raise UserError(f"--config-dir={folder}: no such folder")
    return [f"{OF_FILES}{own}", *places]


def folders(arguments: Sequence[str]) -> list[Path]:
    """Return those places of the `search_path` that are folders."""
    places = (place.removeprefix(OF_FILES) for place in search_path(arguments))
    return [Path(place) for place in places if "://" not in place]  # as pkg:// has


def own_configuration(arguments: Iterable[str]) -> str | None:
    """Return the flag by which the whole configuration is the user's own; None if it is the package's."""
    return next((a for a in arguments if a.startswith(("--config-name=", "--config-path="))), None)


def search_override(arguments: Sequence[str]) -> list[str]:
    """Return the `search_path` as an override for Hydra's compose; none if it is empty."""
    places = search_path(arguments)
    return [f"{SEARCH_PATH}=[{','.join(map(quoted, places))}]"] if places else []


def as_overrides(arguments: Sequence[str]) -> list[str]:
    """Return a command line with `--config-dir` as an override, so that all that reads it finds the same presets.

    Hydra itself needs the flag where the whole configuration is the user's own.
    """
    if own_configuration(arguments):
        return list(arguments)
    others = [
        word for word in arguments
        if not word.startswith("--config-dir=") and not word.lstrip("+").startswith(f"{SEARCH_PATH}=")
    ]  # fmt: skip
    settings = next((number for number, word in enumerate(others) if not word.startswith("-")), len(others))
    return [*others[:settings], *search_override(arguments), *others[settings:]]  # Hydra wants settings side by side


def unreadable(error: yaml.YAMLError | UnicodeDecodeError, arguments: Sequence[str]) -> str:
    """Return which preset of a command line cannot be read, and why."""
    if isinstance(error, yaml.YAMLError):
        return f"a preset cannot be read: {' '.join(str(error).split())}"
    return f"{undecodable(arguments) or 'a preset'}: is no UTF-8 ({error}); save it as UTF-8"


def undecodable(arguments: Sequence[str]) -> Path | None:
    """Return a preset of the user's own that is no UTF-8; None if there is none."""
    for file in (file for folder in folders(arguments) for file in sorted(folder.rglob("*.yaml"))):
        try:
            file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return file
        except OSError:
            continue
    return None
