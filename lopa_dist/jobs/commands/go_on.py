"""The commands that run what is missing, made from what was typed before."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from lopa_dist.jobs.folder.attempt_record import AttemptRecord
from lopa_dist.jobs.show.report import typed_words
from lopa_dist.jobs.show.run_page import LAUNCHERS
from lopa_dist.jobs.show.run_state import RunState
from lopa_dist.overrides import typed

ITS_OWN = ("task.shard", "task.shards", "hydra.run.dir", "job.resume")  # settings of a single run of a job
SCRIPT = Path("launch") / "job.sh"  # a batch script for any job, given its settings


def go_on(run: RunState) -> str:
    """Return the command that continues a run of a whole input."""
    record = run.record
    if record is None:
        return f"the same command again, with {typed('hydra.run.dir', run.folder)}"
    start = batch(record) or direct(record)
    return f"{enter(record)}{start} {shlex.join(words(run))} {place(record, run.folder)}"


def shards_again(runs: Sequence[RunState], numbers: Sequence[int]) -> str:
    """Return the command that runs some shards of an array, or one line per shard where a single command cannot.

    Args:
        runs: the array's existing runs, at least one.
        numbers: of the shards to run.
    """
    first = next((run for run in runs if run.record), None)
    if first is None or first.record is None:
        return f"the same command again for shard {spans(numbers)}, each with its task.shard and hydra.run.dir"
    record, total, folder = first.record, f"task.shards={first.shard[1]}", first.folder.parent
    given = shlex.join([*words(first), total])
    places = {run.shard[0]: run.folder for run in runs}
    named = place(record, folder)
    usual = {n: folder / f"shard-{n}" for n in numbers}  # as the launch scripts name them
    regular = named.startswith("hydra") and all(places.get(n, usual[n]) == usual[n] for n in numbers)
    if regular and batch(record):
        start = batch(record, f"--array={spans(numbers)} ")
        return f"{enter(record)}{start} {given} {named}"
    if regular and len(numbers) > 1:
        each = f"{direct(record)} {given} task.shard=$shard {named}/shard-$shard"
        return f"{enter(record)}for shard in {' '.join(map(str, numbers))}; do {each}; done"
    return "\n".join(
        f"{enter(record)}{direct(record)} {given} task.shard={n} {place(record, places.get(n, usual[n]))}"
        for n in numbers
    )


def words(run: RunState) -> list[str]:
    """Return the settings that were typed for a run, without those of a single run (`ITS_OWN`)."""
    return [word for word in typed_words(run.folder) if word.lstrip("+").partition("=")[0] not in ITS_OWN]


def direct(record: AttemptRecord) -> str:
    """Return the beginning of a command that starts a job, without the batch script, as the attempt was started."""
    return LAUNCHERS[record.launcher].format(record.ranks)


def batch(record: AttemptRecord, options: str = "") -> str:
    """Return the beginning of a command that submits the job with the batch script.

    Empty if the script did not start the attempt, or is gone.
    """
    asked = record.submission
    if asked is None or record.launcher == "python" or not (Path(record.folder) / SCRIPT).exists():
        return ""
    usual = "srun" if asked.nodes == 1 else "torchrun"  # as slurm/prolog.sh chooses
    environment = "" if record.launcher == usual else f"LAUNCH={record.launcher} "
    if not asked.gpus_per_node and record.ranks != 2 * asked.nodes:
        environment += f"RANKS={record.ranks // asked.nodes} "
    options += f"--nodes={asked.nodes} " if asked.nodes > 1 else ""
    options += f"--gpus-per-node={asked.gpus_per_node} " if asked.gpus_per_node else ""
    options += f"{asked.options} " if asked.options else ""
    return f"{environment}sbatch {options}{SCRIPT}"


def enter(record: AttemptRecord) -> str:
    """Return a ``cd`` to the folder that relative paths begin in; empty if that is the current folder."""
    return "" if Path(record.folder) == Path.cwd() else f"cd {shlex.quote(record.folder)} && "


def place(record: AttemptRecord, folder: Path) -> str:
    """Return the setting that names the run folder `folder`, relative to the job's folder if it is inside."""
    inside = os.path.relpath(folder.resolve(), record.folder)
    return typed("hydra.run.dir", folder.resolve() if inside.startswith("..") else inside)


def spans(numbers: Sequence[int]) -> str:
    """Return numbers as Slurm writes those of an array: ``1,3-5``."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
