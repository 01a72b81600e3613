"""Measure steps of the default decodings for `gpu_first`, and profile them; weights are random, so texts are noise."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.exposed import Exposed
from benchmarks.first_facts import Fact, Making
from benchmarks.gpu_shapes import Weights, causal_model, has_fp8, models
from lopa_dist.decode import DecodeConfig
from lopa_dist.decode.context import CONTEXTS
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request
from lopa_dist.models.quantize import QuantizedLinear
from lopa_dist.parallel.communicator import Solo
from lopa_dist.staging import to_device


def speed(device: torch.device) -> Iterator[Fact]:
    """Yield the times of steps: in bf16, with a profile; of a causal model; and in fp8, with exact and with fast sums.

    On a CPU the steps run, but are not timed.
    """
    gpu = device.type == "cuda"
    weights = Weights(device)
    prompt, length = (1024, 64) if gpu else (12, 32)
    dual: dict[str, Any] = {"context": "dual", "max_active_blocks": CONTEXTS["dual"].max_active_blocks}
    default = DecodeConfig(max_new_tokens=length, stop_at_eos=False, **dual)
    lookahead = replace(default, branches=7, verify="confidence", drafts=0)
    one_by_one = DecodeConfig(context="causal", branches=0, drafts=0, max_new_tokens=length, stop_at_eos=False)
    auto = replace(one_by_one, drafts="auto")

    def in_fp8(sequences: int, fast: bool) -> dict[str, Any]:
        with patch.object(QuantizedLinear, "fast", fast):
            return run(default, sequences)

    def run(
        decode: DecodeConfig,
        sequences: int,
        around: AbstractContextManager[Any] | None = None,
        reproducible: bool = False,
    ) -> dict[str, Any]:
        options = EngineConfig(sequences, reproducible=reproducible)
        options = options if gpu else replace(options, attention="meta", graphs="always")
        engine = Engine(weights.model, decode, Solo(), options)
        requests = [Request(i, [7 + i] * prompt, length, i) for i in range(sequences)]  # prompts that share nothing
        began = time.perf_counter()
        engine.prepare(requests)
        prepared, marks = time.perf_counter() - began, [time.perf_counter()]
        exposed = Exposed(time.perf_counter, parts=True)
        exposed.watch(engine.statistics)
        engine.on_step = [lambda engine: marks.append(time.perf_counter())]
        with exposed.launches(), around or nullcontext():
            list(engine.generate(requests))
        times = [1e3 * (after - before) for before, after in pairwise(marks)]
        found: dict[str, Any] = {"steps": len(times), "rows": statistics.median(exposed.rows), "ms a step": None}
        if gpu:
            step, waited = statistics.median(times[len(times) // 4 :]), statistics.median(exposed.steps)
            host = {name: round(seconds, 4) for name, seconds in engine.statistics.seconds.items()}
            parts = {name: round(statistics.median(spent), 3) for name, spent in exposed.parts.items()}
            found |= {"ms a step": step, "exposed ms": waited, "exposed parts ms": parts}
            found |= {"prepare s": prepared, "host s": host}
            found |= {"measured": f"{step:.2f} ms a step, {waited:.2f} of them without a forward"}
            found |= {"reserved": torch.cuda.max_memory_reserved(device)}
        return found

    def profiled() -> dict[str, Any]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if gpu else []
        profile = torch.profiler.profile(activities=activities)
        run(default, 1, profile)
        order = "self_device_time_total" if gpu else "self_cpu_time_total"
        return {"table": profile.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=90)}

    yield "host", partial(host_costs, device)
    yield "model", Making(partial(weights.make, models(device)["Dream-7B"]))
    for sequences in (1, 64, 8, 16) if gpu else (1, 2):  # the most important figures come first
        yield f"default decoding, {sequences} sequences", partial(run, default, sequences)
    yield "LoPA k=7, 1 sequence", partial(run, lookahead, 1)
    yield "profile", profiled
    yield "causal model", Making(partial(weights.make, causal_model(device)))
    for sequences in (1, 64) if gpu else (1,):
        for name, decode in (("no drafts", one_by_one), ("auto", auto)):
            yield f"causal, {name}, {sequences} sequences", partial(run, decode, sequences)
        yield f"causal, reproducible, {sequences} sequences", partial(run, one_by_one, sequences, reproducible=True)
    if has_fp8(device):
        yield "masked model again", Making(partial(weights.make, models(device)["Dream-7B"]))
        yield "model in fp8", Making(weights.to_fp8)
        for sequences in (1, 64) if gpu else (1,):
            for fast in (False, True):
                how = "fast" if fast else "exact"
                yield f"fp8, {how} sums, {sequences} sequences", partial(in_fp8, sequences, fast)


def host_costs(device: torch.device) -> dict[str, Any]:
    """Return how many microseconds of the host's time small operations take, of which a step queues dozens."""
    number, other, array = torch.zeros(1, device=device), torch.ones(1, device=device), np.zeros(64, np.int64)
    operations: dict[str, Callable[[], Any]] = {
        "an operation": lambda: number.add_(other), "a copy on the device": lambda: number.copy_(other),
        "an array to the device": lambda: to_device(array, device),
    }  # fmt: skip
    gpu = device.type == "cuda"
    if gpu:
        event = torch.cuda.Event(enable_timing=True)
        operations |= {"an event": event.record, "a copy to the host": number.cpu}
    times = {}
    for name, operation in operations.items():
        for _ in range(100 if gpu else 1):  # the first ones take longer
            operation()
        if gpu:
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(100):
            operation()
        times[name] = round(1e4 * (time.perf_counter() - began), 2)
    return {"us": times if gpu else None}
