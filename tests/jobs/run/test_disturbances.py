"""What makes a job's times unreliable is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from lopa_dist.config import Config
from lopa_dist.jobs.run import disturbances
from lopa_dist.jobs.run.disturbances import Disturbances
from lopa_dist.jobs.setup import other_programs
from lopa_dist.jobs.setup.device import Threads
from lopa_dist.parallel.group import Group


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    """A single rank with one thread on two cores, of which other programs keep 1.5 busy."""
    monkeypatch.setattr(other_programs, "MUCH", 0.4)
    monkeypatch.setattr(disturbances, "OtherPrograms", lambda: SimpleNamespace(busy=lambda: 1.5))
    monkeypatch.setattr(disturbances, "threads", lambda *_: Threads(1, ""))
    monkeypatch.setattr(disturbances, "cores", lambda *_: Threads(2, ""))
    pauses = SimpleNamespace(seconds=3.0)
    return cast(Group, SimpleNamespace(failures=SimpleNamespace(pauses=pauses), world=SimpleNamespace(local_size=1)))


def test_other_programs_and_pauses_are_told(group: Group) -> None:
    noticed = Disturbances(Config(), group, torch.device("cpu"))
    group.failures.pauses.seconds += 120.0  # the three before do not count
    busy, [of_programs, of_pauses] = noticed.look()
    assert busy == 1.5
    assert of_programs.startswith("other programs kept 1.5 of 2 cores busy while this job generated with 1 thread:")
    assert of_pauses.startswith("the job stood still for 2 min")


def test_of_other_ranks_and_gpus_nothing_is_known(group: Group) -> None:
    assert Disturbances(Config(), group, torch.device("cuda")).look() == (None, [])
    group.world.local_size = 2  # type: ignore[misc]
    assert Disturbances(Config(), group, torch.device("cpu")).look() == (None, [])
