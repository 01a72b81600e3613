"""The launch scripts, started without a cluster or with a stand-in for one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPTS = [ROOT / "launch" / f"{name}.sh" for name in ("gsm8k", "job", "batch")]
OUTSIDE = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}


def task_of(array: str, number: int) -> dict[str, str]:
    """Slurm's variables in a task of an array of job 7, which is given as to `sbatch --array`."""
    parts = [part.split("-") for part in array.split(",")]
    numbers = [n for part in parts for n in range(int(part[0]), int(part[-1]) + 1)]
    return {
        "SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(number),
        "SLURM_ARRAY_TASK_MIN": str(min(numbers)), "SLURM_ARRAY_TASK_MAX": str(max(numbers)),
        "SLURM_ARRAY_TASK_COUNT": str(len(numbers)),
    }  # fmt: skip


def cluster(folder: Path, job: str, step: str) -> dict[str, str]:
    """The environment of a batch script whose Slurm writes what it is asked for into `folder`/said.

    Args:
        job: what `scontrol show job` says.
        step: what srun runs.
    """
    programs = {
        "srun": f'while [ "$1" != --job-name ]; do shift; done; echo "$2" >{folder}/name; {step}',
        "squeue": f'[ "$1" != --steps ] || echo "$4.0 another"; echo "$4.1 $(cat {folder}/name)"',
        "scancel": f'echo "scancel $*" >>{folder}/said; kill -USR1 "$(cat {folder}/step)"',
        "scontrol": f'[ "$1" = requeue ] || {{ echo "{job}"; exit; }}; echo "scontrol $*" >>{folder}/said; exit 1',
    }
    for program, does in programs.items():
        (folder / program).write_text(f"#!/bin/bash\n{does}\n")
        (folder / program).chmod(0o755)
    (folder / "said").touch()
    return {
        **OUTSIDE, "PATH": f"{folder}:{os.environ['PATH']}", "BIN": str(Path(sys.executable).parent),
        "SLURM_SUBMIT_DIR": str(ROOT),
    }  # fmt: skip
