"""What logging to Weights & Biases costs: its share of the steps' time, measured inside one job.

    python -m benchmarks.logging_share

Runs 200 embedded problems with W&B offline, at the default interval and logging every step, and writes
benchmarks/results/logging_share.json. The bar is 2 % at the default.
"""

from __future__ import annotations

import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from benchmarks.embedded import RESULTS
from lopa_dist.config import Config, LoggingConfig, ParallelConfig, TaskConfig, WandbConfig
from lopa_dist.decode import DecodeConfig
from lopa_dist.jobs.run import run
from lopa_dist.jobs.wandb_log import WandbLog
from lopa_dist.parallel.launcher import World


def share(every_s: float) -> dict[str, Any]:
    """Seconds of all steps, and of those spent on logging."""
    spent = 0.0
    observe = WandbLog.observe

    def timed(self: WandbLog, engine: Any) -> None:
        nonlocal spent
        began = time.perf_counter()
        observe(self, engine)
        spent += time.perf_counter() - began

    config = Config(
        task=TaskConfig(limit=200),
        decode=DecodeConfig(verify="confidence", drafts=0, branches=3, block_size=16, max_new_tokens=64),
        parallel=ParallelConfig(threads=1),
        logging=LoggingConfig(progress="never", plots=False, every_s=every_s, wandb=WandbConfig(mode="offline")),
    )
    with tempfile.TemporaryDirectory() as folder, patch.object(WandbLog, "observe", timed):
        report = run(config, Path(folder), World("python"))
    steps = report["completion_tokens"] / report["tokens_per_s"]["job"]
    return {"every_s": every_s, "seconds": steps, "logging_seconds": spent, "share": spent / steps}


def main() -> None:
    """Measure and print."""
    found = [share(every_s) for every_s in (LoggingConfig().every_s, 0.0)]
    table = Table("logged every", "seconds of steps", "of them logging", "share", title="W&B offline, one thread")
    for row in found:
        when = f"{row['every_s']:g} s" if row["every_s"] else "step"
        table.add_row(when, f"{row['seconds']:.1f}", f"{row['logging_seconds']:.3f}", f"{row['share']:.2%}")
    Console().print(table)
    written = {"machine": platform.machine(), "python": platform.python_version(), "rows": found}
    (RESULTS / "logging_share.json").write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
