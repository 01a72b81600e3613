"""The points of a sweep: their settings, and which of them have no run in the sweep's folder yet."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import get_overrides_dirname
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lopa_dist.composing import short
from lopa_dist.setting_keys import CONF
from lopa_dist.tasks.rows import RUN_LOCK

SWEEP = "multirun.yaml"  # in which Hydra notes what a sweep's command line was


def points_of(overrides: list[Override]) -> list[list[str]]:
    """Return the settings of each point of a sweep.

    Args:
        overrides: what was typed, parsed, without settings of Hydra itself.
    """
    [points] = BasicSweeper.split_arguments(overrides, None)
    return [list(point) for point in points]


def without_run(folder: Path) -> list[str]:
    """Return the names of the points of the last sweep in `folder` that have not begun, or that failed before.

    It is empty if `folder` is not a sweep's, or another sweeper than Hydra's own chose the points.
    """
    if not (folder / SWEEP).is_file():
        return []
    try:
        hydra = OmegaConf.load(folder / SWEEP).hydra
        if not str(hydra.sweeper._target_).endswith(".BasicSweeper"):
            return []
        parse = OverridesParser.create().parse_overrides
        points, naming = points_of(parse(list(hydra.overrides.task))), hydra.job.config.override_dirname
        if subdir_of(hydra) != subdir_of(OmegaConf.load(CONF / "config.yaml").hydra):
            return []  # folders have other names
    except (OSError, YAMLError, OmegaConfBaseException, UnicodeDecodeError):
        return []
    return [name for name in names_of(points, naming) if name and not has_begun(folder / short(name))]


def has_begun(folder: Path) -> bool:
    """Return whether a job has begun in a run folder. Hydra makes the folder before the job begins."""
    return any((folder / mark).exists() for mark in (RUN_LOCK, "journal", "report.json"))


def subdir_of(hydra: Any) -> str:
    """Return Hydra's pattern for the names of the points' folders, before its variables are replaced."""
    sweep: Any = OmegaConf.to_container(hydra.sweep, resolve=False)
    return str(sweep.get("subdir"))


def names_of(points: list[list[str]], naming: Any) -> list[str]:
    """Return the names of a sweep's points; `short` makes the names of their folders from these.

    Args:
        points: from `points_of`.
        naming: Hydra's setting `hydra.job.config.override_dirname`.
    """
    parse, left_out = OverridesParser.create().parse_overrides, list(naming.exclude_keys)
    separators = naming.get("item_sep", ","), naming.get("kv_sep", "=")
    return [get_overrides_dirname(parse(point), left_out, *separators) for point in points]


def shared_folder(points: list[list[str]]) -> str:
    """Return the name of a folder that several points of a sweep would have; empty if each has its own."""
    names = names_of(points, OmegaConf.load(CONF / "config.yaml").hydra.job.config.override_dirname)
    return next((name for name, times in Counter(map(short, names)).items() if times > 1), "")
