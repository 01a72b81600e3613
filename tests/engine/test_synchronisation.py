"""A step of the engine never waits for its device but once, as far as a CPU can tell: nothing in it would on a GPU.

The static runner runs here as it does on a GPU, but for the forms of its kernels: those of the CPU (`PLAIN`) ask for
numbers that the Triton ones read on the device, so what they do does not count. What a GPU alone would show (copies
from memory that is not pinned) is left to `test_cuda`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lopa_dist import kernels
from lopa_dist.engine import running_batch
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.static_runner import StaticRunner
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from lopa_dist.rules.lopa import LOPA
from tests.engine.test_loop import BASE, random_requests

KERNELS = str(Path(kernels.__file__).parent)
PLAIN = ("attend_tiles_plain", "rope_and_store", "vgemm")  # what asks for such numbers there
WAITING = (
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "argwhere", "masked_select",
    "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount",
)  # fmt: skip
INDEXING = ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_")
COPIES = (Tensor.cpu, Tensor.tolist)  # numpy() is none: a tensor on a GPU would refuse it


def in_plain_form() -> bool:
    """Whether the CPU's form of a kernel is at work."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in PLAIN and code.co_filename.startswith(KERNELS):
            return True
        frame = frame.f_back
    return False


class Waits(Exception): ...


class Operations(TorchDispatchMode):
    """Fails on operations whose result's shape, or whose result, the host would have to wait for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        waits = name in WAITING
        if name in INDEXING:
            waits = any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
        if name == "repeat_interleave":
            waits = (kwargs or {}).get("output_size") is None
        if waits and not in_plain_form():
            raise Waits(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


class Copies(TorchFunctionMode):
    """Counts copies to the host, which on a CPU are no operations."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in COPIES and not in_plain_form()
        return func(*args, **(kwargs or {}))


def guarded(engine: Engine, requests: list[Any]) -> list[int]:
    """Generate; the copies to the host of every step. Answers that end are copied while the device goes on."""
    copies, counts = Copies(), []

    def observe(engine: Engine) -> None:
        counts.append(copies.count)
        copies.count = 0

    engine.on_step = [observe]
    later = patch.object(running_batch, "to_host_later", lambda tensor: tensor.numpy)
    with Operations(), copies, later:
        assert len(list(engine.generate(requests))) == len(requests)
    assert isinstance(engine.batch.runner, StaticRunner)
    counts[0] -= 1  # the lengths before the first requests came in
    return counts


KNOBS = pytest.mark.parametrize(
    "knobs",
    [
        {}, {"context": "d2f_causal"}, {"context": "vanilla"},
        {"context": "dual"}, {"temperature": 0.7},
        {"context": "blocks"},
    ],
    ids=str,
)  # fmt: skip


@KNOBS
@pytest.mark.parametrize("max_rows", [None, 40])
def test_a_step_waits_once(small_model: Transformer, knobs: dict[str, Any], max_rows: int | None) -> None:
    config = replace(BASE, **{"branches": 3, "max_new_tokens": 64} | knobs)
    requests = random_requests(1, 4, config.max_new_tokens)
    counts = guarded(Engine(small_model, config, Solo(), EngineConfig(4, max_rows, None, "meta", "always")), requests)
    assert len(counts) > 8
    assert set(counts) == {1}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: t.sum().item(), lambda t: bool(t.any()), lambda t: t[t > 0], lambda t: t.nonzero(),
        lambda t: t.masked_select(t > 0), lambda t: t.flatten().repeat_interleave(torch.ones(t.numel()).long()),
        lambda t: t.tolist(), lambda t: t.cpu(),
    ],
)  # fmt: skip
def test_what_would_wait_is_noticed(small_model: Transformer, spoil: Callable[[Tensor], Any]) -> None:
    def verify(state: Any, records: Any) -> Any:
        spoil(state.integers)
        return LOPA.verify(state, records)

    engine = Engine(small_model, BASE, Solo(), EngineConfig(4, attention="meta", graphs="always"))
    engine.rule = replace(engine.rule, verify=verify)
    try:
        counts = guarded(engine, random_requests(1, 4, BASE.max_new_tokens))
    except Waits:
        return
    assert min(counts) == 2
