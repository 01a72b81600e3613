"""The command line: Hydra's app, and `lopa-dist explain`, `report`, `merge`, `trace`, `lm-eval` and `profile`."""

from __future__ import annotations

import difflib
import errno
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lopa_dist import __version__
from lopa_dist.checks import UserError
from lopa_dist.config import CONF, Config, check_keys, quoted, register, with_own_model
from lopa_dist.parallel.group import RankError, die
from lopa_dist.parallel.launcher import LaunchError, detect, process_start
from lopa_dist.parallel.stop import SIGNALS, STOPPED, Stopped

log = logging.getLogger("lopa_dist")

register()


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def app(raw: DictConfig) -> Any:
    """What Hydra calls, once or for each job of a sweep."""
    try:
        return job(raw)
    except (RankError, UserError) as error:
        if swept():
            raise  # when the sweep's other jobs have run
        end(error)  # here already: Hydra would write its own words above the message


def swept() -> bool:
    """Whether Hydra runs a sweep, of which this is a job."""
    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def job(raw: DictConfig) -> Any:
    """One job. The configuration is composed and typed by then; values are checked here."""
    world = detect()
    submitted = "SUBMITIT_EXECUTOR" in os.environ  # a job of a sweep, which may have many ranks
    if world.size > 1 and swept() and not submitted:
        raise UserError(
            f"a sweep cannot run inside {world.launcher}: start it from one process, launcher=local or slurm"
        )
    try:
        config = OmegaConf.to_object(raw)
    except OmegaConfBaseException as error:
        raise UserError(plain(error)) from error
    except ValueError as error:
        raise UserError(str(error)) from error
    assert isinstance(config, Config)
    if world.rank:
        logging.getLogger().setLevel(logging.WARNING)
    for name in ("httpx", "httpcore", "filelock", "matplotlib"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # transformers takes seconds to import; help and mistakes should not wait for it
    from lopa_dist.jobs.run import run

    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        report = run(config, folder, world)
    except Stopped as error:
        again = typed("hydra.run.dir", folder)
        if swept():
            again = f"the sweep and {typed('hydra.sweep.dir', HydraConfig.get().sweep.dir)}"
        go_on = f"; go on with {again}" if world.rank == 0 else ""
        sys.stderr.write(f"lopa-dist: {error}{go_on}\n")
        sys.exit(STOPPED)
    except OSError as error:
        again = f"start it again with {typed('hydra.run.dir', folder)}"
        raise UserError(no_room(error, again) or str(error)) from error
    except (LaunchError, ValueError) as error:
        raise UserError(str(error)) from error
    return summary(report, folder) if report else None


def no_room(error: OSError, then: str) -> str:
    """What to say of a full disk, or of a quota that is used up, and what to do `then`; nothing of other errors."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    where = f" in {Path(error.filename).parent}" if error.filename else ""
    return f"{error.strerror}{where}: make room there, then {then}; finished requests are kept"


def end(error: Exception) -> NoReturn:
    """Leave with an error's message and without a traceback."""
    if isinstance(error, RankError):
        die(f"lopa-dist: {error}")
    sys.exit(f"lopa-dist: {error}")


def summary(report: dict[str, Any], folder: Path) -> float:
    """Tell what came out; returns tokens per forward, for sweepers that optimise."""
    accuracy = f"accuracy {report['accuracy']:.1%}, " if "accuracy" in report else ""
    errors = f", {report['errors']} with errors (see results.jsonl)" if report["errors"] else ""
    log.info(
        "%d requests%s: %sTPF %.2f, %.0f tokens/s; %s", report["requests"], errors, accuracy, report["tpf"],
        report["tokens_per_s"]["job"], folder / "report.md",
    )  # fmt: skip
    if not report["requests"]:
        source, shard, shards = (report["task"][key] for key in ("input", "shard", "shards"))
        share = f"the input has nothing for task.shard={shard} of {shards}"
        raise UserError(f"nothing to run: {share if shards > 1 else f'task.input={source} has no lines'}")
    if report["errors"] == report["requests"]:
        raise UserError(f"no request could run; see {folder / 'results.jsonl'}")
    return float(report["tpf"])


def plain(error: OmegaConfBaseException) -> str:
    """OmegaConf's message with the key in front and no internals."""
    first = str(error).splitlines()[0]
    return f"{error.full_key}: {first}" if error.full_key else first


def composition(error: HydraException) -> str:
    """What Hydra says of a command line that it cannot compose, without its internals."""
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        return plain(cause)
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        return f"{error.override}: cannot be read; if the value is one text, quote it twice: {typed(key, value)}"
    return str(error).strip()


def typed(key: str, value: Any) -> str:
    """A setting as one types it into a shell: Hydra takes what holds ``=``, brackets or spaces in quotes only."""
    text = quoted(str(value))
    return f"{key}={text}" if text == str(value) else f'"{key}={text}"'


def report_command(arguments: list[str]) -> None:
    """`lopa-dist report FOLDER`."""
    from lopa_dist.jobs.compare import compare

    if len(arguments) != 1:
        raise UserError("usage: lopa-dist report FOLDER")
    compare(Path(arguments[0]))


def merge_command(arguments: list[str]) -> None:
    """`lopa-dist merge FOLDER`."""
    from lopa_dist.jobs.batch_output import NAME
    from lopa_dist.jobs.shards import merge_shards

    if len(arguments) != 1:
        raise UserError("usage: lopa-dist merge FOLDER (of the runs of a job array)")
    folder = Path(arguments[0])
    report = merge_shards(folder)
    print(f"{report['shards']} shards, {report['requests']} requests: {folder / 'results.jsonl'}")
    if (folder / NAME).exists():
        print(f"in OpenAI's form: {folder / NAME}")


def lm_eval_command(arguments: list[str]) -> None:
    """`lopa-dist lm-eval ...`: lm-evaluation-harness with this package's model."""
    try:
        from lopa_dist.jobs.lm_eval_adapter import main as evaluate
    except ModuleNotFoundError as error:
        missing = str(error.name).split(".")[0]
        raise UserError(f"lm-eval needs {missing}: pip install 'lopa_dist[eval]'") from error
    evaluate(arguments)


def trace_command(arguments: list[str]) -> None:
    """`lopa-dist trace RUN ID [--html FILE]`."""
    if not (len(arguments) == 2 or (len(arguments) == 4 and arguments[2] == "--html")):
        raise UserError("usage: lopa-dist trace RUN ID [--html FILE]   (ID: a custom_id or an index)")
    page = Path(arguments[3]) if len(arguments) == 4 else None
    if page and (page.is_dir() or not os.access(page.parent, os.W_OK)):
        raise UserError(f"--html {page}: cannot be written; name a file in a folder that exists")
    from rich.console import Console

    from lopa_dist.jobs.trace import show, trace
    from lopa_dist.jobs.trace_page import write_page

    found = trace(Path(arguments[0]), arguments[1])
    show(found, Console())
    if page:
        write_page(found, page)
        print(f"page: {page}")


def profile_command(arguments: list[str]) -> None:
    """`lopa-dist profile [overrides]`: how long a step takes by its rows, for ``auto``."""
    check_keys(arguments)
    try:
        from lopa_dist.jobs.profiles import make_profile

        make_profile(with_own_model(arguments))
    except OmegaConfBaseException as error:
        raise UserError(plain(error)) from error


def explain_command(arguments: list[str]) -> None:
    """`lopa-dist explain [KEY ...] [overrides]`: settings, their values, whence, and what they mean."""
    from lopa_dist.jobs.explain import explain

    try:
        print(explain(arguments))
    except OmegaConfBaseException as error:
        raise UserError(plain(error)) from error


COMMANDS = {
    "explain": explain_command,
    "report": report_command,
    "merge": merge_command,
    "trace": trace_command,
    "lm-eval": lm_eval_command,
    "profile": profile_command,
}


USAGE = {name: f"usage: {command.__doc__}" for name, command in COMMANDS.items()}


def check_command(arguments: list[str]) -> None:
    """Meet a misspelt command: nothing else that may come first is a bare word.

    Raises:
        UserError: the first argument is neither a setting nor an option.
    """
    word = arguments[0] if arguments else ""
    if word and "=" not in word and not word.startswith(("-", "~")):
        near = difflib.get_close_matches(word, COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise UserError(
            f"{word}: no such command{hint} Commands: {', '.join(COMMANDS)}; without one, key=value settings run a job"
        )


def main() -> None:
    """What `lopa-dist` and `python -m lopa_dist` do (`__main__.py`)."""
    arguments = sys.argv[1:]
    try:
        if arguments == ["--version"]:
            return print(f"lopa-dist {__version__}")
        if arguments[:1] and arguments[0] in COMMANDS:
            if {"-h", "--help"} & {*arguments[1:2]} and arguments[0] != "lm-eval":
                return print(USAGE[arguments[0]])
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)  # only a job can go on
            try:
                return COMMANDS[arguments[0]](arguments[1:])
            except OSError as error:
                raise UserError(no_room(error, "give the same command again") or str(error)) from error
            except (ValueError, NotImplementedError) as error:
                raise UserError(str(error)) from error
        check_command(arguments)
        check_keys([a for a in arguments if not a.startswith("-")])
        sys.argv[1:] = with_own_model(arguments)
        os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach us as they are; we shorten them below
        began = process_start(os.getppid()) if detect().launcher == "torchrun" else None
        if began and not any(a.startswith("hydra.run.dir=") for a in arguments):
            sys.argv.append(f"hydra.run.dir=outputs/{began:%Y-%m-%d/%H-%M-%S}")  # the same after a restart: it goes on
        if detect().rank:  # only rank 0 has a run folder
            sys.argv += ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout"]
        app()
    except (RankError, UserError, LaunchError) as error:
        end(error)
    except HydraException as error:
        sys.exit(f"lopa-dist: {composition(error)}")
    except (OSError, ValueError) as error:  # logging.config turns that of the log file into a ValueError
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, OSError) and (full := no_room(cause, "start it again")):
            sys.exit(f"lopa-dist: {full}")
        if not isinstance(cause, OSError) or cause.filename is None:
            raise
        key = "hydra.sweep.dir" if {"-m", "--multirun"} & {*arguments} else "hydra.run.dir"
        sys.exit(f"lopa-dist: the run folder cannot be written ({cause}); give another {key}")
    except KeyboardInterrupt:
        sys.exit("lopa-dist: interrupted; finished requests are in the run folder: give it as hydra.run.dir to go on")
