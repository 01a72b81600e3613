"""Presets in folders of the user's own, which a command line names by Hydra's `--config-dir` or `hydra.searchpath`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from lopa_dist.checks import UserError
from lopa_dist.overrides import quoted

SEARCH_PATH = "hydra.searchpath"
OF_FILES = "file://"
LONG = {"-cd": "--config-dir", "-cn": "--config-name", "-cp": "--config-path", "-p": "--package", "-c": "--cfg"}
WITH_VALUE = {*LONG.values(), "--info"}


def joined(arguments: Sequence[str]) -> list[str]:
    """Return a command line with each of Hydra's flags and its value in one word, as in ``--config-dir=FOLDER``."""
    found: list[str] = []
    words = iter(arguments)
    for word in words:
        flag = LONG.get(word, word)
        if flag in WITH_VALUE:
            value = next(words, None)
            if value is None:
                raise UserError(f"{word}: needs a value")
            flag = f"{flag}={value}"
        found.append(flag)
    return found


def named(flag: str, arguments: Iterable[str]) -> str | None:
    """Return the value of a flag in a command line whose flags are `joined`; None if it is not there."""
    values = [word.partition("=")[2] for word in arguments if word.startswith(f"{flag}=")]
    return values[-1] if values else None


def search_path(arguments: Sequence[str]) -> list[str]:
    """Return where a command line, whose flags are `joined`, has Hydra look for presets, besides the package's own."""
    asked = [word for word in arguments if word.lstrip("+").startswith(f"{SEARCH_PATH}=")]
    value = OverridesParser.create().parse_override(asked[-1]).value() if asked else []
    places = [str(getattr(one, "text", one)) for one in (value if isinstance(value, list) else [value])]
    folder = named("--config-dir", arguments)
    return [*places, *([OF_FILES + str(Path(folder).expanduser().absolute())] if folder else [])]


def folders(arguments: Sequence[str]) -> list[Path]:
    """Return those places of the `search_path` that are folders."""
    places = (place.removeprefix(OF_FILES) for place in search_path(arguments))
    return [Path(place) for place in places if "://" not in place]  # as pkg:// has


def search_override(arguments: Sequence[str]) -> list[str]:
    """Return the `search_path` as an override for Hydra's compose; none if it is empty."""
    places = search_path(arguments)
    return [f"{SEARCH_PATH}=[{','.join(map(quoted, places))}]"] if places else []


def as_overrides(arguments: Sequence[str]) -> list[str]:
    """Return a command line with `--config-dir` as an override (`search_override`)."""
    others = [
        word for word in arguments
        if not word.startswith("--config-dir=") and not word.lstrip("+").startswith(f"{SEARCH_PATH}=")
    ]  # fmt: skip
    return [*others, *search_override(arguments)]


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
