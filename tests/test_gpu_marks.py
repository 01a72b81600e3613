"""GPUs are hidden from the suite, so that it gives the same on all machines; `--gpu` runs what is for one."""

from __future__ import annotations

import os
import runpy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import conftest


def config(gpu: bool) -> Any:
    return SimpleNamespace(getoption=lambda name: {"gpu": gpu}[name])


def item(*marks: str) -> Any:
    file = "_".join(("test", *marks))
    return SimpleNamespace(nodeid=f"{file}.py::one", get_closest_marker=lambda name: name if name in marks else None)


def test_there_is_no_gpu_here() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert not torch.cuda.is_available()


def test_with_gpu_what_is_for_one_runs_alone() -> None:
    system, kernel, compiles, other = item("system"), item("gpu"), item("gpu", "no_gpu"), item()
    found = [other, kernel, compiles, system]
    conftest.pytest_collection_modifyitems(config(gpu=False), found)
    assert found == [system, other, kernel, compiles]
    conftest.pytest_collection_modifyitems(config(gpu=True), found)
    assert found == [kernel]


def test_with_gpu_nothing_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET")
    for name in names:
        monkeypatch.delenv(name)
    monkeypatch.setattr("sys.argv", ["pytest", "--gpu"])
    runpy.run_path(str(conftest.__file__))
    assert not {*names} & {*os.environ}
    monkeypatch.setattr("sys.argv", ["pytest"])
    runpy.run_path(str(conftest.__file__))
    assert [os.environ.get(name) for name in names] == ["", "1"]


def test_with_gpu_but_without_one_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(pytest.UsageError, match="in one process only"):
        conftest.pytest_configure(config(gpu=True))
    monkeypatch.setattr(conftest, "GPU", True)
    with pytest.raises(pytest.UsageError, match="torch sees no GPU here"):
        conftest.pytest_configure(config(gpu=True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    conftest.pytest_configure(config(gpu=True))
