"""The first run on a GPU needs no Hydra: a machine for a trial may have torch and little else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ABSENT = ("hydra", "omegaconf", "wandb", "submitit", "datasets", "math_verify")


def test_the_stages_import_without_what_a_job_needs() -> None:
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\nimport benchmarks.first_stages, benchmarks.gpu_bench"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
