"""The run folder, Slurm and W&B."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lopa_dist.jobs.commands.doctor import surroundings
from lopa_dist.jobs.commands.doctor.finding import Machine, State
from tests.jobs.commands.doctor.machines import machine, shown


def test_the_run_folder_is_the_one_that_is_given(tmp_path: Path) -> None:
    """Or the nearest folder that is there, which the job would make it in."""
    (tmp_path / "file").write_text("")
    for given, state in ((tmp_path / "new" / "run", State.FINE), (tmp_path / "file" / "run", State.BROKEN)):
        found = surroundings.run_folder(Machine(machine().config, run_dir=str(given)))
        assert found.state == state
        assert str(tmp_path) in found.text
    assert "run folder" in shown(f"hydra.run.dir={tmp_path}/new")[1]


def test_a_run_folder_must_be_writable_roomy_and_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(surroundings, "file_system", lambda folder: "ext4")
    assert surroundings.run_folder(machine()).state == State.FINE
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("SLURM_NNODES", "2")
    assert "this node's alone: start from a folder that all nodes share" in surroundings.run_folder(machine()).text
    monkeypatch.setattr(surroundings, "LEAST_FREE", 1 << 60)
    assert "make room" in surroundings.run_folder(machine()).text
    monkeypatch.undo()
    monkeypatch.setenv("SLURM_SUBMIT_DIR", str(tmp_path / "gone"))
    assert surroundings.run_folder(machine()).state == State.FINE, "a job's folder begins where it is started"


def test_file_systems_are_told_apart() -> None:
    assert surroundings.file_system(Path("/proc/self")) == "proc"


def test_slurm_and_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with_gpu = machine()
    with_gpu.device = torch.device("cuda")
    assert surroundings.slurm(with_gpu).state == State.SLOW
    assert surroundings.slurm(machine()).state == State.FINE, "a rank on a CPU computes with one core"
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    assert surroundings.slurm(machine()).state == State.FINE
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert surroundings.wandb(machine("logging.wandb.mode=online")).state == State.BROKEN
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert surroundings.wandb(machine("logging.wandb.mode=online")).state == State.FINE


def test_a_task_that_the_harness_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'lopa_dist[eval]'")
    few = SimpleNamespace(all_tasks=["gsm8k", "mmlu"])  # reading all that there are takes ten seconds
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: few)
    assert surroundings.files(machine("task=harness", "task.harness=gsm8k")).state == State.FINE
    assert "did you mean gsm8k?" in " ".join(shown("task=harness", "task.harness=gsm9k")[1].split())
