"""Meta-attention over tiles equals the oracle, reads nothing it may not, and is blind to its batch.

Without a GPU the kernels are interpreted, with small examples; with one the same tests run there.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lopa_dist.kernels.attention import Meta
from lopa_dist.kernels.dispatch import processors
from lopa_dist.kernels.meta_attention import (
    Launch,
    MetaPlan,
    attend_meta,
    attend_tiles_plain,
    launch_for,
    programs_for,
)
from lopa_dist.kernels.segment_attention import Segments, attend_plain
from lopa_dist.kernels.tiles import Capacity, Split, capacity, causal_tile_rows, tile, tile_rows_for
from lopa_dist.ragged import Ints
from tests.kernels.cross_compile import SHARED_LIMIT, Variant, compile_all
from tests.kernels.mixes import Mix, mixes, poisoned, subset, tensors

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KV_HEADS = 2
SMALL = Launch(columns=16, warps=4, stages=2)  # many steps over few columns
Cut = tuple[int, Split | None, bool]
CUTS = st.tuples(st.sampled_from([16, 32]), st.sampled_from([None, Split(12, 16), Split(9, 40)]), st.booleans())
few = settings(  # the interpreter is slow: few examples, and a failing one is not shrunk
    max_examples=3, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.reuse, Phase.generate]
)


SHORT = mixes(sequences=3, most_rows=20, most_cached=50)
BOUNDED = mixes(sequences=3, most_rows=20, most_cached=50, bounded=True)


def plan_for(
    mix: Mix,
    group: int,
    dim: int,
    cut: Cut,
    launch: Launch | None = SMALL,
    device: torch.device = DEVICE,
) -> MetaPlan:
    """A plan with some room to spare, filled; the first of `cut` is the height of the tile matrix."""
    height, split, stacked = cut
    rows = height // group
    tiles = tile(mix.segments, rows, split, stacked)
    room = Capacity(len(tiles.table) + 1, len(tiles.merges) + (split is not None), tiles.parts + 1)
    plan = MetaPlan(
        mix.rows + 3,
        room,
        KV_HEADS * group,
        KV_HEADS,
        dim,
        rows,
        mix.scratch,
        device,
        launch=launch,
        bounded=mix.segments.seen is not None,
    )
    plan.partials.results.fill_(torch.nan)
    plan.partials.lse.fill_(torch.nan)
    plan.fill(tiles)
    return plan


def meta(plan: MetaPlan, *qkv: Tensor) -> Tensor:
    return attend_meta(*(x.to(plan.table.device) for x in qkv), plan).cpu()


@pytest.mark.parametrize("group", [1, 2, 7])
@given(mix=st.one_of(mixes(), mixes(bounded=True)), cut=CUTS, seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_the_table_equals_the_oracle(group: int, mix: Mix, cut: Cut, seed: int) -> None:
    qkv = tensors(mix, KV_HEADS, group, 8, seed)
    plan = plan_for(mix, group, 8, cut, device=torch.device("cpu"))
    assert torch.allclose(attend_tiles_plain(*qkv, plan), attend_plain(*qkv, mix.segments), atol=2e-6)


@pytest.mark.parametrize(("group", "dim"), [(1, 16), (2, 48), (7, 32)])
@given(mix=st.one_of(SHORT, BOUNDED), cut=CUTS, seed=st.integers(0, 1000))
@few
def test_the_kernels_equal_the_oracle(group: int, dim: int, mix: Mix, cut: Cut, seed: int) -> None:
    qkv = tensors(mix, KV_HEADS, group, dim, seed)
    plan = plan_for(mix, group, dim, cut)
    assert torch.allclose(meta(plan, *qkv), attend_plain(*qkv, mix.segments), atol=3e-6)


@given(mix=mixes(sequences=3, most_rows=20, most_cached=50), cut=CUTS)
@few
def test_results_may_take_the_place_of_q(mix: Mix, cut: Cut) -> None:
    q, keys, values = tensors(mix, KV_HEADS, 2, 16)
    plan = plan_for(mix, 2, 16, cut)
    wanted, placed = meta(plan, q, keys, values), q.to(DEVICE, copy=True)
    attend_meta(placed, keys.to(DEVICE), values.to(DEVICE), plan, placed)
    seen = plan.hi[: len(q)].cpu() > 0
    assert torch.equal(placed.cpu()[: len(seen)][seen], wanted[: len(seen)][seen])


@pytest.mark.parametrize("bounded", [False, True])
@given(data=st.data())
@few
def test_without_graphs_a_long_context_is_split_too(bounded: bool, data: st.DataObject) -> None:
    """Into parts for as many programs as run at a time: one sequence would have one program for each K/V head."""
    mix = data.draw(BOUNDED if bounded else SHORT)
    q, keys, values = tensors(mix, KV_HEADS, 2, 16)
    whole, split = (Meta(KV_HEADS * 2, KV_HEADS, 16, 16, torch.device("cpu"), bounded) for _ in range(2))
    split.split = Split(8, 16, 8)
    plan = split.plan(mix.segments, mix.rows)
    cached = mix.segments.shared + (mix.segments.tail[1] if mix.segments.tail else 0)
    if len(cached) == 1 and cached[0] > 16:
        assert plan.capacity.parts > 1
    wanted = whole.attend(q, keys, values, whole.plan(mix.segments, mix.rows))
    assert torch.allclose(split.attend(q, keys, values, plan), wanted, atol=2e-6)


def test_on_a_gpu_a_plan_without_graphs_has_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lopa_dist.kernels.attention.split_for", lambda sequences, *_: Split(132 // sequences))
    assert Meta(16, 2, 128, 16, torch.device("cuda", 0)).split == Split(132, room=132)
    assert Meta(16, 2, 128, 16, torch.device("cpu")).split is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(mix=mixes(sequences=3, most_rows=20), split=st.sampled_from([None, Split(8, 32)]))
@few
def test_half_precision(dtype: torch.dtype, mix: Mix, split: Split | None) -> None:
    qkv = tuple(x.to(dtype) for x in tensors(mix, KV_HEADS, 4, 32))
    plan = plan_for(mix, 4, 32, (64, split, True), launch=None)
    wanted = attend_plain(*(x.float() for x in qkv), mix.segments)
    step = torch.finfo(dtype).eps
    assert torch.allclose(meta(plan, *qkv).float(), wanted, atol=2.5 * step, rtol=2.5 * step)


@given(mix=mixes(sequences=3, most_rows=20, most_cached=50), cut=CUTS)
@few
def test_poison_is_never_read(mix: Mix, cut: Cut) -> None:
    """NaN in rows of no segment, in slots that nobody sees, and (see `plan_for`) in the partial results."""
    qkv = tensors(mix, KV_HEADS, 2, 16)
    plan = plan_for(mix, 2, 16, cut)
    clean = meta(plan, *qkv)
    assert clean.isfinite().all()
    assert torch.equal(meta(plan, *poisoned(mix, *qkv)), clean)


@given(mix=mixes(sequences=3, most_rows=20, most_cached=50), cut=CUTS)
@few
def test_a_sequence_has_the_same_bits_alone(mix: Mix, cut: Cut) -> None:
    qkv = tensors(mix, KV_HEADS, 2, 16)
    together = meta(plan_for(mix, 2, 16, cut), *qkv)
    unit = np.array(mix.sequence) if cut[2] else np.arange(len(mix.sequence))  # without stacks, even a branch has
    for one in np.unique(unit):
        alone, rows = on_its_own(mix, unit == one)
        q, keys, values = (x.clone() for x in qkv)
        count = len(rows)
        q[:count] = q[rows]
        for pool in (keys, values):
            pool[mix.scratch : mix.scratch + count] = pool[mix.scratch + rows]
        assert torch.equal(meta(plan_for(alone, 2, 16, cut), q, keys, values)[:count], together[rows])


def on_its_own(mix: Mix, which: np.ndarray) -> tuple[Mix, np.ndarray]:
    """Some adjacent segments as a batch of their own, packed from row 0, and where their rows were."""
    segments = subset(mix.segments, which)
    first, count = int(segments.start[0]), int(segments.rows.sum())
    rows = np.arange(first, first + count)
    segments.start, segments.own_base = segments.start - first, segments.own_base - first
    none = np.zeros(mix.rows - count, np.int64)
    segments.hi = np.concatenate([segments.hi[rows], none])
    if segments.drafts is not None:
        depth, until = segments.drafts
        segments.drafts = np.concatenate([depth[rows], none]), torch.cat([until[rows], torch.from_numpy(none)])
    return Mix(segments, mix.rows, mix.slots, mix.scratch, [0] * len(segments.start)), rows


@given(mix=mixes(sequences=3, most_rows=20, most_cached=50), split=st.sampled_from([None, Split(9, 40)]))
@few
def test_stacks_agree_with_single_branches(mix: Mix, split: Split | None) -> None:
    qkv = tensors(mix, KV_HEADS, 2, 16)
    stacked, single = (meta(plan_for(mix, 2, 16, (32, split, how)), *qkv) for how in (True, False))
    assert torch.allclose(stacked, single, atol=2e-6)


@given(mix=mixes(sequences=3, window=SMALL.columns, most_cached=50))
@few
def test_bits_of_branches_of_whole_steps_do_not_depend_on_siblings(mix: Mix) -> None:
    """Windows of a multiple of the step's columns: each branch's columns fall into steps in the same way."""
    qkv = tensors(mix, KV_HEADS, 2, 16)
    stacked, single = (meta(plan_for(mix, 2, 16, (32, None, how)), *qkv) for how in (True, False))
    assert torch.equal(stacked, single)


@given(first=mixes(sequences=3, most_rows=20), second=mixes(sequences=2, most_rows=20))
@few
def test_a_plan_is_filled_anew_at_the_same_addresses(first: Mix, second: Mix) -> None:
    """As a CUDA graph needs it: rows beyond the second batch's keep what they held."""
    for mix in (first, second):
        mix.segments.own_base, mix.scratch = 400 + mix.segments.start, 400
        mix.slots = 400 + mix.rows
    rows = max(first.rows, second.rows)
    room = capacity(rows, 12, 8, Split(6, 32), 12, 110, 20)
    plan = MetaPlan(rows, room, KV_HEADS * 2, KV_HEADS, 16, 8, 400, DEVICE, launch=SMALL)
    addresses = [x.data_ptr() for x in (plan.counts, plan.lo, plan.hi, plan.until, plan.table, plan.merges)]
    for mix in (first, second):
        q, keys, values = tensors(mix, KV_HEADS, 2, 16)
        plan.fill(tile(mix.segments, 8, Split(6, 32)))
        out = torch.full(q.shape, 7.0, device=DEVICE)
        attend_meta(q.to(DEVICE), keys.to(DEVICE), values.to(DEVICE), plan, out)
        inside = torch.zeros(mix.rows, dtype=torch.bool)
        for start, count in zip(mix.segments.start, mix.segments.rows, strict=True):
            inside[start : start + count] = True
        assert torch.allclose(out.cpu()[inside], attend_plain(q, keys, values, mix.segments)[inside], atol=3e-6)
        assert (out.cpu()[~inside] == 7).all()
    assert addresses == [x.data_ptr() for x in (plan.counts, plan.lo, plan.hi, plan.until, plan.table, plan.merges)]


def test_q_of_a_fused_projection_and_layers_of_a_pool() -> None:
    """Tensors as the model has them: slices with strides of their own."""
    mix = two_branches()
    qkv = torch.randn(mix.rows, 3, 4, 16, generator=torch.Generator().manual_seed(0))
    pool = torch.randn(2, 3, mix.slots, KV_HEADS, 16, generator=torch.Generator().manual_seed(1))
    plan = plan_for(mix, 2, 16, (32, None, True))
    q, keys, values = qkv[:, 1], pool[0, 1], pool[1, 1]
    assert torch.allclose(meta(plan, q, keys, values), attend_plain(q, keys, values, mix.segments), atol=3e-6)


def two_branches() -> Mix:
    """Two branches of 10 rows on 20 cached tokens."""
    start = np.array([0, 10])
    hi = np.concatenate([np.full(20, 10), np.zeros(12, np.int64)])
    segments = Segments(start, np.array([10, 10]), np.array([3, 3]), np.array([20, 20]), 30 + start, hi)
    return Mix(segments, 32, 62, 30, [0, 0])


def chains(sequences: int, cached: int, chain: int, group: int) -> Mix:
    """Steps of a causal model: chains, whose tokens are cached, and after all of them the groups of masks."""
    of = np.arange(sequences)
    rows = np.repeat([chain, group], sequences)
    start = np.cumsum(rows) - rows
    base = np.tile(of * (cached + 3), 2)
    scratch = sequences * (cached + 3)
    number, total = np.concatenate([np.arange(n) for n in rows]), int(rows.sum())
    in_chain = np.arange(total) < sequences * chain
    seen = np.where(in_chain, cached - chain + number + 1, cached)
    padding = np.zeros(-total % 16, np.int64)
    hi = np.concatenate([np.where(in_chain, 0, number + 1), padding])
    segments = Segments(
        start, rows, base, np.full(2 * sequences, cached), scratch + start, hi, None, np.concatenate([seen, padding])
    )
    return Mix(segments, len(hi), scratch + len(hi), scratch, [*of, *of])


@pytest.mark.parametrize("split", [None, Split(5, 16)])
def test_a_chain_and_the_group_after_it_in_one_tile(split: Split | None) -> None:
    """Right, also in parts, with more tiles than programs: the interpreted device has four processors."""
    mix = chains(11, 75, 4, 3)
    qkv = tensors(mix, KV_HEADS, 4, 16)
    plan = plan_for(mix, 4, 16, (32, split, True))
    assert int(plan.counts[0]) * KV_HEADS > programs_for(plan, torch.device("cpu"))
    assert (plan.table[: int(plan.counts[0]), 1] == 7).all()
    assert torch.allclose(meta(plan, *qkv), attend_plain(*qkv, mix.segments), atol=3e-6)


@pytest.mark.parametrize(("chain", "group"), [(1, 4), (5, 4), (9, 7)])
def test_a_shared_tile_changes_no_rows_bits(chain: int, group: int) -> None:
    """Whether a group follows a chain or not, and a chain precedes a group, in tiles of one height."""
    mix = chains(3, 150, chain, group)
    qkv = tensors(mix, KV_HEADS, 4, 16)
    cut: Cut = (64, None, False)
    together = plan_for(mix, 4, 16, cut)
    assert int(together.counts[0]) == 3
    found, inside = meta(together, *qkv), 3 * (chain + group)
    for which in (slice(0, 3), slice(3, 6)):
        one = subset(mix.segments, np.arange(6)[which])
        alone = plan_for(replace(mix, segments=one), 4, 16, cut)
        rows = slice(int(one.start[0]), int(one.start[0] + one.rows.sum()))
        assert rows.stop <= inside
        assert torch.equal(meta(alone, *qkv)[rows], found[rows])


@pytest.mark.no_gpu
def test_programs_of_a_causal_step_find_room_at_once() -> None:
    """Qwen3-8B, 64 sequences: there may be thousands of tiles, and there are 64 with 8 K/V heads."""
    rows = causal_tile_rows(4)
    for groups in (9, 17):  # that 8 drafts may have, and auto
        room = capacity(1152, 64 * (groups + 3), rows)
        plan = MetaPlan(1152, room, 32, 8, 128, rows, 0, torch.device("meta"), bounded=True)
        assert room.tiles * 8 > 5000
        assert programs_for(plan, torch.device("cpu")) == 2 * processors(torch.device("cpu")), "two each"
        masked = MetaPlan(1152, room, 32, 8, 128, rows, 0, torch.device("meta"))
        assert programs_for(masked, torch.device("cpu")) == room.tiles * 8


@pytest.mark.no_gpu
def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match="at most 128"):
        MetaPlan(16, Capacity(1, 0, 0), 4, 2, 256, 8, 0, cpu)
    with pytest.raises(ValueError, match="evenly"):
        MetaPlan(16, Capacity(1, 0, 0), 5, 2, 64, 8, 0, cpu)
    with pytest.raises(ValueError, match="tile_rows_for"):
        MetaPlan(16, Capacity(1, 0, 0), 4, 2, 64, 65, 0, cpu)
    mix = two_branches()
    tiles = tile(mix.segments, 8)
    with pytest.raises(ValueError, match="exceed"):
        MetaPlan(32, Capacity(2, 0, 0), 4, 2, 64, 8, 30, cpu).fill(tiles)
    with pytest.raises(ValueError, match="scratch at 30"):
        MetaPlan(32, Capacity(4, 0, 0), 4, 2, 64, 8, 31, cpu).fill(tiles)
    plan = MetaPlan(32, Capacity(4, 0, 0), 4, 2, 16, 8, 30, cpu)
    plan.fill(tiles)
    q, keys, values = tensors(mix, 2, 2, 16)
    with pytest.raises(ValueError, match="contiguous"):
        attend_meta(q.transpose(1, 2).contiguous().transpose(1, 2), keys, values, plan)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="choose engine"):
        attend_meta(q, keys, values, plan)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(RuntimeError, match="pip install triton"):
        attend_meta(q, keys, values, plan)


@few
@given(cached=st.integers(1, 50), rows=st.integers(1, 20), tail=st.integers(0, 20), seed=st.integers(0, 1000))
def test_a_row_has_the_same_bits_whether_what_it_sees_is_cached_or_of_this_forward(
    cached: int, rows: int, tail: int, seed: int
) -> None:
    """A causal model's drafts are verified in the pool as the chain, and in scratch as a branch beside it."""
    group, dim, total = 2, 16, 32
    torch.manual_seed(seed)
    q = torch.randn(total, KV_HEADS * group, dim)
    k, v = torch.randn(2, cached + tail + rows + total, KV_HEADS, dim)
    scratch = cached + tail + rows
    own = slice(cached + tail, scratch)
    for of in (k, v):  # of the same tokens: after the cached ones, and in scratch
        of[scratch : scratch + rows] = of[own]
    number, none = np.arange(rows), np.zeros(total, np.int64)
    before = cached + tail
    seen, hi = none.copy(), none.copy()

    def attend(cached_own: int, seen: Ints, hi: Ints) -> Tensor:
        """With `cached_own` of the rows' own tokens among the cached ones."""
        ranges = (np.array([cached]), np.array([tail + cached_own])) if tail else None
        shared = cached if tail else cached + cached_own
        one = Segments(
            np.array([0]),
            np.array([rows]),
            np.array([0]),
            np.array([shared]),
            np.array([scratch]),
            hi,
            ranges,
            seen,
        )
        mix = Mix(one, total, len(k), scratch, [0])
        return meta(plan_for(mix, group, dim, (16, None, False)), q, k, v)[:rows]

    seen[:rows] = before + number + 1
    chain = attend(rows, seen, none)
    seen, hi[:rows] = none.copy(), number + 1
    seen[:rows] = before
    assert torch.equal(attend(0, seen, hi), chain)


def variant(arch: int, group: int, height: int, dim: int = 128, dtype: str = "bf16", bounded: bool = False) -> Variant:
    """The attention kernel as `attend_meta` launches it."""
    torch_dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    dim_tile = max(16, 1 << (dim - 1).bit_length())
    launch = launch_for(height, dim_tile, torch_dtype, (arch // 10, arch % 10))
    pointers = dict.fromkeys(["q", "keys", "values", "out"], f"*{dtype}")
    pointers |= dict.fromkeys(["partial", "partial_lse"], "*fp32")
    pointers |= dict.fromkeys(["table", "seen", "lo", "hi", "depth", "until", "counts"], "*i32")
    strides = ["q_row", "q_head", "k_slot", "k_head", "v_slot", "v_head", "out_row", "out_head"]
    signature = {**pointers, "scratch": "i32", "scale": "fp32", **dict.fromkeys(strides, "i32")}
    constexprs = {
        "G": group, "KV_HEADS": 32 // group, "D": dim, "D_TILE": dim_tile, "BM": height, "BN": launch.columns,
        "STAGES": launch.stages, "BOUNDED": bounded, "WHOLE": True, "PRECISION": "ieee" if dtype == "fp32" else "tf32",
    }  # fmt: skip
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    kernel = "lopa_dist.kernels.meta_kernels:attend_kernel"
    return Variant(kernel, signature, constexprs, (*pointers, *strides), arch, options)


def merge_variant(arch: int) -> Variant:
    types = {"partial": "*fp32", "partial_lse": "*fp32", "out": "*bf16", "merges": "*i32", "counts": "*i32"}
    signature = {**types, "out_row": "i32", "out_head": "i32"}
    constexprs = {"G": 7, "KV_HEADS": 4, "D": 128, "D_TILE": 128, "BM": 128, "ROWS": 16}
    options = {"num_warps": 4}
    return Variant(
        "lopa_dist.kernels.meta_kernels:merge_kernel", signature, constexprs, tuple(signature), arch, options
    )


@pytest.mark.no_gpu
@pytest.mark.parametrize("arch", [80, 89, 90, 100, 120])
def test_cross_compiled(arch: int) -> None:
    """Tensor cores, loads that run ahead, no spills to speak of, and blocks that fit."""
    if arch == 90:
        variants = [variant(arch, group, height) for group, height in ((1, 128), (7, 128), (8, 64), (1, 32))]
        variants += [variant(arch, *sizes, bounded=True) for sizes in ((7, 128), (4, 64), (4, 128), (8, 64), (1, 64))]
        variants += [variant(arch, 2, 64, dim=48), variant(arch, 2, 16, dim=48, dtype="fp32"), merge_variant(arch)]
        variants += [variant(arch, 2, 128, dim=48, dtype="fp32"), variant(arch, 4, 128, dtype="fp32")]
    else:  # those that use most of a multiprocessor
        variants = [variant(arch, 7, 128), variant(arch, 8, 64), variant(arch, 7, 128, bounded=True)]
        variants += [variant(arch, 4, 64, bounded=True), variant(arch, 4, 128, dtype="fp32")]
    found = compile_all(variants)
    for one, kernel in zip(variants, found, strict=True):
        tall = one.signature.get("q") == "*fp32" and one.constexprs["BM"] >= 64  # without tensor cores: it spills
        assert kernel.stack <= (1088 if tall else 96), one
        assert kernel.shared <= SHARED_LIMIT[arch], one
    for one, kernel in zip(variants[:4], found[:4], strict=True):  # in bf16
        instruction = {90: "wgmma.mma_async", 100: "tcgen05.mma"}.get(arch, "mma.sync")
        assert (instruction if one.constexprs["BM"] >= 64 else "mma.sync") in kernel.ptx, one
        assert "cp.async" in kernel.ptx, one
    if arch == 90:
        # two blocks of 64 rows on one multiprocessor: 64 K registers, 228 KB of shared memory
        for kernel in (found[2], found[5], found[7], found[8]):
            assert kernel.registers * 128 * 2 <= 65536
            assert (kernel.shared + 1024) * 2 <= 228 * 1024


@pytest.mark.parametrize("group", [1, 2, 7, 8])
def test_the_usual_stacks_have_a_launch(group: int) -> None:
    for stack in (1, 32, 33, 128, 264):
        rows = tile_rows_for(group, stack)
        plan = MetaPlan(stack, capacity(stack, 1, rows), group, 1, 128, rows, 0, torch.device("cpu"))
        assert plan.height in (16, 32, 64, 128)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("border", [1, 16, 100, 149])
def test_a_prefix_in_one_range_or_two_gives_the_same_bits(border: int, bounded: bool) -> None:
    """Who computed a shared prefix has it in front of its own range, others elsewhere."""
    group, dim, rows, cached, slots, scratch = 4, 16, 3, 150, 600, 500
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(cached + rows, 1, dim, generator=generator) for _ in range(2))
    q = torch.randn(16, group, dim, generator=generator)

    def attend(first: int) -> Tensor:
        keys, values = torch.full((2, slots, 1, dim), torch.nan)
        for pool, x in ((keys, k), (values, v)):
            pool[10 : 10 + first], pool[300 : 300 + cached - first] = x[:first], x[first:cached]
            pool[scratch : scratch + rows] = x[cached:]
        one = np.array
        tail = (one([300]), one([cached - first])) if first < cached else None
        seen = np.full(rows, cached) if bounded else None
        segments = Segments(
            one([0]), one([rows]), one([10]), one([first]), one([scratch]), np.arange(1, rows + 1), tail, seen
        )
        tiles = tile(segments, 16, None, stacked=False)
        plan = MetaPlan(
            16, Capacity(len(tiles.table), 0, 0), group, 1, dim, 16, scratch, DEVICE, bounded=bounded, whole=False
        )
        plan.fill(tiles)
        return attend_meta(q.to(DEVICE), keys.to(DEVICE), values.to(DEVICE), plan)[:rows].cpu()

    assert torch.equal(attend(border), attend(cached))
