"""A graph is captured in the second run; where it cannot be, the current stream is what it was.

torch's own context managers run here, over a GPU that is made up.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.buckets import bucket
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request
from lopa_dist.engine.static_runner import CaptureError, Replay, StaticRunner, capture_stream
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo

GPU = torch.device("cuda:0")


class Stream:
    """A stream that only has a name."""

    def __init__(self, device: torch.device, name: str = "aside") -> None:
        self.device, self.name = device, name

    def wait_stream(self, other: Stream) -> None:
        Graph.calls.append(f"{self.name} waits for {other.name}")


class Graph:
    """A graph that knows whether it is being captured; ending a capture that was broken raises, as CUDA does."""

    calls: ClassVar[list[str]] = []
    broken = False

    def capture_begin(self, *_: object, **__: object) -> None:
        Graph.calls.append("begin")

    def capture_end(self) -> None:
        if Graph.broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        Graph.calls.append("end")

    def replay(self) -> None:
        Graph.calls.append("replay")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The current stream of a GPU that is not there."""
    here = Stream(GPU, "here")
    found = SimpleNamespace(here=here, current=here)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: found.current)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(found, "current", stream))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "_get_device_index", lambda *_: 0)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(Graph, "calls", [])
    monkeypatch.setattr(Graph, "broken", False)
    capture_stream.cache_clear()
    yield found
    capture_stream.cache_clear()


def test_run_then_captured_then_replayed(gpu: SimpleNamespace) -> None:
    streams, replay = [], Replay()
    for _ in range(4):
        replay(lambda: streams.append(gpu.current.name), GPU, None)
        assert gpu.current is gpu.here
    assert streams == ["aside", "aside"]
    assert Graph.calls == ["aside waits for here", "here waits for aside", "begin", "end", "replay", "replay", "replay"]


@pytest.mark.parametrize("invalidated", [False, True])
def test_a_capture_that_fails_leaves_the_stream_as_it_was(gpu: SimpleNamespace, invalidated: bool) -> None:
    def waits() -> None:
        if "begin" in Graph.calls:
            Graph.broken = invalidated
            raise ValueError("operation not permitted when stream is capturing")

    replay = Replay()
    replay(waits, GPU, None)
    for _ in range(2):  # and a second time
        with pytest.raises(RuntimeError, match=r"cuda:0 \(ValueError: operation not permitted.*engine\.graphs=never"):
            replay(waits, GPU, None)
        assert gpu.current is gpu.here
    assert replay.graph is None


class Buckets:
    """What `StaticRunner.replay` needs of its runner."""

    replay = StaticRunner.replay

    def __init__(self, insist: bool) -> None:
        self.device, self.memory, self.insist = GPU, "pool", insist
        self.uncaptured: set[str] = set()


def test_a_bucket_that_cannot_be_captured_runs_without_a_graph_and_that_is_said_once(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "another pool")
    ran: list[str] = []

    def waits() -> None:
        if Graph.calls[-1] == "begin":
            raise ValueError("operation not permitted when stream is capturing")
        ran.append(gpu.current.name)

    buckets, replays = Buckets(insist=False), (Replay(), Replay())
    for _ in range(4):
        for size, replay in zip((32, 64), replays, strict=True):
            buckets.replay(replay, waits, size, "transformer")
    assert ran == 2 * ["aside"] + 6 * ["here"]
    assert Graph.calls.count("begin") == 1, "after the first, none of its kind is tried"
    assert buckets.memory == "another pool"
    [said] = [record.getMessage() for record in caplog.records]
    assert "the transformer runs without further CUDA graphs, and so slower: the graph for 32 rows could not" in said
    assert "operation not permitted" in said
    good = Replay()
    for _ in range(3):
        buckets.replay(good, lambda: None, 96, "record head")
    assert Graph.calls[-2:] == ["replay", "replay"]


def test_with_graphs_always_a_capture_that_fails_ends_the_job(gpu: SimpleNamespace) -> None:
    def waits() -> None:
        if Graph.calls[-1] == "begin":
            raise ValueError("operation not permitted when stream is capturing")

    buckets, replay = Buckets(insist=True), Replay()
    buckets.replay(replay, waits, 32, "transformer")
    with pytest.raises(CaptureError, match=r"engine\.graphs=never"):
        buckets.replay(replay, waits, 32, "transformer")


def test_a_capture_that_cannot_end(gpu: SimpleNamespace) -> None:
    replay = Replay()
    replay(lambda: None, GPU, None)
    Graph.broken = True
    with pytest.raises(RuntimeError, match=r"RuntimeError: operation failed due to a previous error"):
        replay(lambda: None, GPU, None)
    assert gpu.current is gpu.here


def test_a_first_run_that_fails_is_waited_for(gpu: SimpleNamespace) -> None:
    def fails() -> None:
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        Replay()(fails, GPU, None)
    assert gpu.current is gpu.here
    assert Graph.calls[-1] == "here waits for aside"


@pytest.mark.parametrize("broken", [None, "bodies", "heads"])
def test_the_smallest_graph_is_a_probe_for_its_kind(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    """One that fails keeps its memory, so no larger one may be tried."""
    options = EngineConfig(attention="meta", graphs="always", max_rows=128)
    engine = Engine(small_model, DecodeConfig(context="d2f", max_new_tokens=32), Solo(), options)
    runner = engine.prepare([Request(0, [1, 2, 3], 32, 7)]).runner
    assert isinstance(runner, StaticRunner)
    runner.insist = False
    runs: list[tuple[str, int, bool]] = []

    def run(graph: Replay, *_: object) -> None:
        kind = next(k for k in ("bodies", "heads") if graph in [one.replay for one in getattr(runner, k).values()])
        size = next(size for size, one in getattr(runner, kind).items() if one.replay is graph)
        captures = graph.warm and graph.capture
        runs.append((kind, size, captures))
        graph.warm = True
        if captures and kind == broken:
            raise CaptureError("no")

    monkeypatch.setattr(Replay, "__call__", run)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "another pool")
    caplog.set_level("INFO", logger="lopa_dist")
    runner.usual = runner.usual_heads = 128
    runner.warm_up()
    for kind in ("bodies", "heads"):
        captured = [size for of, size, captures in runs if captures and of == kind]
        assert captured == ([32] if kind == broken else [32, 128, 96, 64])
        assert {size for of, size, _ in runs if of == kind} == {32, 64, 96, 128}, "kernels are compiled all the same"
    said = [record.getMessage() for record in caplog.records]
    assert sum("without further CUDA graphs" in line for line in said) == (broken is not None)
    assert "of 4 sizes" in said[0]
    assert said[-1].startswith("captured 0 CUDA graphs of 8 (first runs ")
    assert len(said) == 2 + (broken is not None)


def test_few_rows_have_predictions_and_so_few_heads_are_captured(small_model: Transformer) -> None:
    options = EngineConfig(4, attention="meta", graphs="always")
    config = DecodeConfig(branches=3, verify="confidence", drafts=0, block_size=8, max_active_blocks=1)
    requests = [Request(i, [1] * 400, 32, 7) for i in range(4)]
    runner = Engine(small_model, config, Solo(), options).prepare(requests).runner
    assert isinstance(runner, StaticRunner)
    with torch.inference_mode():
        runner.warm_up()
    assert max(runner.heads) == bucket(4 * 4 * 2 * 8) == 256
    assert max(runner.bodies) > 1024
    assert len(runner.heads) == 8
