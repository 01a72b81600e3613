"""Jobs from Python: `submit` hands one to Slurm (or to this machine) and gives back a submitit job.

    from lopa_dist.jobs.submit import submit
    job = submit(["model=dream_instruct", "task=gsm8k"], "runs/gsm8k", tasks_per_node=8, gpus_per_node=8)
    print(job.results()[0]["accuracy"])

A job that is preempted or reaches its time limit is submitted again by submitit and goes on in its folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import submitit
from submitit.helpers import Checkpointable

from lopa_dist.config import composed
from lopa_dist.jobs.run import run
from lopa_dist.parallel.launcher import detect


class Work(Checkpointable):  # type: ignore[misc]
    """One job: what a command line of these overrides would run, in `folder`. Called on every rank."""

    def __init__(self, overrides: list[str], folder: str) -> None:
        self.overrides, self.folder = overrides, folder

    def __call__(self) -> dict[str, Any]:
        """Run, or go on where an earlier attempt ended. The report on rank 0, nothing elsewhere."""
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        config = composed(self.overrides)
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        return run(config, Path(self.folder), detect())


def submit(
    overrides: list[str], folder: str | Path, cluster: str | None = None, timeout_min: int = 480, **options: Any
) -> submitit.Job[dict[str, Any]]:
    """Submit one job.

    Args:
        overrides: as on the command line of `lopa-dist`, e.g. ``["decode.branches=7"]``.
        folder: the run folder; submitit's own files go into `submitit/` inside it.
        cluster: ``slurm``, ``local`` or null for whichever is there.
        timeout_min: the time limit of one attempt, in minutes.
        options: of `submitit.AutoExecutor.update_parameters`: `nodes`, `tasks_per_node`, `gpus_per_node`,
            `slurm_partition`, ...

    Returns:
        The submitit job; `results()[0]` is the report (`report.json`), once rank 0 is done.
    """
    run_folder = Path(folder).absolute()
    executor = submitit.AutoExecutor(run_folder / "submitit", cluster=cluster)
    executor.update_parameters(name="lopa_dist", timeout_min=timeout_min, **options)
    return executor.submit(Work(overrides, str(run_folder)))
