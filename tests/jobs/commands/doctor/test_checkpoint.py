"""The model is there or can be fetched, goes with the settings, and fits in the memory."""

from __future__ import annotations

import re

import pytest

from lopa_dist.config import composed
from lopa_dist.jobs.commands.doctor import checkpoint
from lopa_dist.jobs.commands.doctor.doctor import examine
from lopa_dist.jobs.commands.doctor.finding import Finding, Machine, State
from tests.jobs.commands.doctor.machines import CPU_ONLY, machine, shown


def test_a_model_that_is_not_there_is_said_once() -> None:
    would_run, screen = shown("model=local", "model.path=./nothing")
    assert not would_run
    assert screen.count("no such folder") == 1
    assert re.search(r"^memory +broken +as ", screen, re.MULTILINE)


def test_a_model_that_is_still_to_come_is_fine_with_a_network_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lopa_dist.jobs.commands.explain.try_to_load_from_cache", lambda *_: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert checkpoint.model(machine("model=dream_instruct")).state == State.FINE
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "fetch it: hf download Dream-org/" in checkpoint.model(machine("model=dream_instruct")).text


def test_settings_that_do_not_go_together_are_broken() -> None:
    config = composed(["decode.context=causal", *CPU_ONLY])
    [found] = [finding for name, finding in examine(Machine(config)) if name == "model"]
    assert found == Finding(State.BROKEN, "decode.context=causal: the model is not causal; leave it at auto")


def test_memory_is_held_against_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    for free, state in ((40 * gib, State.FINE), (800 << 20, State.SLOW), (1 << 20, State.BROKEN)):
        monkeypatch.setattr(checkpoint, "available_memory", lambda free=free: free)
        assert checkpoint.memory_needed(machine("engine.max_sequences=128")).state == state, free
    monkeypatch.setattr(checkpoint, "available_memory", lambda: 600 << 20)
    assert "too little is left for one sequence" in checkpoint.memory_needed(machine()).text
