"""The commands that run what is missing, from what was typed before."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from lopa_dist.config import typed
from lopa_dist.jobs.folder.attempt_record import AttemptRecord
from lopa_dist.jobs.show.report import typed_words
from lopa_dist.jobs.show.run_page import LAUNCHERS
from lopa_dist.jobs.show.run_state import RunState

ITS_OWN = ("task.shard", "task.shards", "hydra.run.dir", "job.resume")  # settings of one run of a job
SCRIPT = Path("launch") / "job.sh"  # a batch script for any job, given its settings


def go_on(run: RunState) -> str:
    """Return the command that goes on with a run of a whole input."""
    record = run.record
    if record is None:
        return f"the same command again, with {typed('hydra.run.dir', run.folder)}"
    start = batch(record) or direct(record)
    return f"{enter(record)}{start} {shlex.join(words(run))} {place(record, run.folder)}"


def shards_again(runs: Sequence[RunState], numbers: Sequence[int]) -> str:
    """Return the command, or a line each, that run some shards of an array.

    Args:
        runs: the array's runs that there are, at least one.
        numbers: of the shards.
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
    """Return the settings that were typed, without those of a single run (`ITS_OWN`)."""
    return [word for word in typed_words(run.folder) if word.lstrip("+").partition("=")[0] not in ITS_OWN]


def direct(record: AttemptRecord) -> str:
    """Return how a launcher starts a job as the last attempt was started."""
    return LAUNCHERS[record.launcher].format(record.ranks)


def batch(record: AttemptRecord, options: str = "") -> str:
    """The command that submits the job with the batch script; empty if the script did not start it, or is gone."""
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
    """``cd`` to the folder that relative paths refer to; empty if this is the current one."""
    return "" if Path(record.folder) == Path.cwd() else f"cd {shlex.quote(record.folder)} && "


def place(record: AttemptRecord, folder: Path) -> str:
    """Return the run folder as a setting."""
    inside = os.path.relpath(folder.resolve(), record.folder)
    return typed("hydra.run.dir", folder.resolve() if inside.startswith("..") else inside)


def spans(numbers: Sequence[int]) -> str:
    """Numbers as Slurm writes an array's: ``1,3-5``."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
