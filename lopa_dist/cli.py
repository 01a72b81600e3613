"""The command line: Hydra's app, which runs the job, and the other commands (`commands.py`)."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lopa_dist import __version__
from lopa_dist.atomic import no_room
from lopa_dist.checks import UserError, did_you_mean
from lopa_dist.commands import COMMANDS, perform
from lopa_dist.composing import what_hydra_says
from lopa_dist.config import Config, check_files
from lopa_dist.encodable import visible
from lopa_dist.imports import no_garbage
from lopa_dist.jobs.folder.one_job import own_folder
from lopa_dist.overrides import as_hydra_reads, keys_in, omegaconf_message, typed
from lopa_dist.own_code import forget_changed, own_line
from lopa_dist.own_presets import as_overrides, joined, named, own_configuration, unreadable
from lopa_dist.parallel.launcher import LaunchError, RankError, detect, die, into_log, tell
from lopa_dist.parallel.stop import INTERRUPTED, STOPPED, Stop, Stopped, answered, bounded_end, leave_at_signals
from lopa_dist.setting_keys import CONF, check_keys
from lopa_dist.sweep import check_points, say_how_to_compare

log = logging.getLogger("lopa_dist")
SWEEP = "-m", "--multirun"
RUN_FOLDERS = "hydra.run.dir=", "hydra.sweep.dir="
FLAGS = {  # ours, and Hydra's
    "--help", "--dry-run", "--multirun", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run",
    "--info", "--shell-completion", "--config-path", "--config-name", "--config-dir",
}  # fmt: skip


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def app(raw: DictConfig) -> Any:
    """Run a job; Hydra calls this once, or for each job of a sweep."""
    try:
        return job(raw)
    except (RankError, UserError) as error:
        if swept():  # Hydra raises this when the sweep's other jobs have run; if several fail, only the first
            if not detect().rank:
                log.error("%s", error)
            raise type(error)(f"{HydraConfig.get().job.override_dirname}: {error}") from error
        end(error)  # here, because Hydra would write its own words above the message
    except Exception:
        if swept() and not detect().rank:  # of the sweep's jobs that fail, Hydra shows only the first
            log.exception("%s:", HydraConfig.get().job.override_dirname)
        raise


@contextmanager
def mistakes(again: str = "start it again") -> Iterator[None]:
    """Turn errors that the user can correct into UserErrors; for a full disk, the message says what to do `again`."""
    try:
        yield
    except OmegaConfBaseException as error:
        raise UserError(omegaconf_message(error)) from error
    except OSError as error:
        raise UserError(no_room(error, again) or str(error)) from error
    except ValueError as error:
        raise UserError(f"{own_line(error)}{error}") from error


def swept() -> bool:
    """Return whether this is a job of a sweep that Hydra runs."""
    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def job(raw: DictConfig) -> Any:
    """Run one job and return what `tell_outcome` returns, or None if this rank has no report.

    Hydra has composed the configuration and checked its types; its values are checked here.
    """
    world = detect()
    submitted = "SUBMITIT_EXECUTOR" in os.environ  # a job of a sweep, which may have many ranks
    forget_changed()  # since an earlier job of the same sweep
    with mistakes():
        config = OmegaConf.to_object(raw)
        if not isinstance(config, Config):
            raise UserError(
                "the configuration that was read does not extend lopa_dist's: let it begin with the line "
                "`defaults: [config, _self_]`"
            )
        check_files(config)
    if world.rank:
        logging.getLogger().setLevel(logging.WARNING)
    for name in ("httpx", "httpcore", "filelock"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns of a home that cannot be written
    with no_garbage():  # torch and transformers take seconds to import; help and mistakes should not wait for them
        from lopa_dist.jobs.run.job import run
        from lopa_dist.jobs.show.outcome import tell_outcome
    folder, stop = Path(HydraConfig.get().runtime.output_dir), Stop(config.job.grace_s)
    again = f"the same command and {typed('hydra.run.dir', folder)}"
    if swept():
        again = f"the sweep and {typed('hydra.sweep.dir', HydraConfig.get().sweep.dir)}"
    where = "" if world.rank else f" with {typed('hydra.run.dir', folder)}"  # only rank 0 has the run folder
    try:
        with bounded_end(world, config.parallel.timeout_s), mistakes(f"start it again{where}"):
            report = run(config, folder, world, stop, keys_in(HydraConfig.get().overrides.task))
    except Stopped as error:
        go_on = f"; go on with {again}" if world.rank == 0 else ""
        into_log(f"{error}{go_on}")
        if error.alone:
            die(f"lopa-dist: {error}{go_on}", STOPPED)
        tell(f"lopa-dist: {error}{go_on}")
        sys.exit(STOPPED)
    except (RankError, UserError) as error:
        into_log(f"{error}")
        raise
    except SystemExit as error:
        if where := own_line(error):
            raise UserError(f"{where}sys.exit() was called, which ends no job; raise an error instead") from error
        raise
    except KeyboardInterrupt:
        into_log(f"interrupted; go on with {again}")
        if world.rank == 0:
            tell(f"lopa-dist: interrupted; go on with {again}")
        sys.exit(INTERRUPTED)
    except LaunchError as error:  # a RankError ends at once (`die`); MPI's own end would wait for the other ranks
        raise (RankError if world.size > 1 else UserError)(str(error)) from error
    leave_at_signals()  # the handlers of a finished job would only note a signal
    result = tell_outcome(report, folder) if report else None
    if stop.asked and swept() and not submitted:
        tell(f"lopa-dist: stopped by {stop.signal} when this job was done; go on with {again}")
        sys.exit(STOPPED)
    return result


def end(error: Exception) -> NoReturn:
    """Leave with an error's message and without a traceback."""
    message = visible(f"lopa-dist: {error}")
    if isinstance(error, RankError):
        die(message)
    sys.exit(message)


def hint(arguments: list[str]) -> str:
    """Return what to type instead if the sweep was submitted to Slurm, else an empty text."""
    slurm = any("slurm" in a for a in arguments if a.startswith(("launcher=", "hydra/launcher=")))
    return "; launcher=local runs them on this machine, one after the other" if slurm else ""


def check_command(arguments: list[str]) -> None:
    """Raise a UserError if the first argument is a bare word, which can only be a misspelt command."""
    word = arguments[0] if arguments else ""
    if word and "=" not in word and not word.startswith(("-", "~")):
        commands = f"Commands: {', '.join(COMMANDS)}; without one, key=value settings run a job (--help)"
        raise UserError(f"{word}: no such command{did_you_mean(word, COMMANDS)} {commands}")


def check_name(arguments: list[str]) -> None:
    """Raise a UserError if the user seems to mean a configuration file of theirs, but the package's would be taken."""
    name, folder = named("--config-name", arguments), Path(named("--config-dir", arguments) or "")
    file = f"{(name or 'config').removesuffix('.yaml')}.yaml"
    of_a_run = (folder / "overrides.yaml").exists()  # beside the configuration in `.hydra` of a run folder
    if folder.name and (name or of_a_run) and (CONF / file).exists() and (folder / file).exists():
        raise UserError(
            f"{folder}/{file}: the package has a file of this name, which would be taken instead. Give yours another "
            "name, let it begin with the line `defaults: [config, _self_]`, and name it by --config-name"
        )


def checked(arguments: list[str]) -> list[str]:
    """Return the command line of a job or a sweep as Hydra reads it; raise a UserError if it cannot be one."""
    check_command(arguments)
    if unknown := next((a for a in arguments if a.startswith("--") and a.split("=")[0] not in FLAGS), None):
        raise UserError(f"{unknown}: no such flag; settings are KEY=VALUE, such as task=batch (--help)")
    if command := next((a for a in arguments if a in COMMANDS), None):
        raise UserError(f"{command} is a command: it must be the first word, without -m")
    if remote := next((a for a in arguments if a.lstrip("+").startswith(RUN_FOLDERS) and "://" in a), None):
        raise UserError(f"{remote}: a run folder is on a disk that all ranks see; task.output may be elsewhere")
    if "--dry-run" in arguments:
        raise UserError("--dry-run is for launch/*.sh; `lopa-dist doctor KEY=VALUE ...` checks a job here")
    check_keys([a for a in arguments if not a.startswith("-")])
    check_name(arguments)
    found = as_hydra_reads(as_overrides(arguments))
    if {*SWEEP} & {*arguments}:
        if (world := detect()).size > 1:
            start = "start it from one process, launcher=local or slurm"
            raise UserError(f"a sweep cannot run inside {world.launcher}: {start}")
        if own := next((a for a in arguments if a.startswith("hydra.run.dir=")), None):
            raise UserError(f"{own}: is for a single job; hydra.sweep.dir= names the folder of a sweep")
        check_points(found)
    return found


def folder_of(arguments: list[str]) -> list[str]:
    """Return what is to be added to a command line so that this rank's files are where they should be."""
    if detect().rank:  # only rank 0 has a run folder
        nowhere = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout"]
        return [*nowhere, "~hydra.job_logging.handlers.file"]
    if any(a.startswith(("-", "hydra.run.dir=")) and not a.startswith("--config-dir=") for a in arguments):
        return []
    return [f"hydra.run.dir={own_folder(f'outputs/{datetime.now():%Y-%m-%d/%H-%M-%S}')}"]


def main() -> None:
    """Run the command line of `lopa-dist` and `python -m lopa_dist` (`__main__.py`)."""
    given = sorted(sys.argv[1:], key=lambda argument: argument not in SWEEP)  # Hydra wants them first
    with leaving(given):
        arguments = joined(given)
        if arguments == ["--version"]:
            return print(f"lopa-dist {__version__}")
        if arguments[:1] and arguments[0] in COMMANDS:
            for number in answered():
                signal.signal(number, signal.SIG_DFL)  # a signal ends them: only a job can be resumed
            if flag := own_configuration(arguments):
                raise UserError(f"{flag}: is for jobs; commands take settings, and presets from --config-dir")
            with mistakes("give the same command again"):
                return perform(arguments[0], as_overrides(arguments[1:]))
        found = checked(arguments)
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach us as they are; we shorten them below
        sys.argv[1:] = [*found, *folder_of(arguments)]
        try:
            app()
        finally:
            say_how_to_compare()


@contextmanager
def leaving(arguments: list[str]) -> Iterator[None]:
    """End the process with a line about an error that `arguments` led to; other errors keep their traceback."""
    try:
        yield
    except Stopped as error:  # of `learn`; jobs have said how they go on
        if detect().rank == 0:
            tell(f"lopa-dist: {error}; the same command goes on")
        sys.exit(STOPPED)
    except (RankError, UserError, LaunchError) as error:
        end(error)
    except HydraException as error:
        sys.exit(visible(f"lopa-dist: {what_hydra_says(error)}"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        sys.exit(f"lopa-dist: {unreadable(error, joined(arguments))}")
    except (OSError, ValueError) as error:  # logging.config turns the log file's OSError into a ValueError
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, BrokenPipeError):  # `| head` has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python complains when it flushes at its end
            sys.exit(1)
        if isinstance(cause, OSError) and (full := no_room(cause, "start it again")):
            sys.exit(f"lopa-dist: {full}")
        if not isinstance(cause, OSError) or cause.filename is None:
            raise
        key = "hydra.sweep.dir" if {*SWEEP} & {*arguments} else "hydra.run.dir"
        sys.exit(f"lopa-dist: the run folder cannot be written ({cause}); give another {key}")
    except RuntimeError as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if "UncompletedJobError" not in kinds:  # submitit's, which takes a second to import
            raise
        sys.exit(
            f"lopa-dist: the sweep's jobs could not be submitted, or failed: {str(error).strip()}{hint(arguments)}"
        )
    except KeyboardInterrupt:
        tell("lopa-dist: interrupted")
        sys.exit(INTERRUPTED)
