"""Sweeps: all jobs are checked before the first starts, and at the end the command that compares them is printed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Iterator, Sequence, Set
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from lopa_dist.atomic import check_writable
from lopa_dist.checks import UserError
from lopa_dist.composing import composed
from lopa_dist.config import Config, check_files
from lopa_dist.jobs.folder.apart import check_apart
from lopa_dist.jobs.folder.sweep_points import points_of, shared_folder
from lopa_dist.jobs.setup.resolve import resolve_decode
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.config_file import read_config
from lopa_dist.models.families import training_pattern
from lopa_dist.models.files import local
from lopa_dist.models.files import why_not_there as model_not_there
from lopa_dist.overrides import as_hydra_reads, keys_in, omegaconf_message
from lopa_dist.own_presets import own_configuration, search_override
from lopa_dist.parallel.launcher import LaunchError
from lopa_dist.parallel.mesh import choose_mesh
from lopa_dist.setting_keys import check_keys
from lopa_dist.tasks.hub_data import data_sets, why_not_there
from lopa_dist.tasks.registry import check_judging, first_errors, make_task, options_of, read_later, task_class
from lopa_dist.tasks.rows import check

SHOWN = 8  # the most points that a message names


def checked_job(overrides: Sequence[str], ranks: int | None = None) -> Config:
    """Return the configuration of a job with these overrides, or raise a ValueError if it would not begin.

    `ranks` is the number of its ranks, if that is known.
    """
    config = composed(list(overrides))
    check_decoding(config, keys_in(overrides))
    check_files(config)
    if config.task.input:
        check_apart(config.task)
        check(config.task.input)
        task = make_task(config.task)
        errors = [] if read_later(config.task.input) else first_errors(task)
        if errors and all(errors):
            raise ValueError(f"task.input={config.task.input}: none of its first lines can be used. {errors[0]}")
        check_judging(task)
    if ranks is not None:
        parallel = config.parallel
        choose_mesh(parallel.data, parallel.branch, parallel.tensor, ranks, ranks, config.decode.max_branches)
    return config


@cache
def config_of(folder: Path) -> ModelConfig:
    """Return a checkpoint's configuration; the points of a sweep mostly have one model."""
    return read_config(folder)


def check_decoding(config: Config, typed: Collection[str]) -> None:
    """Raise a ValueError if the options of decoding do not suit the model, where this machine has its configuration."""
    folder = local(config.model.path)
    if folder is None or not (folder / "config.json").exists():
        return
    resolve_decode(config.decode, training_pattern(config_of(folder), config.model.pattern), typed)


def check_seed(config: Config) -> None:
    """Raise a ValueError if another seed would give the same texts: equal runs would pass for independent ones."""
    if not getattr(task_class(config.task.name), "draws", True) and not config.decode.temperature:
        other = "; task.problem_seed=1,2 asks other problems" * ("problem_seed" in options_of(config.task.name))
        raise ValueError(f"seed changes nothing at decode.temperature=0: every seed writes the same texts{other}")


def main(ranks: int, arguments: Sequence[str]) -> None:
    """Exit with a message if the job would not begin; this is the `--dry-run` of the launch scripts."""
    try:
        check_keys([a for a in arguments if not a.startswith("-")])
        own = [a for a in as_hydra_reads(list(arguments)) if not a.startswith(("hydra", "-"))]
        config = checked_job([*own, *search_override(arguments)], ranks)
        folders = [a.partition("=")[2] for a in arguments if a.lstrip("+").startswith("hydra.run.dir=")]
        folder = folders[-1] if folders else ""
        try:
            check_writable(Path(folder.strip("'\"") or "outputs").expanduser())
        except OSError as error:
            raise UserError(f"hydra.run.dir={folder or 'outputs/...'}: cannot be written to ({error})") from error
        for reason in (model_not_there(config.model.path), *map(why_not_there, data_sets(config.task))):
            if reason:
                raise UserError(reason)
    except (ValueError, LaunchError, OmegaConfBaseException) as error:
        reason = omegaconf_message(error) if isinstance(error, OmegaConfBaseException) else str(error)
        sys.exit(f"lopa-dist: the job would be refused: {reason}")


def check_points(arguments: Sequence[str]) -> None:
    """Raise a UserError that names the points of a sweep that cannot run.

    Args:
        arguments: of the command line, with flags `joined`. Hydra's own (launchers, folders) are ignored. If another
            sweeper chooses the points, they are not known yet, and nothing is checked; nor if the configuration is
            the user's own.
    """
    own = [a for a in arguments if not a.startswith("-") and not a.startswith(("hydra", "launcher="))]
    if own_configuration(arguments) or any(a.startswith("hydra/sweeper") for a in arguments):
        return
    overrides = OverridesParser.create().parse_overrides(own)
    points = points_of(overrides)
    swept = {o.get_key_element() for o in overrides if o.is_sweep_override()}
    refused = list(refusals(points, swept, search_override(arguments)))
    if not refused:
        named = any(argument.lstrip("+").startswith(("hydra.sweep.subdir", "hydra.job.")) for argument in arguments)
        if not named and (folder := shared_folder(points)):
            raise UserError(
                f"several points of this sweep would have one folder, {folder}, and replace each other's results; "
                "hydra.sweep.subdir='${hydra.job.num}' numbers the folders"
            )
        if "hydra/launcher=submitit_local" in arguments and len(points) > 1:
            logs = "DIR/.submitit/*/*_log.out of the sweep's folder DIR"
            print(
                f"{len(points)} jobs run at once and share this machine: compare no speeds. Logs: {logs}",
                file=sys.stderr,
            )
        return
    if len(refused) == len(points) and len({reason for _, reason in refused}) == 1:
        raise UserError(refused[0][1])
    told = [reason if reason.startswith(f"{point}: ") else f"{point}: {reason}" for point, reason in refused[:SHOWN]]
    more = [f"and {len(refused) - SHOWN} more"] if len(refused) > SHOWN else []
    lines = "\n  ".join([*told, *more])
    raise UserError(
        f"{len(refused)} of {len(points)} points cannot run, so none has started:\n  {lines}\n"
        "Sweep over the others: two sweeps with one hydra.sweep.dir (FOLDER of launch/sweep.sh) have one table"
    )


def refusals(points: Sequence[Sequence[str]], swept: Set[str], presets: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the points of a sweep that cannot run, each by its values of the keys `swept`, and why it cannot.

    `presets` says where presets of the user's own are, as a setting of Hydra's (`search_override`).
    """
    for point in points:
        try:
            config = checked_job([*point, *presets])
            if config.task.input == "-" and len(points) > 1:
                raise ValueError("task.input=-: only one point can read standard input; write a file")
            if "seed" in swept:
                check_seed(config)
        except ValueError as error:
            yield " ".join(o for o in point if o.split("=")[0] in swept), str(error)


class SweepFolder(Callback):  # type: ignore[misc]  # hydra has no types
    """A callback that learns from Hydra where a sweep's runs are; `conf/config.yaml` names this class."""

    folder: Path | None = None  # of the sweep of this process; None if there is none

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Store the folder of the sweep, which `config` names."""
        SweepFolder.folder = Path(config.hydra.sweep.dir)


def say_how_to_compare() -> None:
    """Print the command that compares the runs of this process's sweep, if some have ended."""
    folder, SweepFolder.folder = SweepFolder.folder, None
    if folder is not None and any(folder.rglob("report.json")):
        print(f"Compare the runs: lopa-dist report {shlex.quote(str(folder))}")
