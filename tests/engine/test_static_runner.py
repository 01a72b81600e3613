"""The static path gives the eager path's text, whatever lies in padding and in slots that nothing points to."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lopa_dist.decode import DecodeConfig, HostState
from lopa_dist.engine import runner as runner_module
from lopa_dist.engine import static_runner
from lopa_dist.engine.buckets import TOP, bucket, ladder
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request, request_key
from lopa_dist.engine.runners import Runners
from lopa_dist.engine.running_batch import in_order
from lopa_dist.engine.static_runner import StaticRunner
from lopa_dist.kernels import meta_attention
from lopa_dist.kernels.attention import Meta
from lopa_dist.kernels.meta_attention import split_for
from lopa_dist.kernels.segment_attention import Segments
from lopa_dist.kernels.tiles import Split, Tiles, capacity, matrix_rows, tile, tile_rows_for
from lopa_dist.kernels.virtual_gemm import vgemm
from lopa_dist.models import fused
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.files import EMBEDDED
from lopa_dist.models.fused import FusedLayer, FusedTransformer
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo
from lopa_dist.ragged import Ints, ragged_arange
from lopa_dist.rows.share import Share
from tests.engine.naive import Texts, check_same
from tests.engine.ranks import on_ranks
from tests.engine.test_loop import BASE, random_requests, texts
from tests.engine.test_prefix_cache import prefixed, run
from tests.strategies import engine_configs


class NanPadding(FusedTransformer):
    """A network where rows that do not count are NaN from the first layer on."""

    def __init__(self, network: FusedTransformer) -> None:
        vars(self).update(vars(network))
        self.embedding = F.pad(network.embedding, (0, 0, 0, 1), value=torch.nan)

    def __call__(self, tokens: Tensor, positions: Tensor, rows: Tensor | None, *given: Any, **named: Any) -> Tensor:
        if rows is not None:  # a step above the ladder has no rows that do not count
            padding = torch.arange(len(tokens)) >= rows
            tokens = tokens.masked_fill(padding, len(self.embedding) - 1)
            positions = positions.masked_fill(padding, 500)
            named["rope"] = tuple(one.masked_fill(padding[:, None, None], torch.nan) for one in named["rope"])
        return super().__call__(tokens, positions, rows, *given, **named)


def read_again(config: DecodeConfig, host: HostState, slot: int) -> Ints:
    """Tokens of a sequence whose K/V its next steps read."""
    committed, prompt = int(host.committed[slot]), int(host.prompt[slot])
    anew = committed < 0 or (not config.scope.kv_is_final and committed < host.complete[slot])
    if anew or host.done[slot]:
        return np.arange(0)
    after = (host.limit + host.suffix)[slot] if config.scope.cache == "dual" else host.end[slot]
    return np.append(np.arange(prompt + committed), np.arange(prompt + host.end[slot], prompt + after))


def poison(engine: Engine) -> None:
    """NaN wherever no later step has business: padding, scratch, slots that are free or not yet written, old results.

    Left are the K/V that the running sequences have committed, and prefixes that are kept for later requests.
    """
    runner = engine.batch.runner
    assert isinstance(runner, StaticRunner)
    if not isinstance(runner.network, NanPadding):
        runner.network = NanPadding(runner.network)
    pool, host = runner.pool, engine.batch.state.to_host()
    unused, lost = (torch.ones(n, dtype=torch.bool) for n in (pool.keys.shape[1], len(runner.prefix_hidden)))
    for slot in pool.ranges:
        tokens = read_again(engine.config, host, slot)
        unused[pool.slots(np.full(len(tokens), slot), tokens)] = False
    for prefix in pool.prefixes.values():
        if prefix.stored:
            unused[prefix.begin : prefix.begin + prefix.tokens] = False
            lost[prefix.hidden_slot] = False
    pool.keys[:, unused] = torch.nan
    pool.values[:, unused] = torch.nan
    runner.hidden[: runner.room] = torch.nan
    runner.prefix_hidden[lost] = torch.nan
    runner.partials.results.fill_(torch.nan)
    runner.partials.lse.fill_(torch.nan)
    for head in runner.heads.values():
        head.records.fill_(-1)
        head.which.fill_(runner.room - 1)  # a row that no step here has


def static_run(
    model: Transformer,
    config: DecodeConfig,
    requests: list[Request],
    comm: Communicator | None = None,
    sequences: int = 4,
    observe: Callable[[StaticRunner], None] = lambda runner: None,
    **options: Any,
) -> tuple[Engine, Texts]:
    """The engine, and what it generates, where there is NaN before the first step and after every one."""

    def observed(engine: Engine) -> None:
        assert isinstance(engine.batch.runner, StaticRunner)
        observe(engine.batch.runner)
        poison(engine)

    def take(most: int) -> list[Request]:
        if not engine.batch.running:  # otherwise a step is under way
            poison(engine)
        return given_out(most)

    given_out = in_order(requests)
    settings = EngineConfig(sequences, attention="meta", graphs="always", **options)
    engine = Engine(model, config, comm or Solo(), settings, observed)
    return engine, {g.request.index: (g.tokens, g.forwards) for g in engine.generate(requests, take)}


def static_texts(
    model: Transformer, config: DecodeConfig, requests: list[Request], comm: Communicator | None = None, **options: Any
) -> Texts:
    return static_run(model, config, requests, comm, **options)[1]


@given(config=engine_configs(BASE), seed=st.integers(0, 10**6), temperature=st.sampled_from([0.0, 0.8]))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_same_text_as_the_eager_path_among_nan(
    small_model: Transformer, config: DecodeConfig, seed: int, temperature: float
) -> None:
    config = replace(config, temperature=temperature)
    requests = random_requests(seed, 5, config.max_new_tokens, config)
    static = static_texts(small_model, config, requests)
    check_same(small_model, config, requests, static, texts(small_model, config, requests))


@pytest.mark.parametrize("sequences", [1, 4])
@pytest.mark.parametrize("context", ["d2f", "blocks"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_prefixes_are_found_among_nan(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch,
    context: str, sequences: int, temperature: float,
) -> None:  # fmt: skip
    """K/V of prompts that begin alike, and hidden states of those that are alike, wait in the pool for who comes."""
    config = replace(BASE, context=context, temperature=temperature)
    requests = [replace(r, index=2 * r.index + i, key=r.key + i) for r in prefixed(1, 6) for i in range(2)]
    requests += [replace(r, index=12 + i, key=r.key + 2) for i, r in enumerate(requests[::-2])]  # the last are kept
    wanted = run(small_model, config, requests, "exact", max_sequences=sequences)
    recalled = []
    allocate = KVPool.allocate

    def observed(pool: KVPool, sequence: int, tokens: int, prefix: tuple[int, ...] = ()) -> bool:
        recalled.append(prefix in pool.prefixes and not pool.prefixes[prefix].ref_count)
        return allocate(pool, sequence, tokens, prefix)

    monkeypatch.setattr(KVPool, "allocate", observed)
    assert static_texts(small_model, config, requests, sequences=sequences) == wanted
    assert any(recalled)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_same_text_on_two_ranks_and_with_few_rows_a_step(small_model: Transformer, top_p: float) -> None:
    config = replace(BASE, temperature=0.7, top_p=top_p)
    requests = random_requests(3, 6, config.max_new_tokens)
    wanted = texts(small_model, config, requests)
    assert static_texts(small_model, config, requests, max_rows=40) == wanted
    for found in on_ranks(2, lambda comm: static_texts(small_model, config, requests, comm)):
        assert found == wanted


@pytest.fixture
def short_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bucket, of 32 rows."""
    monkeypatch.setattr("lopa_dist.engine.buckets.STEPS", ((32, 32),))
    monkeypatch.setattr("lopa_dist.engine.buckets.TOP", 32)


@pytest.mark.usefixtures("short_ladder")
@pytest.mark.parametrize("reproducible", [False, True])
def test_hidden_states_have_room_for_steps_over_buffers_alone(small_model: Transformer, reproducible: bool) -> None:
    """All steps above the ladder give the eager path's text; only products of real rows need buffers as large."""
    rooms: list[tuple[int, int]] = []

    def observe(runner: StaticRunner) -> None:
        rooms.append((runner.room, runner.pool.keys.shape[1] - runner.pool.scratch))

    requests = random_requests(5, 6, BASE.max_new_tokens)
    _, found = static_run(small_model, BASE, requests, observe=observe, reproducible=reproducible)
    assert found == texts(small_model, BASE, requests)
    assert all(scratch > 32 for _, scratch in rooms)
    assert all(room > 32 if reproducible else room == 32 for room, _ in rooms)


def test_tiles_in_parts_share_their_room(small_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where few sequences run, tiles are split along their columns."""
    monkeypatch.setattr(static_runner, "split_for", lambda sequences, *_: Split(132 // sequences, 16))
    requests = random_requests(11, 6, BASE.max_new_tokens)
    slow = replace(BASE, context="dual", tau_conf=0.95)  # with steps that finish no block
    for config in (BASE, replace(BASE, branches=7), slow):
        merges: list[int] = []

        def observe(runner: StaticRunner, merges: list[int] = merges) -> None:
            merges += [int(body.plan.counts[1]) for body in runner.bodies.values()]

        engine, found = static_run(small_model, config, requests, observe=observe)
        assert found == texts(small_model, config, requests)
        assert any(merges)
        runner = engine.batch.runner
        assert isinstance(runner, StaticRunner)
        plans = [body.plan for body in runner.bodies.values()] + [runner.attention_plan(3 * TOP)]
        assert {id(plan.partials) for plan in plans} == {id(runner.partials)}


@pytest.mark.parametrize("reproducible", [False, True])
def test_a_causal_step_reads_a_sequences_cached_tokens_once(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, reproducible: bool
) -> None:
    """The chain and the group after its end share a tile, wherever they see the same tokens and both fit."""
    steps: list[tuple[Segments, Tiles]] = []

    def cut(segments: Segments, *given: Any) -> Tiles:
        steps.append((segments, tile(segments, *given)))
        return steps[-1][1]

    monkeypatch.setattr(static_runner, "tile", cut)
    config = DecodeConfig(context="causal", branches=0, drafts=3, draft_from="masks", max_new_tokens=20)
    options = EngineConfig(3, attention="meta", graphs="always", reproducible=reproducible)
    list(Engine(small_model, config, Solo(), options).generate(random_requests(5, 6, 20)))
    shared = 0
    for segments, tiles in steps:
        of_steps = tiles.table[tiles.table[:, 1] > tiles.table[:, 10]]
        shared += len(of_steps)
        views = list(zip(segments.shared_base, segments.shared, (segments.hi[segments.start] == 0), strict=True))
        pairs = sum((base, length, True) in views for base, length, in_pool in views if not in_pool)
        assert len(of_steps) == pairs
    assert shared > len(steps) // 2, "most steps"


@given(
    windows=st.integers(1, 128), cached=st.integers(0, 5000), sequences=st.integers(1, 16),
    shape=st.sampled_from([(4, 7), (8, 4), (32, 1)]),
)  # fmt: skip
def test_programs_that_are_split_run_at_the_same_time(
    windows: int, cached: int, sequences: int, shape: tuple[int, int]
) -> None:
    """On a GPU of 132 multiprocessors, which hold one tile of 128 matrix rows each, or two lower ones."""
    kv_heads, group = shape
    tile_rows = tile_rows_for(group, windows)
    height = matrix_rows(tile_rows, group)
    split = split_for(sequences, kv_heads, height, torch.device("cpu"))
    numbers = np.arange(sequences)
    segments = Segments(
        numbers * windows, np.full(sequences, windows), numbers * cached, np.full(sequences, cached),
        sequences * cached + numbers * windows, np.full(sequences * windows, windows),
    )  # fmt: skip
    made = tile(segments, tile_rows, split)
    places = 132 * (1 if height == 128 else 2)
    if made.parts:
        assert len(made.table) * kv_heads <= places


@given(
    sequences=st.integers(1, 80), rows=st.integers(1, 40_000), longest=st.integers(1, 40_000),
    shape=st.sampled_from([(4, 7), (8, 4), (32, 1)]), branches=st.integers(1, 16),
)  # fmt: skip
def test_parts_take_little_memory(
    sequences: int, rows: int, longest: int, shape: tuple[int, int], branches: int
) -> None:
    """However long prompts are: of 7B models, on an H100."""
    kv_heads, group = shape
    height = tile_rows_for(group, 32 * branches)
    split = split_for(sequences, kv_heads, matrix_rows(height, group), torch.device("cpu"))
    room = capacity(rows, sequences * (branches + 2), height, split, 2 * sequences, longest, rows)
    assert room.parts * kv_heads * matrix_rows(height, group) * (128 + 1) * 4 < 36e6
    assert room.tiles * kv_heads <= kv_heads * (rows // height + sequences * (branches + 2)) + 4 * 132


def test_stacks_are_split_until_multiprocessors_of_this_gpu_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    room = {"cuda": 227 * 1024}
    monkeypatch.setattr(meta_attention, "processors", lambda device: 78)
    monkeypatch.setattr(meta_attention, "shared_memory", lambda device: room.get(device.type, 227 * 1024))
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert split_for(1, 4, 64, gpu) == Split(2 * 78 // 4)
    assert split_for(1, 4, 128, gpu) == Split(78 // 4)
    assert [split_for(n, 4, 64, gpu) for n in (19, 20)] == [Split(2), None]
    assert split_for(1, 4, 64, cpu) == Split(2 * 132 // 4)  # as on the GPU that it stands in for
    room["cuda"] = 99 * 1024  # of consumer cards, whose multiprocessors have room for one program
    assert split_for(1, 4, 64, gpu) == Split(78 // 4)


@pytest.mark.usefixtures("short_ladder")
def test_large_steps_leave_nothing_behind(small_model: Transformer) -> None:
    engine = Engine(small_model, replace(BASE, branches=3), Solo(), EngineConfig(4, attention="meta", graphs="always"))
    assert all(g.forwards for g in engine.generate(random_requests(5, 6, BASE.max_new_tokens)))
    runner = engine.batch.runner
    assert isinstance(runner, StaticRunner)
    assert set(runner.bodies) | set(runner.heads) <= {32}


@pytest.mark.parametrize("max_rows", [None, 64, 100])
@pytest.mark.parametrize(
    "options",
    [
        {"branches": 7},
        {"branches": 7, "max_active_blocks": 1},
        {"branches": 3, "context": "dual"},
        {"branches": 3, "context": "vanilla"},
    ],
    ids=str,
)
def test_the_pool_has_its_scratch_from_the_start(
    small_model: Transformer, options: dict[str, Any], max_rows: int | None
) -> None:
    """A pool that grew would lose its graphs, and be there twice for a moment."""
    addresses, sizes = set(), []

    def observe(engine: Engine) -> None:
        runner = engine.batch.runner
        assert isinstance(runner, StaticRunner)
        addresses.add(runner.pool.keys.data_ptr())
        sizes.append(sorted(runner.bodies))

    config = replace(BASE, block_size=8, tau_conf=0.95, tau_add=0.1, **options)  # few tokens at a time, many branches
    engine = Engine(small_model, config, Solo(), EngineConfig(5, max_rows, None, "meta", "always"), observe)
    assert len(list(engine.generate(random_requests(9, 10, config.max_new_tokens)))) == 10
    assert len(addresses) == 1
    assert all(set(before) <= set(after) for before, after in pairwise(sizes))
    assert len(sizes[-1]) > 1, "buckets of more than one size, or this test shows little"


def test_the_pool_grows_where_a_step_is_larger_than_any_should_be(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lopa_dist.engine.runners.usual_forward", lambda *_: 1)
    grown: list[int] = []
    make = KVPool.grow
    monkeypatch.setattr(KVPool, "grow", lambda pool, held, rows: grown.append(rows) or make(pool, held, rows))
    config = replace(BASE, branches=7)
    requests = random_requests(5, 6, BASE.max_new_tokens)
    assert static_texts(small_model, config, requests) == texts(small_model, config, requests)
    assert grown[:2] == [32, 32]
    assert len(grown) > 4


def test_ranks_share_out_the_branches(small_model: Transformer) -> None:
    """So a rank's tiles suit the stacks that it has, and its pool the rows that it writes."""
    options, config = EngineConfig(attention="meta", graphs="always"), replace(BASE, branches=7, block_size=8)
    alone, shared = (Runners(small_model, config, options, share=Share(0, ranks)) for ranks in (1, 8))
    assert alone.branches == 8 * shared.branches
    assert isinstance(alone.attention, Meta)
    assert isinstance(shared.attention, Meta)
    assert alone.attention.tile_rows > shared.attention.tile_rows


@pytest.mark.parametrize("options", [{"branches": 7}, {"context": "dual"}, {"context": "blocks"}], ids=str)
def test_reproducible_means_products_of_real_rows_and_tiles_of_one_segment(
    small_model: Transformer, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(BASE, tau_conf=0.95, tau_add=0.1, **options)  # few tokens at a time, many branches
    requests = prefixed(4, 8)
    multiplied, tiled = set(), []

    def multiply(x: Tensor, weight: Tensor, *rest: Tensor | None) -> Tensor:
        multiplied.add(weight.data_ptr())
        return vgemm(x, weight, *rest)

    monkeypatch.setattr(fused, "vgemm", multiply)

    def observe(engine: Engine) -> None:
        runner = engine.batch.runner
        assert isinstance(runner, StaticRunner)
        assert runner.partials.results.shape[0] == 0, "no parts of columns"
        poison(engine)

    def cut(segments: Segments, *given: Any) -> Tiles:
        tiles = tile(segments, *given)
        of = np.repeat(np.arange(len(segments.rows)), segments.rows)[np.argsort(ragged_rows(segments), kind="stable")]
        tiled.extend(len(set(of[q0 : q0 + n])) for q0, n in tiles.table[:, :2].tolist())
        return tiles

    monkeypatch.setattr(static_runner, "tile", cut)
    settings = EngineConfig(4, attention="meta", graphs="always", reproducible=True)
    engine = Engine(small_model, config, Solo(), settings, observe)
    found = {g.request.index: (g.tokens, g.forwards) for g in engine.generate(requests)}
    assert found == texts(small_model, config, requests)
    assert len(multiplied) == 4 * small_model.config.layers
    assert set(tiled) == {1}


def ragged_rows(segments: Segments) -> Ints:
    """Packed rows of all segments, in the segments' order."""
    return ragged_arange(segments.rows) + np.repeat(segments.start, segments.rows)


def test_kv_is_given_back_without_the_garbage_collector(small_model: Transformer) -> None:
    """Graphs and gigabytes of K/V hang on it: before a generation that needs more, and with the engine."""
    engine = Engine(small_model, BASE, Solo(), EngineConfig(4, attention="meta", graphs="always"))
    gc.disable()
    try:
        for count in (2, 3):
            list(engine.generate(random_requests(2, count, BASE.max_new_tokens)))
            pool, runner = weakref.ref(engine.batch.pool), weakref.ref(engine.batch.runner)
            engine.on_step = [lambda engine, pool=pool: pool() is None or pytest.fail("the last generation's K/V")]
            assert pool() is not None
        del engine
        assert pool() is runner() is None
    finally:
        gc.enable()


def test_graphs_are_refused_where_they_cannot_be_had(small_model: Transformer) -> None:
    with pytest.raises(ValueError, match=r"engine\.graphs=always: graphs need engine\.attention=meta"):
        Engine(small_model, BASE, Solo(), EngineConfig(2, attention="torch", graphs="always"))


@given(st.integers(0, TOP + 500))
def test_buckets_hold_their_rows_and_waste_little(rows: int) -> None:
    size = bucket(rows)
    if rows > TOP:
        assert size is None
        return
    assert size is not None
    assert size >= rows
    assert size % 16 == 0
    assert size in ladder()
    assert size - max(rows, 1) < max(32, rows / (8 if rows > 512 else 4))


@pytest.mark.parametrize(("rows", "size"), [(520, 576), (664, 704), (1024, 1024), (1025, 1152), (2048, 2048)])
def test_usual_steps_waste_less_than_an_eighth(rows: int, size: int) -> None:
    assert bucket(rows) == size


@pytest.mark.usefixtures("short_ladder")
def test_steps_above_the_ladder_run_their_own_rows_without_a_graph(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    feed_forward = FusedTransformer.feed_forward

    def noted(self: FusedTransformer, layer: FusedLayer, x: Tensor, count: Tensor | None) -> Tensor:
        rows.append(len(x))
        return feed_forward(self, layer, x, count)

    monkeypatch.setattr(FusedTransformer, "feed_forward", noted)
    requests = random_requests(11, 6, BASE.max_new_tokens)
    engine, found = static_run(small_model, BASE, requests)
    layers = small_model.config.layers
    forwards = [(rows[i], rows[i + layers - 1]) for i in range(0, len(rows), layers)]
    assert any(first > 32 and first % 32 for first, _ in forwards), "as many as there are"
    assert any(last < first for first, last in forwards if first > 32), "in the last layer the wanted ones"
    assert all(last == first for first, last in forwards if first <= 32)
    assert found == texts(small_model, BASE, requests)
    assert isinstance(engine.batch.runner, StaticRunner)
    assert max(engine.batch.runner.bodies, default=0) <= 32


@pytest.mark.parametrize("graphs", ["always", "never"])
def test_every_forward_runs_on_the_models_device(
    small_model: Transformer, monkeypatch: pytest.MonkeyPatch, graphs: str
) -> None:
    """Triton launches on the current device, which a program that uses the package need not have chosen."""
    current: list[torch.device] = []

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(runner_module, "on_device", on_device)
    seen = []
    heads = runner_module.record_head, static_runner.record_head
    for module, head in zip((runner_module, static_runner), heads, strict=True):
        monkeypatch.setattr(module, "record_head", lambda *given, head=head: seen.append([*current]) or head(*given))
    requests = random_requests(5, 3, BASE.max_new_tokens)
    assert texts(small_model, BASE, requests, attention="meta", graphs=graphs)
    assert seen
    assert all(devices == [torch.device("cpu")] for devices in seen)
    assert not current


@pytest.mark.parametrize(
    ("drafts", "branches", "prompt", "sequences"),
    [(8, 0, 300, 1), ("auto", 0, 600, 4), (4, 2, 1500, 1), (16, 0, 200, 1), (4, 1, 700, 2)],
)
def test_a_causal_model_with_few_sequences_has_room_for_its_parts(
    drafts: int | str, branches: int, prompt: int, sequences: int
) -> None:
    """Chains, groups and paths are stacks of their own, which all see cached tokens and may be split."""
    torch.manual_seed(0)
    shape = ModelConfig(
        family="idlm", vocab_size=64, hidden_size=32, layers=1, heads=32, kv_heads=8, head_dim=16, intermediate_size=32,
        rms_eps=1e-6, rope_theta=1e4, qkv_bias=False, tied=False, shift=True, mask_id=63, eos_ids=(62,), pad_id=62,
        max_positions=4096,
    )  # fmt: skip
    model = Transformer(shape).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    rng = random.Random(0)
    config = DecodeConfig(
        context="causal", drafts=drafts, branches=branches, draft_from="masks", max_new_tokens=24, stop_at_eos=False
    )
    requests = [
        Request(i, [rng.randrange(46) for _ in range(prompt)], 24, request_key(0, str(i))) for i in range(sequences)
    ]
    engine = Engine(model, config, Solo(), EngineConfig(sequences, attention="meta", graphs="always"))
    engine.lookahead.choice = engine.lookahead.choice._replace(groups=17)  # as drafts=auto may choose
    assert [len(one.tokens) for one in engine.generate(requests)] == [24] * sequences


def test_reproducible_runs_eight_bit_weights() -> None:
    model = load_model(EMBEDDED, torch.float32, torch.device("cpu"), quantization="int8")
    config = DecodeConfig(block_size=16, max_new_tokens=16)
    requests = random_requests(3, 3, 16)
    found = [
        {g.request.index: g.tokens for g in Engine(model, config, Solo(), options).generate(requests)}
        for options in (EngineConfig(2, attention="meta", graphs="always", reproducible=True), EngineConfig(1))
    ]
    assert found[0] == found[1]
