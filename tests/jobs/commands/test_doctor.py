"""`lopa-dist doctor`: a line for everything that a job needs, with the remedy of what is broken."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from lopa_dist import cli
from lopa_dist.checks import UserError
from lopa_dist.config import composed
from lopa_dist.jobs.commands import doctor as program
from lopa_dist.jobs.commands.doctor import CHECKS, Finding, Machine, State, doctor
from lopa_dist.kernels.preflight import Fault
from lopa_dist.parallel.launcher import LaunchError, World

GPU = torch.device("cuda:0")
CPU_ONLY = ["model.device=cpu"]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of one's own, and no sign of Slurm or W&B."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program.sandbox, "check", lambda confined: None)
    names = ("JOB_ID", "JOB_NODELIST", "CPUS_PER_TASK", "NNODES", "SUBMIT_DIR")
    for name in ("WANDB_API_KEY", "CC", *(f"SLURM_{name}" for name in names)):
        monkeypatch.delenv(name, raising=False)


def machine(*overrides: str, gpu: bool = False) -> Machine:
    made = Machine(composed([*overrides]))
    made.__dict__["device"] = GPU if gpu else torch.device("cpu")
    return made


def shown(*overrides: str) -> tuple[bool, str]:
    screen = Console(file=io.StringIO(), width=100)
    would_run = doctor([*CPU_ONLY, *overrides], screen)
    assert isinstance(screen.file, io.StringIO)
    return would_run, screen.file.getvalue()


def test_the_shipped_model_would_run() -> None:
    would_run, screen = shown()
    assert would_run, screen
    for name in CHECKS:
        assert re.search(rf"^{re.escape(name)} +fine ", screen, re.MULTILINE), screen
    assert screen.endswith("A job would run here.\n")
    assert max(map(len, screen.splitlines())) <= 100


def test_what_is_broken_is_said_with_the_remedy_and_in_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["lopa-dist", "doctor", *CPU_ONLY, "task=humaneval"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 1
    screen = " ".join(capsys.readouterr().out.split())
    assert "sandbox broken task=humaneval runs the model's programs: task.allow_code_execution=true" in screen
    assert "A job would not run here: 1 thing is broken." in screen


def test_a_model_that_is_not_there_is_said_once() -> None:
    would_run, screen = shown("model=local", "model.path=./nothing")
    assert not would_run
    assert screen.count("no such folder") == 1
    assert re.search(r"^memory +broken +as ", screen, re.MULTILINE)


def test_a_model_that_is_still_to_come_is_fine_with_a_network_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lopa_dist.jobs.commands.explain.try_to_load_from_cache", lambda *_: None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert program.model(machine("model=dream_instruct")).state == State.FINE
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "fetch it: hf download Dream-org/" in program.model(machine("model=dream_instruct")).text


def test_settings_that_do_not_go_together_are_broken() -> None:
    config = composed(["decode.context=causal", *CPU_ONLY])
    [found] = [finding for name, finding in program.examine(Machine(config)) if name == "model"]
    assert found == Finding(State.BROKEN, "decode.context=causal: the model is not causal; leave it at auto")


def test_kernels_that_fail_slow_a_job_and_end_one_that_insists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    asked = []
    monkeypatch.setattr(program, "faults", lambda *given: asked.append(given) or {})
    assert program.kernels(machine(gpu=True)) == Finding(State.FINE, "7 compile here and agree with torch")
    assert "fp8" not in asked[0][3], "this GPU has none"
    monkeypatch.setattr(program, "faults", lambda *_: {"head": Fault("wrong numbers", "report it")})
    assert program.kernels(machine(gpu=True)) == Finding(
        State.SLOW, "these run in torch's form: head: wrong numbers: report it"
    )
    assert program.kernels(machine("engine.kernels=triton", gpu=True)).state == State.BROKEN
    assert program.kernels(machine("engine.kernels=torch", gpu=True)).state == State.FINE


def test_what_triton_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(program, "TRITON", True)
    monkeypatch.setattr(program.shutil, "which", lambda name: None)
    monkeypatch.setattr(program.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    found = program.compiler(machine(gpu=True))
    assert found.state == State.SLOW
    assert f"without C compiler and {tmp_path / 'Python.h'}" in found.text
    monkeypatch.setattr(program, "TRITON", False)
    assert "pip install triton" in program.compiler(machine(gpu=True)).text


def test_memory_is_held_against_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1 << 30
    for free, state in ((40 * gib, State.FINE), (800 << 20, State.SLOW), (1 << 20, State.BROKEN)):
        monkeypatch.setattr(program, "available_memory", lambda free=free: free)
        assert program.memory_needed(machine("engine.max_sequences=128")).state == state, free
    monkeypatch.setattr(program, "available_memory", lambda: 600 << 20)
    assert "too little is left for one sequence" in program.memory_needed(machine()).text


def test_a_run_folder_must_be_writable_roomy_and_shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(program, "file_system", lambda folder: "ext4")
    assert program.run_folder(machine()).state == State.FINE
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("SLURM_NNODES", "2")
    assert "this node's alone: start from a folder that all nodes share" in program.run_folder(machine()).text
    monkeypatch.setattr(program, "LEAST_FREE", 1 << 60)
    assert "make room" in program.run_folder(machine()).text
    monkeypatch.setenv("SLURM_SUBMIT_DIR", str(tmp_path / "gone"))
    assert "cannot be written (No such file or directory)" in program.run_folder(machine()).text


def test_file_systems_are_told_apart() -> None:
    assert program.file_system(Path("/proc/self")) == "proc"


def test_slurm_and_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert program.slurm(machine()).state == State.SLOW
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    assert program.slurm(machine()).state == State.FINE
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert program.wandb(machine("logging.wandb.mode=online")).state == State.BROKEN
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert program.wandb(machine("logging.wandb.mode=online")).state == State.FINE


def test_a_gpu_that_is_not_there_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert program.device(Machine(composed(["model.device=cuda"]))).state == State.BROKEN


def test_words_that_are_no_settings_are_refused() -> None:
    with pytest.raises(UserError, match="doctor takes settings as key=value"):
        shown("dream")
    with pytest.raises(UserError, match=r"decode\.tau_conf"):
        shown("decode.tau_con=1")


class Comm:
    """Rank 0 of two, of which the other sends what it is told to."""

    rank, size = 0, 2

    def __init__(self, lies: bool = False) -> None:
        self.lies = lies

    def all_gather(self, own: torch.Tensor) -> torch.Tensor:
        return torch.stack([own, own + (0 if self.lies else 1)])

    def broadcast(self, own: torch.Tensor, source: int) -> torch.Tensor:
        return own.fill_(source)


def joined(monkeypatch: pytest.MonkeyPatch, comm: Comm, elsewhere: int = 0) -> None:
    """The doctor is one of two ranks, and the other has found `elsewhere` things broken."""
    store = SimpleNamespace(sum=lambda found: {name: count + elsewhere for name, count in found.items()})
    monkeypatch.setattr(program, "detect", lambda: World("torchrun", 0, 2, 0, 2))
    monkeypatch.setattr(program, "Group", lambda *_: SimpleNamespace(comm=comm, backend="gloo", store=store))


def test_ranks_that_get_what_others_send_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    joined(monkeypatch, Comm())
    found = program.collectives(machine())
    assert found.state == State.FINE
    assert found.text.startswith("gloo joins 2 ranks; 16 KiB from each take ")


def test_what_is_broken_on_one_rank_is_so_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    joined(monkeypatch, Comm(), elsewhere=1)
    would_run, screen = shown()
    assert not would_run
    assert "A job would not run here: 1 thing is broken." in screen


def test_ranks_that_get_something_else_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    joined(monkeypatch, Comm(lies=True))
    assert "not what others sent: another parallel.backend" in program.collectives(machine()).text


def test_ranks_that_do_not_meet_are_broken_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Event()
    joined(monkeypatch, Comm())

    def endless(*_: object) -> None:
        waits.wait()
        raise RuntimeError("the test is over")

    monkeypatch.setattr(program, "Group", endless)
    monkeypatch.setattr(program, "JOIN_S", 0.1)
    found = program.collectives(machine())
    waits.set()
    assert found.state == State.BROKEN
    assert "the 2 ranks did not meet, or did not answer, within 0 s: see whether all of them were started" in found.text


def test_why_ranks_cannot_be_joined_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise LaunchError("parallel.backend=nccl needs GPUs (model.device=cuda); use gloo on CPUs")

    joined(monkeypatch, Comm())
    monkeypatch.setattr(program, "Group", refuse)
    assert program.collectives(machine()) == Finding(
        State.BROKEN, "parallel.backend=nccl needs GPUs (model.device=cuda); use gloo on CPUs"
    )


@pytest.mark.system
def test_started_on_two_ranks_it_joins_them_and_one_speaks() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "lopa_dist", "doctor"]
    done = subprocess.run(
        [*command, *CPU_ONLY, "task=humaneval", "parallel.threads=1"], capture_output=True, text=True, check=False
    )
    screen = " ".join(done.stdout.split())
    assert "collectives fine gloo joins 2 ranks" in screen
    assert screen.count("Python fine") == 1
    assert "rank 1 on " in screen
    assert "A job would not run here: 2 things are broken." in screen
    assert done.returncode
