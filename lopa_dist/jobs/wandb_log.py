"""Weights & Biases: one run per job, written by rank 0."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from lopa_dist.config import Config, WandbConfig
from lopa_dist.engine.statistics import PHASES, Statistics


def wandb_mode(config: WandbConfig) -> str:
    """`auto` is online where a key is set, else offline."""
    if config.mode != "auto":
        return config.mode
    return "online" if os.environ.get("WANDB_API_KEY") else "offline"


class WandbLog:
    """Logs the steps since the last entry every `every_s` seconds, and the report at the end."""

    def __init__(self, config: Config, folder: Path) -> None:
        mode = wandb_mode(config.logging.wandb)
        self.every_s, self.run = config.logging.every_s, None
        self.folder = folder
        if mode == "disabled":
            return
        import wandb

        options = config.logging.wandb
        self.run = wandb.init(
            project=options.project,
            entity=options.entity,
            group=options.group,
            tags=list(options.tags),
            dir=folder,
            mode=mode,  # type: ignore[arg-type]  # checked by WandbConfig
            config=config.to_dict(),
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=mode != "online"),
        )
        self.last = time.perf_counter()
        self.before = self._totals(Statistics())

    def observe(self, statistics: Statistics) -> None:
        """Called after every step; logs when it is time to."""
        if self.run is None or time.perf_counter() - self.last < self.every_s:
            return
        self.flush(statistics)

    def flush(self, statistics: Statistics) -> None:
        """Log the steps since the last entry."""
        if self.run is None:
            return
        now, totals = time.perf_counter(), self._totals(statistics)
        change = {name: totals[name] - self.before[name] for name in totals}
        if not change["steps"]:
            return
        steps, forwards = change["steps"], change["forwards"]
        entry = {f"step_ms/{phase}": 1000 * change[phase] / steps for phase in PHASES}
        entry["filled_per_forward"] = change["filled"] / forwards
        entry["filled_per_s"] = change["filled"] / max(1e-9, now - self.last)
        entry["sequences_in_flight"] = change["forwards"] / steps
        choices = change["anchor_wins"] + change["lookahead_wins"]
        entry["lookahead_win_share"] = change["lookahead_wins"] / choices if choices else 0.0
        self.run.log(entry, step=statistics.steps)
        self.last, self.before = now, totals

    def finish(self, report: dict[str, Any], statistics: Statistics, plots: list[str]) -> None:
        """The final figures and plots."""
        if self.run is None:
            return
        import wandb

        self.flush(statistics)
        self.run.summary.update({k: v for k, v in report.items() if k not in ("model", "task", "decode", "engine")})
        self.run.log({f"plots/{Path(name).stem}": wandb.Image(str(self.folder / name)) for name in plots})
        self.run.finish()

    @staticmethod
    def _totals(statistics: Statistics) -> dict[str, float]:
        wins = statistics.wins
        return {
            "steps": statistics.steps,
            "forwards": statistics.forwards,
            "filled": statistics.tokens_filled,
            "anchor_wins": wins[0],
            "lookahead_wins": sum(wins.values()) - wins[0],
            **statistics.seconds,
        }
