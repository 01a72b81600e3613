"""What a CUDA graph would freeze is the same for every batch of a bucket: operations, grids, pointers and scalars.

A graph replays the launches of one batch for all others. So whatever the host decides by a batch's values would be
wrong for the next one, silently. Here the functions that are captured on a GPU run with their Triton forms, up to the
launches themselves, and every launch is written down. It tells what can be captured at all.
"""

from __future__ import annotations

import copy
import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lopa_dist.engine import static_runner
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.static_runner import Body, Replay, StaticRunner
from lopa_dist.kernels import meta_attention
from lopa_dist.kernels.tiles import Split
from lopa_dist.models.quantize import quantize
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from tests.engine.test_loop import BASE, random_requests

TWO_FORMS = ("rows", "rope", "record_head", "virtual_gemm", "quantized")  # of `lopa_dist.kernels`
LAUNCHED = (
    "rows_triton.add_rms_norm_kernel", "rows_triton.embed_rms_norm_kernel", "rows_triton.add_rms_norm_fp8_kernel",
    "rows_triton.swiglu_fp8_kernel", "rows_triton.quantize_rows_kernel", "rope_triton.rope_and_store_kernel",
    "rows_triton.swiglu_kernel",
    "record_head_triton.tile_sums_kernel", "record_head_triton.share_sums_kernel", "meta_kernels.attend_kernel",
    "meta_kernels.merge_kernel", "virtual_gemm_triton.vgemm_kernel",
)  # fmt: skip
Launch = tuple[Any, ...]


class Launches(TorchDispatchMode):
    """Writes down operations and kernels with all that they are given.

    A tensor that was there before is told by its address; one that was made meanwhile by its number, for in a graph its
    address follows from the order in which memory is asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Launch] = []
        self.made: dict[int, int] = {}  # number by address of the storage
        self.kept: list[Tensor] = []  # so that no address is given out twice

    def of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            address = value.untyped_storage().data_ptr()
            where = f"made {self.made[address]}" if address in self.made else f"at {address}"
            return where, value.storage_offset(), tuple(value.shape), value.stride(), value.dtype
        if isinstance(value, (list, tuple)):
            return tuple(self.of(one) for one in value)
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = self.of(args), self.of(tuple(sorted((kwargs or {}).items())))
        values = args[0].tolist() if func._schema.name == "aten::lift_fresh" else None  # a number of the host's
        result = func(*args, **(kwargs or {}))
        known = {one.untyped_storage().data_ptr() for one in flat((args, kwargs)) if isinstance(one, Tensor)}
        for one in flat(result):
            address = one.untyped_storage().data_ptr() if isinstance(one, Tensor) else 0
            if address and address not in known and address not in self.made:
                self.made[address] = len(self.made)
                self.kept.append(one)
        self.found.append((str(func), *given, values))
        return result

    def kernel(self, function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = function.fn.__name__
        self.found.append((name, grid, self.of(args), self.of(tuple(sorted(options.items())))))


def flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from flat(one)
    else:
        yield value


class Recorder:
    """Writes down what every graph's function launches, by graph, each time that it runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[int, list[list[Launch]]] = defaultdict(list)
        self.functions: dict[int, str] = {}
        self.kept: list[Replay] = []  # so that no number stands for two
        self.launches: Launches | None = None
        plain, meta = static_runner.attend_tiles, meta_attention.attend_meta
        for name in TWO_FORMS:
            module: ModuleType = importlib.import_module(f"lopa_dist.kernels.{name}")
            monkeypatch.setattr(module, "fused", lambda *_: self.launches is not None)
        monkeypatch.setattr(
            static_runner, "attend_tiles", lambda *given: (meta if self.launches is not None else plain)(*given)
        )
        for name in LAUNCHED:
            kernel = importlib.import_module("lopa_dist.kernels." + name.split(".")[0])
            function = getattr(kernel, name.split(".")[1])
            monkeypatch.setattr(type(function), "run", self.run)
        monkeypatch.setattr(Replay, "__call__", self.replay)

    @property
    def run(self) -> Any:
        recorder = self

        def run(function: Any, *args: Any, **options: Any) -> None:
            assert recorder.launches is not None
            recorder.launches.kernel(function, *args, **options)

        return run

    @property
    def replay(self) -> Any:
        recorder = self

        def replay(graph: Replay, function: Callable[[], None], *where: Any) -> None:
            with recorder.recording(graph, function):
                function()
            function()  # in earnest, over what the record left behind

        return replay

    @contextmanager
    def recording(self, graph: Replay, function: Any) -> Iterator[None]:
        self.kept.append(graph)
        self.functions[id(graph)] = type(function.func.__self__).__name__
        with Launches() as self.launches:
            yield
        self.found[id(graph)].append(self.launches.found)
        self.launches = None

    def compared(self) -> dict[str, int]:
        """How many runs of each function were the same as the first of their graph; fails on the first that is not."""
        same: dict[str, int] = defaultdict(int)
        for graph, runs in self.found.items():
            for other in runs[1:]:
                assert len(other) == len(runs[0])
                for before, now in zip(runs[0], other, strict=True):
                    assert now == before
                same[self.functions[graph]] += 1
        return same

    def kernels(self) -> set[str]:
        return {launch[0] for runs in self.found.values() for launch in runs[0]}


def generate(model: Transformer, config: Any, **options: Any) -> Engine:
    engine = Engine(model, config, Solo(), EngineConfig(4, attention="meta", graphs="always", **options))
    requests = random_requests(1, 16, config.max_new_tokens)
    assert len(list(engine.generate(requests))) == 16
    return engine


@pytest.mark.parametrize(
    ("knobs", "options"),
    [
        ({}, {}),
        ({"temperature": 0.7, "confidence": "margin"}, {}),
        ({"verify": "agreement", "drafts": 3}, {}),
        ({"context": "d2f_causal"}, {"max_rows": 60}),
        ({"context": "dual"}, {}),
        ({"context": "vanilla"}, {}),
        ({}, {"reproducible": True}),
    ],
    ids=str,
)
def test_batches_of_one_bucket_launch_the_same(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any], options: dict[str, Any]
) -> None:
    monkeypatch.setattr(static_runner, "split_for", lambda *_: Split(8, 16))  # parts even of these few columns
    recorder = Recorder(monkeypatch)
    engine = generate(small_model, replace(BASE, **knobs), **options)
    assert engine.batch is not None
    assert isinstance(engine.batch.runner, StaticRunner)
    same = recorder.compared()
    assert same["Body"] > 5
    assert same["Head"] > 5
    expected = {
        "embed_rms_norm_kernel", "add_rms_norm_kernel", "rope_and_store_kernel", "swiglu_kernel", "tile_sums_kernel",
        "share_sums_kernel", "attend_kernel",
    }  # fmt: skip
    expected |= {"vgemm_kernel" if options.get("reproducible") else "merge_kernel"}
    if knobs.get("context") == "vanilla":  # a tile that sees nothing cached is not cut
        expected -= {"merge_kernel"}
    assert recorder.kernels() >= expected


@pytest.mark.parametrize(
    ("kind", "kernels"),
    [("int8", {"vgemm_kernel"}), ("fp8", {"add_rms_norm_fp8_kernel", "swiglu_fp8_kernel", "quantize_rows_kernel"})],
)
def test_quantised_products_launch_the_same(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, kind: str, kernels: set[str]
) -> None:
    model = copy.deepcopy(small_model)
    quantize(model, kind)
    recorder = Recorder(monkeypatch)
    generate(model, BASE)
    assert recorder.compared()["Body"] > 5
    assert recorder.kernels() >= kernels


@pytest.mark.parametrize(
    "spoil",
    [
        lambda body, runner: body.hidden.add_(int(body.rows)),
        lambda body, runner: body.hidden[: int(body.rows)].zero_(),
        lambda body, runner: body.hidden.add_(torch.tensor(float(body.tokens.sum()))),
        lambda body, runner: (
            body.hidden.add_(runner.pool.keys.clone().sum()) if int(body.positions.sum()) % 2 else None
        ),
        lambda body, runner: body.hidden.add_(body.fresh),
    ],
    ids=["scalar", "shape", "constant", "operation", "address"],
)
def test_what_depends_on_the_batch_is_noticed(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any, Any], Any]
) -> None:
    run, load, kept = Body.run, Body.load, []

    def loaded(body: Any, prepared: Any) -> None:
        load(body, prepared)
        body.fresh = torch.zeros(1)
        kept.append(body.fresh)

    def spoilt(body: Body, runner: StaticRunner) -> None:
        run(body, runner)
        spoil(body, runner)

    monkeypatch.setattr(Body, "load", loaded)
    monkeypatch.setattr(Body, "run", spoilt)
    recorder = Recorder(monkeypatch)
    engine = Engine(small_model, BASE, Solo(), EngineConfig(4, attention="meta", graphs="always"))
    for _ in engine.generate(random_requests(1, 8, BASE.max_new_tokens)):
        pass
    with pytest.raises(AssertionError):
        recorder.compared()
