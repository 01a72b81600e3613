"""Ranks reach each other, or it is said why not, and all end with the same status."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest

from lopa_dist.jobs.commands.doctor import ranks
from lopa_dist.jobs.commands.doctor.finding import Finding, State
from lopa_dist.parallel.launcher import LaunchError
from tests.jobs.commands.doctor.machines import CPU_ONLY, Comm, joined, machine, shown
from tests.system import forked


def test_ranks_that_get_what_others_send_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    joined(monkeypatch, Comm())
    found = ranks.collectives(machine())
    assert found.state == State.FINE
    assert found.text.startswith("gloo joins 2 ranks; 16 KiB from each take ")


def test_what_is_broken_on_one_rank_is_so_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """And they leave each other before they end: a connection that breaks can abort a process."""
    ended = joined(monkeypatch, Comm(), elsewhere=1)
    would_run, screen = shown()
    assert not would_run
    assert ended == ["left"]
    assert "A job would not run here: 1 thing is broken." in screen


def test_too_few_ranks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    one = ranks.ranks(machine("parallel.branch=4"))
    assert one.state == State.FINE, "the job may be started with more"
    assert "start 4 ranks (torchrun --nproc-per-node 4 ...)" in one.text
    joined(monkeypatch, Comm())
    two = ranks.ranks(machine("parallel.branch=4"))
    assert two.state == State.BROKEN
    assert "the job has 2 ranks; start 4 ranks" in two.text


def test_ranks_that_get_something_else_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    joined(monkeypatch, Comm(lies=True))
    assert "not what others sent: another parallel.backend" in ranks.collectives(machine()).text


def test_ranks_that_do_not_meet_are_broken_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Event()
    joined(monkeypatch, Comm())

    def endless(*_: object) -> None:
        waits.wait()
        raise RuntimeError("the test is over")

    monkeypatch.setattr(ranks, "Group", endless)
    monkeypatch.setattr(ranks, "JOIN_S", 0.1)
    found = ranks.collectives(machine())
    waits.set()
    assert found.state == State.BROKEN
    assert "the 2 ranks did not meet, or did not answer, within 0 s: see whether all of them were started" in found.text


def test_why_ranks_cannot_be_joined_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise LaunchError("parallel.backend=nccl needs GPUs (model.device=cuda); use gloo on CPUs")

    joined(monkeypatch, Comm())
    monkeypatch.setattr(ranks, "Group", refuse)
    assert ranks.collectives(machine()) == Finding(
        State.BROKEN, "parallel.backend=nccl needs GPUs (model.device=cuda); use gloo on CPUs"
    )


@pytest.mark.system
def test_started_on_two_ranks_it_joins_them_and_one_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "openai___openai_humaneval").mkdir()  # as if the data set were there
    command = [*CPU_ONLY, "task=humaneval", "parallel.threads=1"]
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    started = forked.start("lopa_dist", 2, "doctor", *command, log=tmp_path / "log")
    assert all(started.wait())
    screen = " ".join(started.printed().split())
    assert "collectives fine gloo joins 2 ranks" in screen
    assert screen.count("Python fine") == 1
    assert "rank 1 on " in screen
    assert "A job would not run here: 2 things are broken." in screen


def test_ranks_that_would_compute_in_other_ways_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a C compiler ends the job: its texts would be others."""
    joined(monkeypatch, Comm(), first="another form")
    found = ranks.collectives(machine())
    assert found.state == State.BROKEN
    assert "and in another on rank 0, which ends a job: a C compiler on every machine, or engine" in found.text
