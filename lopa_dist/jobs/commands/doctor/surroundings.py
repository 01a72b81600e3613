"""Checks of a job's surroundings: Python, Slurm, the run folder, its files, W&B and the sandbox."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from netrc import netrc
from pathlib import Path

from lopa_dist.config import check_files
from lopa_dist.jobs.commands.doctor.finding import GIB, Finding, Machine, State, broken, fine, slow
from lopa_dist.jobs.show.wandb_log import chosen_mode
from lopa_dist.optional import why_lacking
from lopa_dist.tasks import sandbox
from lopa_dist.tasks.harness import HarnessTask, manager_of
from lopa_dist.tasks.hub_data import data_sets, why_not_there
from lopa_dist.tasks.registry import check_judging, first_errors, make_task, options_of, read_later, task_class
from lopa_dist.tasks.rows import check, files_of, naming, refuse_utf_16

LEAST_FREE = 1 << 30  # bytes on the disk of the run folders
NODE_LOCAL = ("tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "overlay")  # kinds of file systems


def python(machine: Machine) -> Finding:
    """Return the version and the path of the Python interpreter."""
    return fine(f"{platform.python_version()}, {sys.executable}")


def slurm(machine: Machine) -> Finding:
    """Return whether this is a Slurm job, and which nodes and cores it has."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        if shutil.which("sbatch") is None:
            return fine("not here; a job starts without it")
        return fine("sbatch is here; this is not a Slurm job, so other nodes may differ")
    where = f"job {job} on {os.environ.get('SLURM_JOB_NODELIST', '?')}"
    given = os.environ.get("SLURM_CPUS_PER_TASK", "1")
    if given == "1" and machine.device.type != "cpu":
        return slow(f"{where} has one core a task: --cpus-per-task=8 feeds a GPU and judges programs")
    return fine(f"{where}, {given} core{'s' * (given != '1')} a task")


def run_folder(machine: Machine) -> Finding:
    """Return whether results can be written where they go: it must be writable, have room, and be seen by all nodes."""
    folder = Path(machine.run_dir).expanduser().resolve()
    while machine.run_dir and not folder.exists():  # the job would make it
        folder = folder.parent
    remedy = "start from a folder that can be written, or give hydra.run.dir"
    if machine.run_dir:
        remedy = "give another hydra.run.dir"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".lopa-dist-doctor-") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return broken(f"{folder} cannot be written ({error.strerror})", remedy)
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE:
        return broken(f"{folder} has {free / GIB:.2f} GiB free", "make room, or give another hydra.run.dir")
    kind = file_system(folder)
    if int(os.environ.get("SLURM_NNODES", "1")) > 1 and kind in NODE_LOCAL:
        return broken(f"{folder} ({kind}) is this node's alone", "start from a folder that all nodes share")
    return fine(f"{folder} can be written, {free / GIB:.0f} GiB free{f', {kind}' if kind else ''}")


def file_system(folder: Path) -> str:
    """Return the kind of file system that a folder is on; empty where the system does not say."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return ""
    over = [(where, kind) for where, kind in mounts if folder.is_relative_to(where.replace("\\040", " "))]
    return max(over, key=lambda mount: len(mount[0]))[1] if over else ""


def files(machine: Machine) -> Finding:
    """Return whether what the settings name is there: input or data sets, `task.output`'s place, the user's files."""
    config = machine.config
    check_files(config)
    sources = data_sets(config.task)
    for source in sources:
        if reason := why_not_there(source):
            why, _, remedy = reason.partition("; ")
            return broken(why, remedy)
    if sources:
        if why := why_lacking("datasets", name="the datasets library"):
            return Finding(State.BROKEN, f"{', '.join(sources)} {why}")
        if "allow_code_execution" not in options_of(config.task.name):  # `programs` checks that
            check_judging(task_class(config.task.name))  # not made: that reads examples from the hub
        return fine(f"{', '.join(sources)}: in the cache, or the hub has it")
    if config.task.name == HarnessTask.name:
        manager_of(config.task.harness or "")
        return fine(f"the harness has {config.task.harness}; its data are read when the job begins")
    if not config.task.input:
        return fine("no input is named")
    check(config.task.input)
    if read_later(config.task.input):
        return fine(f"task.input={config.task.input} is read when the job begins")
    for file in files_of(config.task.input):
        with naming(file, "task.input"):
            refuse_utf_16(file, "task.input")  # which also opens what is compressed
    task = make_task(config.task)
    errors = first_errors(task)  # as the job reads them: a column may not be there
    if errors and all(errors):
        return broken(f"task.input={config.task.input}: none of its first lines can be used", errors[0])
    check_judging(task)
    bad = f"; its first line cannot be used: {errors[0]}" if errors and errors[0] else ""
    return fine(f"task.input={config.task.input} is there{bad}")


def wandb(machine: Machine) -> Finding:
    """Return whether figures of runs go to W&B, online or offline, and whether there is a key for that."""
    try:
        mode, why = chosen_mode(machine.config)
    except ValueError as error:
        return broken(str(error), "correct or unset it")
    if mode == "disabled":
        return fine(f"off ({why})")
    if mode == "offline":
        return fine(f"offline, into the run folder ({why}); wandb sync sends it")
    if not os.environ.get("WANDB_API_KEY") and not logged_in():
        return broken(f"online ({why}), but there is no key", "wandb login, or logging.wandb.mode=offline")
    return fine("online; whether W&B can be reached is tried only when a job begins, for at most 30 s")


def logged_in() -> bool:
    """Return whether `wandb login` has left a key on this machine."""
    try:
        hosts = netrc(os.environ.get("NETRC", str(Path.home() / ".netrc"))).hosts
    except (OSError, SyntaxError):
        return False
    return any("wandb" in host for host in hosts)


def programs(machine: Machine) -> Finding:
    """Return whether the sandbox works; only tasks that run a model's programs need it."""
    task = machine.config.task
    needs = "allow_code_execution" in options_of(task.name)
    if needs and task.allow_code_execution is None:
        return broken(f"task={task.name} runs the model's programs", "task.allow_code_execution=true, or false")
    unconfined = task.allow_code_execution == "unconfined"
    try:
        sandbox.check(not unconfined)
    except ValueError as error:
        if needs and task.allow_code_execution:
            return broken("programs cannot be run", str(error))
        reason = str(error).split(": ", 1)[-1].split(". ")[0]
        return fine(f"not needed here; humaneval and mbpp would need it: {reason}")
    return fine("programs run unconfined, only with limits" if unconfined else "bubblewrap confines programs")
