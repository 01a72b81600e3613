"""Weights & Biases: one run per job, written by rank 0, and one for each other rank with logging.wandb.ranks=true."""

from __future__ import annotations

import json
import logging
import os
import resource
import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lopa_dist.config import Config
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.statistics import PHASES, Statistics

if TYPE_CHECKING:
    import wandb

log = logging.getLogger("lopa_dist")
INIT_TIMEOUT_S = 30.0  # a compute node may have no network
TABLE_ROWS = 1000  # of the results table
ARTIFACT_BYTES = 100_000_000  # larger results stay in the run folder only


class WandbLog:
    """Logs the steps since the last entry every `every_s` seconds, and the report at the end."""

    def __init__(self, config: Config, folder: Path, rank: int) -> None:
        import wandb

        mode = config.logging.wandb.mode
        if mode == "auto":
            mode = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        self.every_s, self.folder = config.logging.every_s, folder

        try:
            self.run = self.begin(config, mode, rank)
        except wandb.Error as error:
            why = f"W&B could not begin a run ({' '.join(str(error).split())})"
            if config.logging.wandb.mode != "auto":
                raise ValueError(
                    f"logging.wandb.mode={mode}: {why}; take offline, and wandb sync later, or disabled"
                ) from error
            log.warning("%s: this run is kept offline, for wandb sync; logging.wandb.mode says what else there is", why)
            self.run = self.begin(config, "offline", rank)
        self.last = time.perf_counter()
        self.before = totals(Statistics(), {})

    def begin(self, config: Config, mode: str, rank: int) -> wandb.Run:
        """W&B's run; a wandb.Error where there is no key for it, or no network."""
        import wandb

        options, folder = config.logging.wandb, self.folder
        return wandb.init(
            project=options.project,
            entity=options.entity,
            group=options.group or (folder.name if options.ranks else None),
            name=f"{folder.name}-rank{rank}" if rank else None,
            job_type="rank" if rank else "job",
            tags=list(options.tags),
            dir=folder,
            mode=mode,  # type: ignore[arg-type]  # checked by WandbConfig
            config=asdict(config),
            settings=wandb.Settings(
                console="off", silent=True, x_disable_stats=mode != "online", init_timeout=INIT_TIMEOUT_S
            ),
        )

    def observe(self, engine: Engine) -> None:
        """Called after every step; logs when it is time to."""
        if time.perf_counter() - self.last >= self.every_s:
            self.flush(engine)

    def flush(self, engine: Engine) -> None:
        """Log the steps since the last entry."""
        statistics = engine.statistics
        now, reached = time.perf_counter(), totals(statistics, engine.comm.traffic.bytes)
        change = {name: amount - self.before.get(name, 0) for name, amount in reached.items()}
        if not change["steps"]:
            return
        steps, forwards = change["steps"], change["forwards"]
        entry = {f"step_ms/{phase}": 1000 * change[phase] / steps for phase in PHASES}
        entry["filled_per_forward"] = change["filled"] / forwards
        entry["filled_per_s"] = change["filled"] / max(1e-9, now - self.last)
        entry["sequences_in_flight"] = change["forwards"] / steps
        wins = {name: amount for name, amount in change.items() if name.startswith("wins/")}
        choices = sum(wins.values())
        if choices:
            entry |= {name: amount / choices for name, amount in wins.items()}
            entry["lookahead_win_share"] = 1 - wins.get("wins/anchor", 0) / choices
        drafted = change.get("drafted", 0)
        if drafted:
            entry["drafts/accepted_per_forward"] = change["accepted"] / drafted
        entry |= {name: amount / steps for name, amount in change.items() if name.startswith("comm_bytes/")}
        entry |= confidences(engine.winner and engine.winner.scores)
        entry["memory_gib"] = memory_gib()
        entry["requests_taken"] = statistics.admitted
        self.run.log(entry, step=statistics.steps)
        self.last, self.before = now, reached

    def close(self, engine: Engine) -> None:
        """The end, on other ranks than 0."""
        self.flush(engine)
        self.run.finish()

    def finish(self, report: dict[str, Any], engine: Engine, plots: list[str]) -> None:
        """The final figures, plots and results."""
        import wandb

        self.flush(engine)
        self.run.summary.update({k: v for k, v in report.items() if k not in ("model", "task", "decode", "engine")})
        self.run.log({f"plots/{Path(name).stem}": wandb.Image(str(self.folder / name)) for name in plots})
        results = self.folder / "results.jsonl"
        self.run.log({"results": results_table(results)})
        artifact = wandb.Artifact(f"results-{self.run.id}", "results")
        for name in ("report.json", "report.md", *plots):
            artifact.add_file(str(self.folder / name))
        if results.stat().st_size <= ARTIFACT_BYTES:
            artifact.add_file(str(results))
        self.run.log_artifact(artifact)
        self.run.finish()


def totals(statistics: Statistics, traffic: dict[str, int]) -> dict[str, float]:
    """All that grows, by name."""
    return {
        "steps": statistics.steps,
        "forwards": statistics.forwards,
        "filled": statistics.tokens_filled,
        "drafted": sum(statistics.accepted.values()),  # sequence forwards that had drafts
        "accepted": sum(drafts * count for drafts, count in statistics.accepted.items()),
        **{f"wins/{branch or 'anchor'}": count for branch, count in statistics.wins.items()},
        **{f"comm_bytes/{what}": amount for what, amount in traffic.items()},
        **statistics.seconds_counted,
    }


def confidences(scores: torch.Tensor | None) -> dict[str, float]:
    """Mean score of the anchors and of the best branches in the last step, where there was a choice."""
    if scores is None or scores.shape[1] < 2:
        return {}
    ran = scores[torch.isfinite(scores).sum(1) > 1]
    if not len(ran):
        return {}
    return {"confidence/anchor": float(ran[:, 0].mean()), "confidence/best": float(ran.amax(1).mean())}


def memory_gib() -> float:
    """The most that this process held so far: on its GPU where it uses one, else in main memory."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def results_table(results: Path) -> Any:
    """The first results as a W&B table."""
    import wandb

    columns = ["custom_id", "finish_reason", "tpf", "latency_s", "correct", "text"]
    with results.open(encoding="utf-8") as lines:
        rows = [[json.loads(line).get(column) for column in columns] for line in islice(lines, TABLE_ROWS)]
    return wandb.Table(columns=columns, data=rows)
