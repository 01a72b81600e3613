"""What the program around an `LLM` has set neither affects its calls nor is changed by them."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import hydra
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase

from lopa_dist import LLM
from lopa_dist.composing import by_hydra, composed
from lopa_dist.parallel.calls import handlers_kept
from lopa_dist.parallel.stop import STATUS, unclaimed
from lopa_dist.surroundings import undisturbed

PROMPTS = ["Sam has 3 books . Sam buys 4 more . How many books does Sam have now ?"]
FORKS = """
import multiprocessing
from lopa_dist import LLM

PROMPTS = ["Sam has 3 books . Sam buys 4 more . How many books does Sam have now ?"] * 8

def answer(llm):
    return llm.generate(PROMPTS, progress=False)[0].text

def of_its_parent():
    return answer(llm)

def of_its_own():
    return answer(LLM("embedded", "parallel.threads=2"))

llm = LLM("embedded", "parallel.threads=2")
text = answer(llm)
llm.turn.acquire()  # as while a call runs in another thread
for act, *given in ((of_its_parent,), (of_its_own,), (answer, llm)):  # the last one is pickled
    with multiprocessing.get_context("fork").Pool(1) as pool:
        found = pool.apply_async(act, given).get(timeout=100)
    print("the same" if found == text else found)
"""


def test_a_forked_process_computes_with_one_thread() -> None:
    """Its own `LLM` and its parent's; with more, torch waits forever for threads that a fork does not copy."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=False, timeout=250)
    assert done.stdout.splitlines() == ["the same"] * 3, done.stderr
    assert done.stderr.count("it computes with one; a process that is spawned may have more") == 2


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("embedded", "parallel.threads=2")


@pytest.fixture
def _default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def found(llm: LLM) -> tuple[list[int], float]:
    return llm.generate(PROMPTS)[0].tokens, llm.score(PROMPTS, [" 7"])[0].loglikelihood


@pytest.mark.usefixtures("_default_device")
def test_the_default_device_is_the_program_s(llm: LLM) -> None:
    """With C kernels, it was a segmentation fault."""
    elsewhere = found(llm)
    assert found(LLM("embedded", "parallel.threads=2")) == elsewhere
    assert torch.empty(1).is_meta
    torch.set_default_device(None)
    assert found(llm) == elsewhere


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_autocast_is_the_program_s(kernels: str) -> None:
    llm = LLM("embedded", f"engine.kernels={kernels}", "parallel.threads=1")
    alone = found(llm)
    with torch.autocast("cpu", torch.bfloat16):
        assert found(llm) == alone
        assert torch.is_autocast_enabled("cpu")


def test_the_number_of_threads_is_the_program_s(llm: LLM) -> None:
    """Also for an `LLM` that is made later, which takes no more threads than torch has."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        found(llm)
        assert LLM("embedded", "parallel.threads=1").threads == 1
        assert torch.get_num_threads() == 3
        with undisturbed(llm.threads), ThreadPoolExecutor(1) as another:
            assert torch.get_num_threads() == 2
            assert another.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


def test_another_thread_s_call_leaves_signals_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as another:
        kept = handlers_kept()
        another.submit(kept.__enter__).result()
        signal.signal(signal.SIGTERM, lambda number, frame: None)  # meanwhile, by the program
        try:
            another.submit(kept.__exit__, None, None, None).result()
        finally:
            signal.signal(signal.SIGTERM, before)


@pytest.mark.skipif(not STATUS.exists(), reason="this system does not tell which signals are answered")
def test_a_signal_that_is_answered_in_c_is_the_program_s() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert signal.SIGUSR1 in unclaimed()
    with Path(os.devnull).open("w") as nowhere:
        faulthandler.register(signal.SIGUSR1, nowhere)
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
        assert signal.SIGUSR1 not in unclaimed()
        faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def compose_at_once() -> None:
    """In several threads, without what was composed before."""
    by_hydra.cache_clear()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(composed, [[f"decode={name}"] for name in ("lopa", "threshold", "vanilla", "verified")]))


def hydra_of_the_program(folder: Path) -> AbstractContextManager[None]:
    (folder / "mine.yaml").write_text("width: 3\n")
    return hydra.initialize_config_dir(str(folder), version_base="1.2")


def test_hydra_is_the_program_s(tmp_path: Path) -> None:
    with hydra_of_the_program(tmp_path):
        compose_at_once()
        assert hydra.compose("mine").width == 3
        assert str(VersionBase.instance().version_base) == "1.2"
    compose_at_once()
    assert not GlobalHydra.instance().is_initialized()
