"""A job's prompts, its output and its own files are apart: none may replace another, or be read as prompts."""

from __future__ import annotations

from pathlib import Path

from lopa_dist.checks import UserError
from lopa_dist.config import TaskConfig
from lopa_dist.jobs.folder.journal import RESULTS
from lopa_dist.jobs.folder.part_names import KEY, in_parts, part_name, parts_there, place_of
from lopa_dist.remote import is_remote
from lopa_dist.tasks.rows import local_files, takes

OWN = (*RESULTS, "journal/001-0.jsonl")  # what a job writes into its run folder


def check_apart(task: TaskConfig, folder: Path | None = None) -> None:
    """Raise a UserError if a job would read its own files as prompts, or if its output would replace a file it needs.

    Args:
        task: `input` and `output` are read.
        folder: of the run; None: not known yet.
    """
    out, source = task.output, task.input
    if folder:
        check_input(task, folder)
    if folder and out and place_of(out) in job_files(folder):
        raise UserError(
            f"{KEY}={out} is a file that the job itself writes into its run folder. Name another file, or leave it out"
        )
    if out and source:
        check_no_prompts(out, source, f"{KEY}={out}")


def check_no_prompts(out: str, source: str, named: str) -> None:
    """Raise a UserError if results in the file `out` would replace prompts of the input `source`, or be read as such.

    `named` is how the user named the file.
    """
    if place_of(out) == place_of(source):
        raise UserError(f"{named} is task.input: the results would replace the prompts. Name another file")
    if takes(source, part_name(out, 0)) or replaced(source, out):
        raise UserError(
            f"{named} is one of the files that task.input={source} names: the results would replace prompts, or be "
            "read as prompts by the next job. Name another file or folder"
        )
    if Path(place_of(source)) in Path(place_of(out)).parents:
        raise UserError(f"{named} is in the folder task.input: the next job would read it. Name another folder")


def check_input(task: TaskConfig, folder: Path) -> None:
    """Raise a UserError if `task.input` names files that a job writes into its run folder, `folder`."""
    source = task.input
    if not source:
        return
    own = job_files(folder)
    read = next((own[file] for file in map(str, local_files(source)) if file in own), None)
    read = read or next((name for name in OWN if takes(source, str(folder / name))), None)
    if place_of(source) == place_of(str(folder)):
        read = read or OWN[0]
    if read:
        raise UserError(
            f"task.input={source} names a file that the job writes itself, {read} of its run folder {folder}: it would "
            "read answers as prompts, or replace its prompts. Give another hydra.run.dir"
        )


def job_files(folder: Path) -> dict[str, str]:
    """Return the names of the files that a job writes into its run folder, by their places."""
    return {place_of(str(folder / name)): name for name in OWN}


def replaced(source: str, out: str) -> set[str]:
    """Return the files of a local input that writing the output `out` would replace, without links."""
    if is_remote(out):
        return set()
    place = Path(place_of(out))
    names = parts_there(out, KEY).values() if in_parts(out) else [place.name]
    return {str(place.with_name(name).resolve()) for name in names} & set(map(str, local_files(source)))
