"""What the doctor looks at in tests: this machine, one with a GPU, one of two ranks."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from lopa_dist.composing import composed
from lopa_dist.jobs.commands.doctor import ranks
from lopa_dist.jobs.commands.doctor.doctor import doctor
from lopa_dist.jobs.commands.doctor.finding import Machine
from lopa_dist.parallel.launcher import World

GPU = torch.device("cuda:0")
CPU_ONLY = ["model.device=cpu"]


def machine(*overrides: str, gpu: bool = False) -> Machine:
    made = Machine(composed([*overrides]))
    made.__dict__["device"] = GPU if gpu else torch.device("cpu")
    return made


def shown(*overrides: str) -> tuple[bool, str]:
    screen = Console(file=io.StringIO(), width=100)
    would_run = doctor([*CPU_ONLY, *overrides], screen)
    assert isinstance(screen.file, io.StringIO)
    return would_run, screen.file.getvalue()


class Comm:
    """Rank 0 of two, of which the other sends what it is told to."""

    rank, size = 0, 2

    def __init__(self, lies: bool = False) -> None:
        self.lies = lies

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        return torch.stack([own, own + (0 if self.lies else 1)])

    def broadcast(self, own: torch.Tensor, source: int) -> torch.Tensor:
        return own.fill_(source)


def joined(monkeypatch: pytest.MonkeyPatch, comm: Comm, elsewhere: int = 0, first: str = "") -> list[str]:
    """The doctor is one of two ranks, and the other has found `elsewhere` things broken. Returns what becomes of it."""
    ended: list[str] = []
    store = SimpleNamespace(
        sum=lambda found: {name: count + elsewhere for name, count in found.items()},
        broadcast=lambda name, own: first or own,
    )
    left = SimpleNamespace(leave=lambda: ended.append("left"))
    monkeypatch.setattr(ranks, "detect", lambda: World("torchrun", 0, 2, 0, 2))
    monkeypatch.setattr(
        ranks, "Group", lambda *_: SimpleNamespace(comm=comm, backend="gloo", store=store, failures=left)
    )
    return ended
