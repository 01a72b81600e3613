"""What the points of a comparison are called, and on which curve each one lies."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from math import inf, isfinite

from lopa_dist.jobs.setup.settings import shown
from lopa_dist.jobs.show.report import typed_settings
from lopa_dist.jobs.show.seed_groups import SEEDS, SeedGroup, in_words, settings_by_name

# settings that are never in a name
NOT_IN_NAMES = ("task.shard", "hydra.run.dir", "hydra.sweep.dir", "launcher", "hydra/launcher", *SEEDS)
FEW = 60  # the most characters of settings after a name


def words_of(groups: Sequence[SeedGroup]) -> list[dict[str, str]]:
    """Return what tells each point apart, by setting: as typed if that is enough, else as reports have it.

    Settings that all points share are left out. The names of decode settings have no section. A point for which some
    of the other settings were typed is told apart by all of them, as its report has them.
    """
    typed = [typed_settings(group.folders[0]) for group in groups]
    for candidates in (typed, [in_words(group.report) for group in groups]):
        keys = [key for key in dict.fromkeys(key for words in candidates for key in words) if key not in NOT_IN_NAMES]
        unlike = [key for key in keys if len({words.get(key) for words in candidates}) > 1]
        found = [{key.removeprefix("decode."): words[key] for key in unlike if key in words} for words in candidates]
        for words, group in zip(found, groups, strict=True):
            known = settings_by_name(group.report)
            more = {key.removeprefix("decode.") for key in unlike} - words.keys() if words else set()
            words |= {key: shown(known[key]) for key in sorted(more) if key in known}
        if len({json.dumps(words, sort_keys=True) for words in found}) == len(groups):
            return found
    return found


def names_of(groups: Sequence[SeedGroup], words: Sequence[dict[str, str]]) -> list[str]:
    """Return the points' names: what tells them apart, after the folder's name where a person chose that."""
    names = [settings_in_words(settings) for settings in words]
    given = all("=" not in group.name for group in groups)
    folders = short_names([group.folders[0].resolve().name if group.name == "." else group.name for group in groups])
    if len(set(names)) < len(names):
        return folders
    if given:
        if any(len(name) > FEW for name in names):  # in all rows or in none (`settings_left_out`)
            return folders
        return [f"{folder} ({name})" if name else folder for folder, name in zip(folders, names, strict=True)]
    if len(groups) == 1:  # nothing differs: all that was typed
        [group] = groups
        typed = typed_settings(group.folders[0])
        names = [settings_in_words({k.removeprefix("decode."): v for k, v in typed.items() if k not in NOT_IN_NAMES})]
    return [name or "as configured" for name in names]


def settings_in_words(settings: dict[str, str]) -> str:
    """Return the settings of a point as one text."""
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def settings_left_out(names: Sequence[str], words: Sequence[dict[str, str]], called: Sequence[str]) -> list[str]:
    """Return a note with the settings that tell the points apart, if they do not fit in the points' names.

    Args:
        names: of the points.
        words: what tells each point apart.
        called: how the note calls each point.
    """
    texts = [settings_in_words(settings) for settings in words]
    if all(text in name for text, name in zip(texts, names, strict=True)):
        return []
    listed = "; ".join(f"run {name}: {text or 'as configured'}" for name, text in zip(called, texts, strict=True))
    return [f"Settings in which the runs differ: {listed}."]


def short_names(names: Sequence[str]) -> list[str]:
    """Return the names of a sweep's runs without the settings that all have."""
    common = set.intersection(*(set(name.split(",")) for name in names))
    return [",".join(part for part in name.split(",") if part not in common) or name for name in names]


def growing(words: Sequence[dict[str, str]]) -> str | None:
    """Return the setting that grows along a curve: the one that leaves the fewest curves.

    Of equals, it is the branches (the paper's Figure 4), or else the one with most values, or the first. Only settings
    whose values are numbers, or null, count. None where no such setting differs.
    """
    numbers = {}
    for key in dict.fromkeys(key for settings in words for key in settings):
        values = {settings.get(key, "null") for settings in words} - {"null"}
        if key not in SEEDS and all(is_number(value) for value in values):
            others = [{other: settings[other] for other in sorted(settings) if other != key} for settings in words]
            numbers[key] = -len(set(map(json.dumps, others))), key == "branches", len(values)
    return max(numbers, key=numbers.__getitem__, default=None)


def is_number(text: str) -> bool:
    """Return whether a setting's text is a finite number."""
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def curves_of(groups: Sequence[SeedGroup]) -> dict[str, list[tuple[str, int]]]:
    """Return the points of each curve, as labels and indices, by what tells the curves apart.

    One setting grows along each curve (`growing`); null comes after all numbers. Where a person chose the folders'
    names, each point is a curve of its own.
    """
    words = words_of(groups)
    names, along = short_names([group.name for group in groups]), growing(words)
    points = []
    for index, (name, settings) in enumerate(zip(names, words, strict=True)):
        usual = in_words(groups[index].report).get(along or "", "null")
        value = settings.get(along, usual) if along else "null"
        others = settings_in_words({key: text for key, text in settings.items() if key != along})
        if all("=" not in group.name for group in groups):
            label, others = "", name
        else:
            label = f"{along}={value}" if along else ""
        points.append((float(value) if is_number(value) else inf, label, others, index))
    curves: dict[str, list[tuple[str, int]]] = {}
    for _, label, curve, index in sorted(points, key=lambda point: (point[0], by_number(point[2]), *point[1:])):
        curves.setdefault(curve, []).append((label, index))
    return curves


def by_number(text: str) -> list[tuple[float, str]]:
    """Return a key that sorts texts as people do: ``drafts=4`` before ``drafts=16``."""
    return [(float(part), "") if is_number(part) else (inf, part) for part in re.split(r"([=, ])", text)]
