"""Weights & Biases: one run per job, written by rank 0; with logging.wandb.ranks=true, one for each other rank, too.

It gets settings and figures. These hold no text of a prompt or an answer, and W&B may not collect anything about the
program and its arguments. logging.wandb.texts=true adds the results, the page, and settings that are texts.

A job never needs W&B. Its service is another process, which may be killed, hang, or find its disk full, so everything
that talks to it goes through an `Extra`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import secrets
import signal
import time
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lopa_dist.atomic import can_be_written, write_lines
from lopa_dist.config import Config
from lopa_dist.engine.draft_kinds import SOURCES
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.statistics import PHASES, Statistics
from lopa_dist.jobs.show.extra import Extra

if TYPE_CHECKING:
    import wandb

log = logging.getLogger("lopa_dist")
INIT_TIMEOUT_S = 30.0  # a compute node may have no network
PROJECT = "lopa_dist"
MODES = {
    "online": "online",
    "run": "online",
    "shared": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}
LIMIT_S = 30.0  # seconds for an entry to be logged
FINISH_LIMIT_S = 120.0  # seconds for the results to be written, or sent
STOP_LIMIT_S = 10.0  # the same where the job was asked to stop
# keys of a report that are not sent; reasons of failures and warnings may quote a prompt
NOT_FIGURES = ("model", "task", "decode", "engine", "parallel", "failures", "warnings", "made")
TABLE_ROWS = 1000  # the most rows of the results table
ARTIFACT_BYTES = 100_000_000  # larger results stay in the run folder only


class WandbLog:
    """Logs the steps since the last entry, every `every_s` seconds, and the report at the end."""

    def __init__(self, config: Config, folder: Path, rank: int) -> None:
        mode = chosen_mode(config)[0]
        self.every_s, self.folder, self.texts = config.logging.every_s, folder, config.logging.wandb.texts
        self.place = folder / "wandb" / f"run-{rank}.json"
        self.id, self.steps_before = run_of(self.place)
        remember(self.place, self.id, self.steps_before)  # an attempt may end before W&B has begun
        self.extra = Extra("W&B is lost", LIMIT_S, abandon_service)
        run = self.extra.wait(lambda: self.begin_or_refusal(config, mode, rank), 2 * INIT_TIMEOUT_S + LIMIT_S)
        if isinstance(run, ValueError):
            raise run
        self.run = run  # None where W&B is lost
        if run is not None:
            remember(self.place, self.id, self.steps_before)
        self.last = time.perf_counter()
        self.before = totals(Statistics(), {})

    def begin_or_refusal(self, config: Config, mode: str, rank: int) -> wandb.Run | ValueError:
        """Return W&B's run. If it cannot begin, return one offline for `auto`, else a ValueError for the user."""
        import wandb

        try:
            return self.begin(config, mode, rank)
        except wandb.Error as error:
            why = f"W&B could not begin a run ({' '.join(str(error).split())})"
            if config.logging.wandb.mode != "auto":
                return ValueError(f"logging.wandb.mode={mode}: {why}; take offline, and wandb sync later, or disabled")
            log.warning("%s: this run is kept offline, for wandb sync; logging.wandb.mode says what else there is", why)
            self.id, self.steps_before = secrets.token_hex(4), 0  # W&B's service still holds the other id
            return self.begin(config, "offline", rank)

    def begin(self, config: Config, mode: str, rank: int) -> wandb.Run:
        """Return W&B's run, which begins now.

        Raises:
            wandb.Error: there is no key for it, or no network.
        """
        import wandb
        from wandb import env

        options, folder = config.logging.wandb, self.folder
        # W&B's service reads these variables, and accepts only absolute paths
        found = any(os.path.isabs(os.environ.get(name, "")) for name in ("HOME", "XDG_CACHE_HOME"))
        if not found or not can_be_written(Path(env.get_cache_dir())):
            # without this folder, it writes its own log to standard error
            os.environ["WANDB_CACHE_DIR"] = str(folder / "wandb" / "cache")
        if not has_home():
            for name in ("WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
                os.environ.setdefault(name, str(folder / "wandb" / "cache"))
        return wandb.init(
            id=self.id,
            resume="allow" if mode == "online" else None,
            # a run that the user's own code has begun here stays the user's; without one, own code may log to the job's
            reinit=None if wandb.run is None else "create_new",
            project=options.project or os.environ.get("WANDB_PROJECT") or PROJECT,
            entity=options.entity,
            group=options.group or (folder.name if options.ranks else None),
            name=f"{folder.name}-rank{rank}" if rank else None,
            job_type="rank" if rank else "job",
            tags=list(options.tags),
            dir=folder,
            mode=mode,  # type: ignore[arg-type]  # checked by WandbConfig
            config=settings_told(config),
            settings=wandb.Settings(
                console="off",
                silent=True,
                x_disable_stats=mode != "online",
                init_timeout=INIT_TIMEOUT_S,
                x_disable_meta=True,
                x_disable_machine_info=True,
                disable_git=True,
                save_code=False,
            ),
        )

    def observe(self, engine: Engine) -> None:
        """Log the last steps if it is time to; this is called after every step."""
        if time.perf_counter() - self.last >= self.every_s:
            self.flush(engine)

    def flush(self, engine: Engine) -> None:
        """Log the steps since the last entry."""
        statistics = engine.statistics
        now, reached = time.perf_counter(), totals(statistics, engine.comm.traffic)
        change = {name: amount - self.before.get(name, 0) for name, amount in reached.items()}
        if not change["steps"]:
            return
        steps, filled = change["steps"], change["filled"]
        entry = {f"step_ms/{phase}": 1000 * change[phase] / steps for phase in PHASES}
        entry["filled_per_forward"] = filled / change["forwards"]
        entry["filled_per_s"] = filled / max(1e-9, now - self.last)
        entry["sequences_in_flight"] = change["forwards"] / steps
        wins = {name: amount for name, amount in change.items() if name.startswith("wins/")}
        if choices := sum(wins.values()):
            entry |= {name: amount / choices for name, amount in wins.items()}
            entry["lookahead_win_share"] = 1 - wins.get("wins/anchor", 0) / choices
        if drafted := change["drafted"]:
            entry["drafts/accepted_per_forward"] = change["accepted"] / drafted
        entry |= {
            f"{name}_per_forward": amount / change["forwards"]
            for name, amount in change.items()
            if name.startswith("drafts/from_") and statistics.verified_from
        }
        entry |= {name: amount / steps for name, amount in change.items() if name.startswith("comm_bytes/")}
        entry |= confidences(engine.winner and engine.winner.scores)
        entry["memory_gib"] = memory_gib()
        entry["requests_taken"] = statistics.admitted
        self.last, self.before = now, reached
        if (run := self.run) is not None:
            self.extra.post(partial(run.log, entry, step=self.steps_before + statistics.steps))
            remember(self.place, self.id, self.steps_before + statistics.steps)

    def lesson_begins(self, engine: Engine) -> None:
        """Log the steps before a lesson, whose time is not theirs."""
        self.flush(engine)
        self.last = time.perf_counter()

    def learning(self, engine: Engine, share: float, loss: float) -> None:
        """Log how far a lesson has got if it is time to; this is called after every step of the lesson."""
        now = time.perf_counter()
        if now - self.last >= self.every_s:
            self.last = now
            self.log_lesson(engine, {"lesson/time": share, "lesson/loss": loss})

    def learned(self, engine: Engine, told: dict[str, Any]) -> None:
        """Log what came of a lesson: the figures among `told`."""
        figures = {f"lesson/{name}": value for name, value in told.items() if isinstance(value, (int, float))}
        self.log_lesson(engine, figures)
        self.last = time.perf_counter()

    def log_lesson(self, engine: Engine, entry: dict[str, float]) -> None:
        """Log an entry of a lesson as a step of its own: W&B keeps one entry per step."""
        if (run := self.run) is not None:
            self.steps_before += 1
            reached = self.steps_before + engine.statistics.steps
            self.extra.post(partial(run.log, entry, step=reached))
            remember(self.place, self.id, reached)

    def finish(self, stopped: bool, report: dict[str, Any]) -> None:
        """Log the report, and end W&B's run.

        Args:
            stopped: whether the job was asked to stop, so that there is little time.
            report: the final figures on rank 0, which also logs the results if texts are wanted; empty on other ranks.
        """
        if (run := self.run) is not None:
            finish = partial(self.log_results, run, report) if report else run.finish
            self.extra.wait(finish, STOP_LIMIT_S if stopped else FINISH_LIMIT_S)
        self.extra.close()

    def log_results(self, run: wandb.Run, report: dict[str, Any]) -> None:
        """Log what rank 0 has at the end, and end the run, which waits until all is written or sent."""
        run.summary.update({k: v for k, v in report.items() if k not in NOT_FIGURES})
        if self.texts:
            self.log_texts(run)
        run.finish()

    def log_texts(self, run: wandb.Run) -> None:
        """Log the files that hold texts: the results, the report and the page."""
        import wandb

        results = self.folder / "results.jsonl"
        run.log({"results": results_table(results)})
        artifact = wandb.Artifact(f"results-{run.id}", "results")
        for file in filter(Path.exists, (self.folder / "report.json", self.folder / "report.html")):
            artifact.add_file(str(file))
        if results.stat().st_size <= ARTIFACT_BYTES:
            artifact.add_file(str(results))
        run.log_artifact(artifact)


def has_home() -> bool:
    """Return whether this user has a home directory: in a container, neither HOME nor the system may know it."""
    try:
        Path.home()
    except RuntimeError:
        return False
    return True


def settings_told(config: Config) -> dict[str, Any]:
    """Return the settings for W&B, without those that are the user's texts unless logging.wandb.texts allows them."""
    told = asdict(config)
    if not config.logging.wandb.texts:
        for name in ("prompt", "response_format"):
            del told["task"][name]
        del told["model"]["template"]
    return told


def run_of(place: Path) -> tuple[str, int]:
    """Return the id of W&B's run in the file `place`, and the steps logged so far; a new id and 0 if there is none."""
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
        return str(found["id"]), int(found["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return secrets.token_hex(4), 0


def remember(place: Path, name: str, steps: int) -> None:
    """Write a run's id `name` and its steps to the file `place` for the next attempt; ignore it if that fails."""
    with contextlib.suppress(OSError):
        place.parent.mkdir(exist_ok=True)  # not the run folder, which may have been renamed
        write_lines(place, [json.dumps({"id": name, "steps": steps})])


def chosen_mode(config: Config) -> tuple[str, str]:
    """Return the mode of W&B, and what decides it.

    With ``auto`` these are WANDB_DISABLED, else WANDB_MODE, else whether there is a key: online with it, else offline.

    Raises:
        ValueError: WANDB_MODE has a value that is not known here.
    """
    mode = config.logging.wandb.mode
    if mode != "auto":
        return mode, f"logging.wandb.mode={mode}"
    off, asked = os.environ.get("WANDB_DISABLED", ""), os.environ.get("WANDB_MODE", "")
    if off.lower() in ("true", "1", "yes", "on"):
        return "disabled", f"WANDB_DISABLED={off}"
    if asked:
        if asked.lower() not in MODES:
            raise ValueError(f"WANDB_MODE={asked}: must be one of {', '.join(MODES)}; or set logging.wandb.mode")
        return MODES[asked.lower()], f"WANDB_MODE={asked}"
    if os.environ.get("WANDB_API_KEY"):
        return "online", "WANDB_API_KEY is set"
    return "offline", "WANDB_API_KEY is not set"


def abandon_service() -> None:
    """Kill W&B's service, and keep this process from waiting for it when it ends."""
    import wandb

    for process in children("wandb-core"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    with contextlib.suppress(Exception, SystemExit):  # it cannot be reached now, and is no longer waited for
        wandb.teardown()


def children(name: str) -> list[int]:
    """Return the ids of running processes called `name` that this one started (only on Linux)."""
    names: list[str] = []
    for thread in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has just ended
            names += thread.read_text(encoding="ascii").split()
    processes = []
    for process in names:
        with contextlib.suppress(OSError):  # likewise
            stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
            called, _, state = stat.partition("(")[2].rpartition(")")
            if called == name and not state.lstrip().startswith("Z"):
                processes.append(int(process))
    return processes


def totals(statistics: Statistics, traffic: dict[str, int]) -> dict[str, float]:
    """Return counters that only grow, by name."""
    return {
        "steps": statistics.steps,
        "forwards": statistics.forwards,
        "filled": statistics.tokens_filled,
        "drafted": sum(statistics.accepted.values()),  # sequence forwards that had drafts
        "accepted": statistics.drafts_accepted,
        **{f"drafts/from_{name}": statistics.accepted_from[number] for number, name in enumerate(SOURCES)},
        **{f"wins/{branch or 'anchor'}": count for branch, count in statistics.wins.items()},
        **{f"comm_bytes/{what}": amount for what, amount in traffic.items()},
        **statistics.seconds_counted,
    }


def confidences(scores: torch.Tensor | None) -> dict[str, float]:
    """Return the mean scores of anchors and of best branches in the last step; empty if no sequence had a choice."""
    if scores is not None and len(chosen := scores[torch.isfinite(scores).sum(1) > 1]):
        return {"confidence/anchor": float(chosen[:, 0].mean()), "confidence/best": float(chosen.amax(1).mean())}
    return {}


def memory_gib() -> float:
    """Return the most memory, in GiB, that this process has held: on its GPU if it uses one, else in main memory."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def results_table(results: Path) -> Any:
    """Return the first results as a W&B table."""
    import wandb

    columns = ["custom_id", "finish_reason", "tpf", "latency_s", "correct", "text"]
    with results.open(encoding="utf-8") as lines:
        rows = [[json.loads(line).get(column) for column in columns] for line in islice(lines, TABLE_ROWS)]
    return wandb.Table(columns=columns, data=rows)
