"""Shared fixtures: one thread, the same examples at each run, a small random model, the embedded one."""

from __future__ import annotations

import atexit
import fcntl
import gc
import math
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from unittest import mock

import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from hypothesis import settings
from transformers import PreTrainedTokenizerFast

from lopa_dist.jobs.setup import other_programs
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.files import EMBEDDED
from lopa_dist.models.tokenizer import load_tokenizer
from lopa_dist.models.transformer import Transformer
from lopa_dist.tasks.sandbox import check

gc.disable()  # imports leave no garbage; looking for it took a third of the time to collect the tests
# a suite that fails by chance, or on a busy machine, is not believed when it matters
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")  # --hypothesis-profile=default tries other examples at each run
torch.set_num_threads(1)
other_programs.MUCH = math.inf  # jobs in this process never find other programs too busy
with mock.patch.object(other_programs, "busy_now", return_value=0):
    other_programs.busy_cores()  # it is cached
for name in ("WANDB_MODE", "WANDB_DISABLED", "WANDB_API_KEY", "WANDB_PROJECT"):  # of the developer
    os.environ.pop(name, None)
for name in [*os.environ]:  # the suite may run in an allocation; the jobs that it starts are not that one's
    if name.startswith("SLURM_") and name != "SLURM_CONF":
        del os.environ[name]
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes would each compile the package
GPU = "--gpu" in sys.argv
if not GPU:  # hidden, and kernels are interpreted: Triton reads that when one is imported, which other conftests do
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"

AFTER_EACH = 8  # files of other tests after one of system tests, as many as keep the cores busy while those wait

SMALL = ModelConfig(
    family="Dream", vocab_size=48, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=48,
    rms_eps=1e-6, rope_theta=10_000.0, qkv_bias=True, tied=False, shift=True, mask_id=47, eos_ids=(46,), pad_id=46,
    max_positions=512,
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--gpu`: the tests for a GPU alone. Without it GPUs are hidden, so that results are a CPU's on every machine."""
    parser.addoption("--gpu", action="store_true", help="run the tests that are marked gpu, on the GPU")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse `--gpu` where it cannot be."""
    if config.getoption("gpu") and not torch.cuda.is_available():
        raise pytest.UsageError("--gpu: torch sees no GPU here" if GPU else "--gpu: in one process only, without -n")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Three processes more than there are cores: tests that start ranks wait for them half of their time."""
    return (os.cpu_count() or 1) + 3


def pytest_collection_finish() -> None:
    """Look for garbage again, except among what was imported: that would take half a second each time.

    At the end it is looked at, too, because some libraries then complain of objects that they still have.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed what draws without a generator, as new layers do, before each test and the fixtures that it makes.

    And forget a run that an earlier test had Hydra start in this process: jobs write down what such a one was given.
    """
    torch.manual_seed(0)
    HydraConfig.instance().cfg = None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the files of system tests, which take longest, first, with some others after each.

    System tests wait half of their time, and many of them at once take turns on the cores. What comes last should be
    short.
    """
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    system = sorted((own for own in files.values() if own[0].get_closest_marker("system")), key=len, reverse=True)
    others = iter([own for own in files.values() if not own[0].get_closest_marker("system")])
    turns = [[own, *islice(others, AFTER_EACH)] for own in system]
    items[:] = [item for turn in (*turns, others) for own in turn for item in own]
    if config.getoption("gpu"):
        items[:] = [item for item in items if item.get_closest_marker("gpu") and not item.get_closest_marker("no_gpu")]


@pytest.fixture(scope="session")
def small_model() -> Transformer:
    """A random Dream-shaped model with peaked, varied predictions."""
    generator = torch.Generator().manual_seed(7)
    with torch.random.fork_rng():
        torch.manual_seed(3)  # for the biases: the same whatever test asks first
        model = Transformer(SMALL)
    for name, p in model.named_parameters():
        scale = 1.5 if "lm_head" in name else 0.7 if "embed" in name else p.shape[-1] ** -0.5
        if p.ndim == 2:
            p.data = torch.randn(p.shape, generator=generator) * scale
    return model.requires_grad_(False).eval()


@pytest.fixture(scope="session")
def embedded_model() -> Transformer:
    """The shipped model."""
    return load_model(EMBEDDED, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="session")
def embedded_tokenizer() -> PreTrainedTokenizerFast:
    """Its tokenizer."""
    return load_tokenizer(EMBEDDED)


@pytest.fixture
def inference() -> Iterator[None]:
    """Inference, as engines run, and the number of threads as it was afterwards."""
    threads = torch.get_num_threads()
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def sandbox_to_itself() -> Iterator[None]:
    """Keeps tests in other processes out of the sandbox, by a lock on this file; skips where there can be none.

    One test fills the sandbox with processes, which the kernel may count together with those of other runs, and others
    look for processes that it left behind.
    """
    try:
        check(True)
    except ValueError as error:
        pytest.skip(str(error))
    with Path(__file__).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
