"""A GPU that is not there, and what Triton and its kernels lack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_shapes import DREAM
from lopa_dist.composing import composed
from lopa_dist.jobs.commands.doctor import computing
from lopa_dist.jobs.commands.doctor.finding import Finding, Machine, State
from lopa_dist.kernels.preflight import Fault
from lopa_dist.models.config import Experts
from tests.jobs.commands.doctor.machines import machine

SHAPE = replace(DREAM, experts=Experts(8, 2, 32, "softmax", True))


def test_a_gpu_that_is_not_there_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert computing.device(Machine(composed(["model.device=cuda"]))).state == State.BROKEN


def test_kernels_that_fail_slow_a_job_and_end_one_that_insists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    asked = []
    monkeypatch.setattr(computing, "faults", lambda *given: asked.append(given) or {})
    assert computing.kernels(machine(gpu=True)) == Finding(State.FINE, "7 compile here and agree with torch")
    assert "fp8" not in asked[0][3], "this GPU has none"
    monkeypatch.setattr(computing, "faults", lambda *_: {"head": Fault("wrong numbers", "report it")})
    assert computing.kernels(machine(gpu=True)) == Finding(
        State.SLOW, "these run in torch's form: head: wrong numbers: report it"
    )
    assert computing.kernels(machine("engine.kernels=triton", gpu=True)).state == State.BROKEN
    assert computing.kernels(machine("engine.kernels=torch", gpu=True)).state == State.FINE


@pytest.mark.parametrize(
    ("capability", "options", "said"),
    [
        ((8, 0), (), "; experts: by Triton's kernel, since torch's product would ask"),
        ((9, 0), (), "; experts: by torch's grouped product"),
        ((9, 0), ("model.dtype=fp16",), "; experts: by Triton's kernel"),
        ((9, 0), ("model.quantization=int8",), "; experts: by Triton's kernel"),
    ],
)
def test_what_multiplies_with_experts_is_said(
    capability: tuple[int, int], options: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    monkeypatch.setattr(computing, "faults", lambda *_: {})
    made = machine(f"model.path={tmp_path}", "model.dtype=bf16", *options, gpu=True)
    made.__dict__["shape"] = SHAPE
    assert said in computing.kernels(made).text


def test_what_triton_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(computing, "TRITON", True)
    monkeypatch.setattr(computing.shutil, "which", lambda name: None)
    monkeypatch.setattr(computing.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    found = computing.compiler(machine(gpu=True))
    assert found.state == State.SLOW
    assert f"without C compiler and {tmp_path / 'Python.h'}" in found.text
    monkeypatch.setattr(computing, "TRITON", False)
    assert "pip install triton" in computing.compiler(machine(gpu=True)).text
