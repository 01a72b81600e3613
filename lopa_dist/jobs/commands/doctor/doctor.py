"""`lopa-dist doctor [KEY=VALUE ...]`: whether a job with these settings would run on this machine, and what slows it.

Each check looks at one thing that jobs need, and says in a line that it is fine, what makes it slow, or what is broken
and how to fix it. Nothing is downloaded and no weights are loaded. What Triton compiles on a GPU is kept for the job.

Started on several ranks, as a job would be, it joins them and compares their collectives. Rank 0 shows what it finds;
the others show what is slow or broken, and all end with the same status.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lopa_dist.checks import UserError
from lopa_dist.composing import composed
from lopa_dist.jobs.commands.doctor.checkpoint import memory_needed, model, tokenizer
from lopa_dist.jobs.commands.doctor.computing import compiler, device, kernels, library
from lopa_dist.jobs.commands.doctor.finding import Finding, Machine, State
from lopa_dist.jobs.commands.doctor.ranks import broken_everywhere, collectives, ranks
from lopa_dist.jobs.commands.doctor.surroundings import files, programs, python, run_folder, slurm, wandb
from lopa_dist.overrides import as_hydra_reads
from lopa_dist.parallel.launcher import detect
from lopa_dist.setting_keys import check_keys

CHECKS: dict[str, Callable[[Machine], Finding]] = {
    "Python": python,
    "torch": library,
    "device": device,
    "compiler": compiler,
    "ranks": ranks,
    "collectives": collectives,
    "Slurm": slurm,
    "run folder": run_folder,
    "files": files,
    "model": model,
    "memory": memory_needed,
    "tokenizer": tokenizer,
    "W&B": wandb,
    "sandbox": programs,
    "kernels": kernels,  # last, as a kernel that breaks the GPU leaves nothing else to check
}


def examine(machine: Machine) -> Iterator[tuple[str, Finding]]:
    """Yield the name of each check and what it finds; a check that raises an error has found something broken."""
    said = dict[str, str]()
    for name, check in CHECKS.items():
        try:
            yield name, check(machine)
        except Exception as error:
            text = f"{error}" if isinstance(error, ValueError) else repr(error)
            yield name, Finding(State.BROKEN, f"as {said[text]}" if text in said else text)
            said.setdefault(text, name)


def line_of(name: str, finding: Finding) -> Table:
    """Return a line with what a check found, in columns as wide as those of all other checks."""
    line = Table.grid(padding=(0, 2))
    line.add_column(width=max(map(len, CHECKS)), no_wrap=True)
    line.add_column(width=max(len(state.value[0]) for state in State), no_wrap=True)
    line.add_column(overflow="fold")
    line.add_row(name, Text(*finding.state.value), Text(finding.text))
    return line


def doctor(overrides: list[str], console: Console) -> bool:
    """Print what the checks find for a job with these overrides, and return whether it would run.

    Raises:
        UserError: the settings are not valid.
    """
    wrong = [word for word in overrides if "=" not in word]
    if wrong:
        raise UserError(f"{wrong[0]}: doctor takes settings as key=value, as a job does: lopa-dist doctor model=...")
    check_keys(overrides)
    given = dict(word.partition("=")[::2] for word in overrides)
    machine, world = Machine(composed(as_hydra_reads(overrides)), run_dir=given.get("hydra.run.dir", "")), detect()
    states = []
    for name, finding in examine(machine):
        states.append(finding.state)
        if world.rank and finding.state == State.FINE:
            continue
        if world.rank:
            console.print(Text(f"rank {world.rank} on {socket.gethostname()}:"))
        console.print(line_of(name, finding))
    count = broken_everywhere(machine, states.count(State.BROKEN))
    if count:
        verdict = f"not run here: {count} {'thing is' if count == 1 else 'things are'} broken"
    else:
        verdict = f"run here{', slower than it could' if State.SLOW in states else ''}"
    if not world.rank:
        console.print(Text(f"A job would {verdict}."))
    return not count
