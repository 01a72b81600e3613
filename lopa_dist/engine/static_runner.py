"""One forward as two CUDA graphs over fixed buffers: the transformer by rows, the record head by masked rows.

A graph freezes sizes and addresses. So sizes come from a ladder of buckets, and whatever changes from step to step
lies in buffers at fixed addresses: tokens, positions, attention tiles, and how many of the rows count. Rows added to
fill a bucket (virtual padding) write no K/V, and are in no tile and no result; they may hold anything, NaN included
(tests). Steps too large for the ladder run without graphs: `Runner.run` runs them, or, if the network has
`real_rows_only`, the same functions over larger buffers.

On a CPU the "graphs" are the functions themselves, over the same buffers, so tests reach everything except the capture.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lopa_dist.engine.buckets import TOP, bucket, buffered, hidden_rows, ladder
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.memory import short_of_memory
from lopa_dist.engine.runner import Prepared, Runner, Running
from lopa_dist.kernels.attention import Meta, attend_tiles
from lopa_dist.kernels.dispatch import by_torch, on_device
from lopa_dist.kernels.meta_attention import MetaPlan, Partials, split_for
from lopa_dist.kernels.record_head import record_head
from lopa_dist.kernels.tiles import Capacity, KeptTiles, Tiles, capacity, matrix_rows, tile
from lopa_dist.models.fused import AttendCached, Cache
from lopa_dist.ragged import Ints, padded
from lopa_dist.rows.forward_batch import ForwardBatch, Predictions

log = logging.getLogger("lopa_dist")

TRANSFORMER, HEAD = "transformer", "record head"  # kinds of graphs


def probe_first(sizes: list[int]) -> list[int]:
    """Return ascending sizes in the order in which they are captured: the smallest, then from the largest down."""
    smallest, *others = sizes
    return [smallest, *others[::-1]]


class CaptureError(RuntimeError):
    """A function could not be captured as a graph."""


class Replay:
    """A function over fixed buffers: on a GPU a captured graph from its second run on, elsewhere itself.

    The first run, on the stream that captures later, compiles kernels and makes workspaces, which a capture must not.
    A size that comes only once, like most prefills', costs no capture. The function is passed in at every run: storing
    it would make a reference cycle with the runner, which holds graphs and K/V until Python collects its garbage.
    """

    def __init__(self) -> None:
        self.warm = False
        self.capture = True  # whether to try
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, function: Callable[[], None], device: torch.device, memory: Any) -> None:
        """Run `function`, or its captured graph.

        Raises:
            CaptureError: from `captured`; nothing was run.
        """
        if self.graph is not None:
            self.graph.replay()
        elif device.type != "cuda" or (self.warm and not self.capture):
            function()
        elif not self.warm:
            aside, here = capture_stream(device), torch.cuda.current_stream(device)
            aside.wait_stream(here)
            try:
                with torch.cuda.stream(aside):
                    function()
            finally:
                here.wait_stream(aside)  # whatever was queued before an error, too
            self.warm = True
        else:
            self.graph = captured(function, device, memory)
            self.graph.replay()


def captured(function: Callable[[], None], device: torch.device, memory: Any) -> torch.cuda.CUDAGraph:
    """Return the function captured as a graph, with its memory in the pool `memory`; None: in a pool of its own.

    Raises:
        CaptureError: the function raised, or did what no graph can hold. The current stream is restored, so the
            function may run without a graph.
    """
    graph, stream = torch.cuda.CUDAGraph(), capture_stream(device)
    try:
        # thread_local: other threads (heartbeat, logging) may call CUDA meanwhile
        capture = torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local")
        with torch.cuda.stream(stream), capture:  # torch's own capture does not restore the stream if it fails
            function()
    except Exception as error:
        cause = error.__context__ or error  # ending a broken capture raises once more
        raise CaptureError(
            f"no CUDA graph could be captured on {device} ({type(cause).__name__}: {cause}); engine.graphs=never does "
            "without graphs"
        ) from error
    return graph


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream for captures: cuBLAS holds a workspace for every stream that it ever saw."""
    return torch.cuda.Stream(device)


class Body:
    """The transformer over `size` packed rows: its buffers and its graph."""

    def __init__(self, size: int, runner: StaticRunner) -> None:
        device = runner.device
        self.tokens = torch.zeros(size, dtype=torch.long, device=device)
        self.positions = torch.zeros(size, dtype=torch.long, device=device)
        self.rows = torch.zeros(1, dtype=torch.int32, device=device)
        self.must_be_finite = torch.zeros(size, dtype=torch.bool, device=device) if runner.may_overflow else None
        self.kv_slots = runner.pool.scratch + torch.arange(size, device=device) if runner.in_place else None
        self.hidden = runner.hidden[:size]
        self.plan = runner.attention_plan(size)
        self.replay = Replay()

    def load(self, prepared: Prepared) -> None:
        """Copy the step's inputs into the buffers."""
        batch, count = prepared.batch, len(prepared.batch.tokens)
        self.tokens[:count], self.positions[:count] = batch.tokens, batch.positions
        self.rows.fill_(len(batch.table.hi))
        if self.must_be_finite is not None:
            self.must_be_finite.zero_()
            if prepared.must_be_finite is not None:
                self.must_be_finite[:count] = prepared.must_be_finite
        if self.kv_slots is not None and prepared.kv_slots is not None:
            self.kv_slots[:count] = prepared.kv_slots
        assert isinstance(prepared.plan, Tiles)
        self.plan.fill(prepared.plan)

    def run(self, runner: StaticRunner) -> None:
        """Compute the hidden states into `hidden`."""
        pool = runner.pool

        attend = runner.attend_by(self.plan)
        cache = Cache(pool.keys, pool.values, pool.scratch, self.must_be_finite, self.kv_slots)
        rope = runner.rope(self.positions)
        self.hidden.copy_(runner.network(self.tokens, self.positions, self.rows, cache, attend, rope=rope))


class Head:
    """The record head over `size` masked rows."""

    def __init__(self, size: int, runner: StaticRunner) -> None:
        device = runner.device
        self.which = torch.zeros(size, dtype=torch.long, device=device)
        self.keys = torch.zeros(size, dtype=torch.long, device=device) if runner.sampling.temperature > 0 else None
        self.rows = torch.zeros(1, dtype=torch.int32, device=device)
        self.records = torch.zeros(size, runner.record_size, dtype=torch.int32, device=device)
        self.replay = Replay()

    def load(self, predictions: Predictions) -> None:
        """Copy the step's inputs into the buffers; rows after them keep old ones, and their records are not read."""
        count = len(predictions.rows)
        self.which[:count] = predictions.rows
        self.rows.fill_(count)
        if self.keys is not None and predictions.keys is not None:
            self.keys[:count] = predictions.keys

    def run(self, runner: StaticRunner) -> None:
        """Compute the records into `records`."""
        model = runner.model
        hidden = runner.hidden[self.which]
        made = record_head(
            hidden,
            model.head_weight,
            model.config.mask_id,
            self.keys,
            runner.sampling,
            runner.shard,
            self.rows,
            runner.second_choices,
        )
        self.records.copy_(made)


class StepSizes(NamedTuple):
    """How large steps are, for buffers and tables of tiles."""

    sequences: int  # at most
    segments: int  # of a sequence at most, without its prompt's
    rows: int  # the most that a step usually has
    predictions: int  # the most that a step usually makes


class StaticRunner(Runner):
    """The runner of one device that has the whole model.

    The pool gets scratch for the rows now, because graphs hold addresses, and a pool that grows invalidates them all.

    Args:
        running: with meta-attention.
        pool: of K/V.
        sizes: of steps.
        stacked: if false, attention's tiles depend only on their own segment.
        insist: raise an error if a bucket cannot be captured; otherwise, no further graph of its kind is captured.
    """

    def __init__(self, running: Running, pool: KVPool, sizes: StepSizes, stacked: bool, insist: bool) -> None:
        super().__init__(running, pool)
        assert isinstance(running.attention, Meta)
        self.tile_rows, self.in_place = running.attention.tile_rows, running.attention.bounded
        self.insist = insist
        self.uncaptured: set[str] = set()  # kinds of graphs of which a capture failed
        # a prompt has at most two stacks
        self.stacks, self.longest = sizes.sequences * (sizes.segments + 2), running.longest
        # stacks that may see cached tokens: two per sequence, its prompt's rest and its branches
        self.low = sizes.sequences * 2
        config, rows = self.model.config, sizes.rows
        self.stacked = stacked
        self.kept_tiles = KeptTiles()
        height = matrix_rows(self.tile_rows, config.heads // config.kv_heads)
        split = split_for(sizes.sequences, config.kv_heads, height, self.device) if stacked else None
        self.split = split and replace(split, room=self.low * split.parts)
        # shared by all attention plans, which run one after the other
        self.partials = Partials.empty(
            self.attention_room(max(TOP, self.longest)).parts, config.kv_heads, height, config.head_dim, self.device
        )
        self.bodies: dict[int, Body] = {}
        self.heads: dict[int, Head] = {}
        most = bucket(rows) or padded(rows)
        self.make_room(hidden_rows(rows, self.network.real_rows_only))
        self.usual, self.usual_heads = min(most, TOP), min(bucket(sizes.predictions) or TOP, most, TOP)
        pool.reserve(most, most)
        self.address = pool.keys.data_ptr()
        self.forget()

    def make_room(self, rows: int) -> None:
        """Make the buffer of hidden states: `rows` rows, and after them the stored ones."""
        self.hidden = torch.cat([self.prefix_hidden.new_zeros(rows, self.prefix_hidden.shape[1]), self.prefix_hidden])
        self.room, self.prefix_hidden = rows, self.hidden[rows:]

    def forget(self) -> None:
        """Drop the captured graphs, whose addresses are no longer valid, and with them their memory pool."""
        self.bodies.clear()
        self.heads.clear()
        self.memory = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def warm_up(self) -> None:
        """Compile kernels and capture the graphs of all usual sizes.

        The smallest size comes first: if it cannot be captured, no other is tried, and a failed capture holds little
        memory. Then large sizes come before small ones, which fit into their memory. Each graph needs two runs. No row
        counts in these, so they write nothing that is read.
        """
        sizes = probe_first(ladder(self.usual))
        heads = [] if self.sampling.filtered else probe_first(ladder(self.usual_heads))
        log.info(
            "compiling kernels and capturing CUDA graphs of %d sizes: the first time takes longest",
            len({*sizes, *heads}),
        )
        seconds = [0.0, 0.0]
        try:
            with by_torch(self.plain), on_device(self.device):
                for size in sizes:
                    body = self.bodies[size] = Body(size, self)
                    self.make(body.replay, partial(body.run, self), size, TRANSFORMER, seconds)
                for size in heads:
                    head = self.heads[size] = Head(size, self)
                    self.make(head.replay, partial(head.run, self), size, HEAD, seconds)
        except torch.OutOfMemoryError as error:
            raise short_of_memory(error) from error
        made = [one.replay for of_kind in (self.bodies, self.heads) for one in of_kind.values()]
        graphs = sum(one.graph is not None for one in made)
        held = torch.cuda.max_memory_reserved(self.device) / 2**30 if self.device.type == "cuda" else 0.0
        log.info(
            "captured %d CUDA graphs of %d (first runs %.1f s, captures %.1f s; %.1f GiB reserved by now)",
            graphs, len(made), *seconds, held,
        )  # fmt: skip

    def make(self, graph: Replay, function: Callable[[], None], size: int, kind: str, seconds: list[float]) -> None:
        """Run a bucket's function for the first time, then capture it; add what each takes to `seconds`."""
        for number in range(2):
            began = time.perf_counter()
            self.replay(graph, function, size, kind)
            seconds[number] += time.perf_counter() - began

    def prepare(self, batch: ForwardBatch, slots: Ints | None = None) -> Prepared:
        """Return the batch with the places of its K/V, and its attention cut into tiles; see `Runner.prepare`."""
        rows = len(batch.tokens)
        size = bucket(rows) or rows
        self.pool.reserve(size)
        room = self.buffered(rows) or 0
        if self.pool.keys.data_ptr() != self.address or self.room < room:
            self.forget()
            self.address = self.pool.keys.data_ptr()
        if self.room < room:
            self.make_room(room)
        segments = self.segments(batch, slots)
        tiles = tile(segments, self.tile_rows, self.split, self.stacked, self.kept_tiles)
        must_be_finite = batch.must_be_finite() if self.may_overflow else None
        return Prepared(batch, slots, tiles, must_be_finite, self.kv_slots(batch, slots))

    def buffered(self, rows: int) -> int | None:
        """Return how many rows the buffers of a step with `rows` rows have; None: `Runner.run` runs it without buffers.

        After the last layer's attention, `Runner.run` computes the wanted rows only, which saves more than a graph.
        """
        return buffered(rows, self.network.real_rows_only)

    def run(self, prepared: Prepared) -> Tensor:
        """Return what `Runner.run` does, but over buffers, with graphs, unless the step runs without (`buffered`)."""
        batch = prepared.batch
        if self.buffered(len(batch.tokens)) is None:
            return super().run(prepared)
        if len(batch.table.rows):  # first of all: the device has nothing to do until then
            self.body(prepared)
        records = batch.heads.no_records(self.record_size)
        flat = records.flatten(0, 1)
        if len(batch.table.rows):
            if (last := self.last_rows(batch)) is not None:
                self.prefix_hidden[last[1]] = self.hidden[last[0]]
            if self.request_sampling or self.sampling.filtered:
                self.write_records(prepared, self.hidden[batch.heads.predictions.rows], flat)
            elif len(batch.heads.slots):
                flat[batch.heads.slots] = self.head(batch)
        return records

    def body(self, prepared: Prepared) -> None:
        """Compute the hidden states of the packed rows into `hidden`."""
        rows = len(prepared.batch.tokens)
        size = bucket(rows)
        body = self.bodies.get(size or 0) or Body(size or rows, self)
        body.load(prepared)
        if size is None:  # above the ladder: launches cost next to nothing
            body.run(self)
            return
        self.bodies[size] = body
        self.replay(body.replay, partial(body.run, self), size, TRANSFORMER)

    def head(self, batch: ForwardBatch) -> Tensor:
        """Return the records ``[H, 3 or 5]`` of the rows whose predictions are wanted."""
        count = len(batch.heads.slots)
        size = bucket(count)
        head = self.heads.get(size or 0) or Head(size or count, self)
        head.load(batch.heads.predictions)
        if size is None:
            head.run(self)
        else:
            self.heads[size] = head
            self.replay(head.replay, partial(head.run, self), size, HEAD)
        return head.records[:count]

    def replay(self, graph: Replay, function: Callable[[], None], size: int, kind: str) -> None:
        """Run a bucket's function, as a graph if possible; after a failure no other graph of its `kind` is captured.

        Raises:
            CaptureError: it cannot be captured, and `insist` is set.
        """
        graph.capture = kind not in self.uncaptured
        try:
            graph(function, self.device, self.memory)
        except CaptureError as error:
            if self.insist:
                raise
            graph.capture = False
            self.uncaptured.add(kind)
            self.memory = torch.cuda.graph_pool_handle()  # the old one may still count as being captured into
            log.warning(
                "the %s runs without further CUDA graphs, and so slower: the graph for %d rows could not be captured: "
                "%s", kind, size, error,
            )  # fmt: skip
            graph(function, self.device, self.memory)

    def attend(self, prepared: Prepared) -> AttendCached:
        """Return the function that attends in a forward without a graph."""
        plan = self.attention_plan(len(prepared.batch.tokens))
        plan.fill(prepared.plan)
        return self.attend_by(plan)

    def attend_by(self, plan: MetaPlan) -> AttendCached:
        """Return the function that attends as a table of tiles describes."""
        pool = self.pool
        # results overwrite q: a tile reads only the rows that it writes, and rows in no tile need no clearing
        return lambda layer, q: attend_tiles(q, pool.keys[layer], pool.values[layer], plan, q)

    def attention_plan(self, size: int) -> MetaPlan:
        """Return a table of tiles for any batch of `size` rows."""
        config = self.model.config
        shape = config.heads, config.kv_heads, config.head_dim, self.tile_rows
        return MetaPlan(
            size,
            self.attention_room(size),
            *shape,
            self.pool.scratch,
            self.device,
            self.partials,
            bounded=self.in_place,
            whole=self.stacked,
        )

    def attention_room(self, size: int) -> Capacity:
        """Return how much room the tiles of any batch of `size` rows need."""
        own = min(size, self.longest)
        # a segment sees at most `longest` columns with its own rows, and its neighbour in a tile as many
        return capacity(size, self.stacks, self.tile_rows, self.split, self.low, self.longest - own, own)
