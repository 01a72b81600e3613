"""What a check of the doctor looks at, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import torch

from lopa_dist.config import Config
from lopa_dist.jobs.commands.explain import shape_of
from lopa_dist.jobs.setup.device import gpu
from lopa_dist.models.config import ModelConfig
from lopa_dist.parallel.group import Group
from lopa_dist.parallel.launcher import detect

GIB = 2**30  # bytes


class State(Enum):
    """How bad a finding is: the words that are shown, and their colour."""

    FINE = "fine", "green"
    SLOW = "slow because", "yellow"
    BROKEN = "broken", "bold red"


class Finding(NamedTuple):
    """What a check found; if something is broken, the text says what to do."""

    state: State
    text: str


def fine(text: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(State.FINE, text)


def slow(text: str) -> Finding:
    """Return a finding of why a job would run, but more slowly than it could."""
    return Finding(State.SLOW, text)


def broken(text: str, remedy: str) -> Finding:
    """Return a finding of what would end a job, and what to do about it."""
    return Finding(State.BROKEN, f"{text}: {remedy}")


@dataclass
class Machine:
    """What the checks look at."""

    config: Config
    group: Group | None = None  # of the ranks that the doctor was started with, once they are joined
    run_dir: str = ""  # `hydra.run.dir`, if it was given

    @cached_property
    def device(self) -> torch.device:
        """Return the device that a job's rank would compute on; the CPU where torch finds no GPU."""
        name = self.config.model.device
        if not torch.cuda.is_available() or name == "cpu":
            return torch.device("cpu")
        return gpu(name, detect())

    @cached_property
    def shape(self) -> ModelConfig | None:
        """Return the model's configuration; None where its files are not on this machine yet."""
        return shape_of(self.config)
