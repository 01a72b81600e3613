"""`LLM` on two ranks: a rank whose program ends or hangs between two calls, or in one, keeps the other not waiting."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.system.conftest import ROOT
from tests.system.many_calls import LAUNCHERS, MPIRUN

TIMEOUT_S, SILENT_S = 5, 12
PROGRAM = f"""
import os, signal, sys, threading, time
import torch.distributed as dist
import lopa_dist.parallel.calls
from lopa_dist import LLM
lopa_dist.parallel.calls.SILENT_S = {SILENT_S}
how = sys.argv[1]
if how == "own group":
    dist.init_process_group("gloo")
llm = LLM("causal", "parallel.threads=1", "parallel.data=2", "parallel.timeout_s={TIMEOUT_S}")
prompts = ["Ann has 3 books . How many books does Ann have now ?"] * 2
if how == "own group":
    try:
        llm.generate(prompts, max_new_tokens=4)
    except RuntimeError as error:
        dist.barrier()  # the group is as it was
        dist.destroy_process_group()
        print(error)
llm.generate(prompts, max_new_tokens=4)
if llm.world.rank == 1:
    if how == "raise":
        raise RuntimeError("planted")
    if how == "exit":
        sys.exit()
    if how == "suspended":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "busy":
        time.sleep({SILENT_S + 8})
    if how == "hang":
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGSTOP)).start()  # in the next call
print("rank", llm.world.rank, "goes on", flush=True)
llm.generate(prompts * (2000 if how == "hang" else 1), max_new_tokens=64, drafts=0)
print("rank", llm.world.rank, "ends", flush=True)
"""
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not MPIRUN.exists(), reason="needs an MPI in this environment: pip install mpi4py mpich"),
]


def end_of(folder: Path, launcher: str, how: str) -> tuple[int, str, float]:
    """The exit status, what was printed, and the seconds that it took."""
    (folder / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    began = time.monotonic()
    done = subprocess.run(
        [*LAUNCHERS[launcher], str(folder / "program.py"), how], capture_output=True, text=True, env=environment,
        cwd=folder, check=False, timeout=250,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began


@pytest.mark.parametrize(
    ("launcher", "how", "said"),
    [
        ("mpirun", "raise", "rank 1: RuntimeError: planted"),
        ("mpirun", "exit", "rank 1: its program has ended"),
        ("torchrun", "exit", "rank 1: its program has ended"),
        ("mpirun", "hang", "rank 1 of 2 does not answer"),
        ("mpirun", "suspended", "rank 1 of 2 does not answer"),
    ],
)
def test_the_other_rank_is_told_and_ends(tmp_path: Path, launcher: str, how: str, said: str) -> None:
    """Without the five minutes for which ranks that start slowly are waited for."""
    status, printed, took = end_of(tmp_path, launcher, how)
    assert status != 0, printed
    assert said in printed
    assert "rank 0 goes on" in printed
    assert "rank 0 ends" not in printed
    assert took < 200


def test_between_two_calls_a_rank_may_be_busy(tmp_path: Path) -> None:
    status, printed, took = end_of(tmp_path, "torchrun", "busy")
    assert status == 0, printed
    assert took > SILENT_S
    assert "rank 0 ends" in printed


def test_a_process_group_of_the_program_s_own_is_not_touched(tmp_path: Path) -> None:
    status, printed, _ = end_of(tmp_path, "torchrun", "own group")
    assert status == 0, printed
    assert printed.count("call torch.distributed.destroy_process_group() first") == 2
    assert "rank 0 ends" in printed
