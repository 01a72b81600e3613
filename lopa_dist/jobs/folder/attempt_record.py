"""What an attempt at a job writes down as it begins, for those who ask how far it is."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml

from lopa_dist.atomic import write_lines
from lopa_dist.parallel.launcher import World

NAME = re.compile(r"(\d+)\.json")


def words_of_hydra(run: Path) -> list[str]:
    """Return the settings that were typed last for a run folder, for a job that was refused, too; perhaps none."""
    file = run / ".hydra" / "overrides.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8")) or [] if file.exists() else []


@dataclass(frozen=True)
class Submission:
    """What Slurm was asked for. `tasks` is the number of tasks in the array, 0 if the job is not an array."""

    nodes: int = 1
    gpus_per_node: int = 0
    tasks: int = 0

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Submission | None:
        """Return the submission of this process; None outside of Slurm."""
        if "SLURM_JOB_ID" not in environment:
            return None
        names = ("SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE", "SLURM_ARRAY_TASK_COUNT")
        nodes, gpus, tasks = (int(environment.get(name, "0")) for name in names)
        return cls(max(1, nodes), gpus, tasks)


@dataclass(frozen=True)
class AttemptRecord:
    """The beginning of an attempt.

    Attributes:
        number: counts the attempts from 1.
        expected: items of this job, or of its share of the input.
        rejected: items that could not be requests.
        done: requests that earlier attempts finished.
        errors: of these, how many ended with an error.
        launcher: python, torchrun, mpirun or srun.
        ranks: how many.
        folder: from which the job was started, and from which relative paths count.
        submission: to Slurm.
        typed: settings that were typed for it, as Hydra wrote them into the run folder; empty where it did not.
    """

    number: int
    expected: int
    rejected: int
    done: int
    errors: int
    launcher: str
    ranks: int
    folder: str
    submission: Submission | None
    typed: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls, number: int, expected: int, rejected: int, done: int, errors: int, world: World, run: Path
    ) -> AttemptRecord:
        """Return the record of an attempt of this process in the folder `run`."""
        folder, submission = str(Path.cwd()), Submission.read()
        # a single rank needs no launcher, but the batch script starts it by srun
        alone = world.launcher == "python" and submission is not None and "SLURM_STEP_NUM_TASKS" in os.environ
        launcher = "srun" if alone else world.launcher
        typed = words_of_hydra(run)
        return cls(number, expected, rejected, done, errors, launcher, world.size, folder, submission, typed)

    def write(self, journal: Path) -> None:
        """Write it into the folder of a journal."""
        write_lines(journal / f"{self.number:03d}.json", [json.dumps(asdict(self), indent=1), "\n"])

    @classmethod
    def last(cls, journal: Path) -> AttemptRecord | None:
        """Return the last record in the folder of a journal; None if none can be read."""
        files = [(int(match[1]), file) for file in journal.glob("*.json") if (match := NAME.fullmatch(file.name))]
        if not files:
            return None
        try:
            record = json.loads(max(files)[1].read_text(encoding="utf-8"))
            submission = record.pop("submission")
            return cls(**record, submission=Submission(**submission) if submission else None)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
