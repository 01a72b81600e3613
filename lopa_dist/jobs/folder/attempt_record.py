"""The record that an attempt at a job writes when it begins, for those who ask how far it is."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from lopa_dist.atomic import write_lines
from lopa_dist.code_hash import code_hash
from lopa_dist.own_presets import SEARCH_PATH
from lopa_dist.parallel.launcher import World

NAME = re.compile(r"(\d+)\.json")


@dataclass(frozen=True)
class Submission:
    """What Slurm was asked for.

    Attributes:
        nodes: how many.
        gpus_per_node: 0 if there are none.
        tasks: number of tasks in the array, 0 if the job is not an array.
        options: of ``sbatch``, for the same time, cores and memory again; the launch scripts find them out.
    """

    nodes: int = 1
    gpus_per_node: int = 0
    tasks: int = 0
    options: str = ""

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Submission | None:
        """Return the submission of this process; None outside of Slurm."""
        if "SLURM_JOB_ID" not in environment:
            return None
        names = ("SLURM_JOB_NUM_NODES", "SLURM_GPUS_ON_NODE", "SLURM_ARRAY_TASK_COUNT")
        nodes, gpus, tasks = (int(environment.get(name, "0")) for name in names)
        return cls(max(1, nodes), gpus, tasks, environment.get("LOPA_SBATCH", ""))


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
        folder: the folder that the job was started in, where relative paths begin.
        submission: to Slurm.
        words: the settings that were typed; None if Hydra did not start the job, or an older version wrote the record.
        invalid: how many answers that earlier attempts finished do not have their format.
        code: hash of the package's code; empty in a record of an older version.
        lookahead: the settings that change no text, and so may be others in each attempt; empty in a record of an older
            version.
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
    words: list[str] | None = None
    invalid: int = 0
    code: str = ""
    lookahead: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        number: int,
        expected: int,
        rejected: int,
        done: int,
        errors: int,
        invalid: int,
        world: World,
        lookahead: dict[str, Any],
    ) -> AttemptRecord:
        """Return the record of an attempt of this process."""
        folder, submission = str(Path.cwd()), Submission.read()
        # a single rank needs no launcher, but the batch script starts it by srun
        alone = world.launcher == "python" and submission is not None and "SLURM_STEP_NUM_TASKS" in os.environ
        launcher = "srun" if alone else world.launcher
        # not from .hydra/, which the next job in the folder overwrites, even one that is refused
        words = typed_words()
        counts = number, expected, rejected, done, errors
        return cls(*counts, launcher, world.size, folder, submission, words, invalid, code_hash(), lookahead)

    def write(self, journal: Path) -> None:
        """Write the record into the folder of a journal."""
        write_lines(journal / f"{self.number:03d}.json", [json.dumps(asdict(self), indent=1), "\n"])

    @classmethod
    def last(cls, journal: Path) -> AttemptRecord | None:
        """Return the last record in the folder of a journal; None if none can be read."""
        files = records_in(journal)
        return cls.read(files[-1]) if files else None

    @classmethod
    def all(cls, journal: Path) -> list[AttemptRecord]:
        """Return the records in the folder of a journal that can be read, the oldest first."""
        return [record for file in records_in(journal) if (record := cls.read(file))]

    @classmethod
    def read(cls, file: Path) -> AttemptRecord | None:
        """Return the record in a file; None if it cannot be read."""
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            submission = record.pop("submission")
            record = {entry.name: record[entry.name] for entry in fields(cls) if entry.name in record}  # of any version
            return cls(**record, submission=Submission(**submission) if submission else None)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


def typed_words() -> list[str] | None:
    """Return the command line of this process without Hydra's own settings; None if Hydra did not start it.

    Where presets and the configuration are the user's own, it says where they are.
    """
    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    flags = [f"--config-dir={one.path}" for one in hydra.runtime.config_sources if one.provider == "command-line"]
    if hydra.job.config_name != "config":
        flags.append(f"--config-name={hydra.job.config_name}")
    places = [word for word in hydra.overrides.hydra if word.startswith(f"{SEARCH_PATH}=")]
    return [*flags, *places, *hydra.overrides.task]


def records_in(journal: Path) -> list[Path]:
    """Return the files of the records in the folder of a journal, the oldest first."""
    files = [(int(match[1]), file) for file in journal.glob("*.json") if (match := NAME.fullmatch(file.name))]
    return [file for _, file in sorted(files)]
