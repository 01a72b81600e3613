"""A row's bits follow from what it sees: not from the rows beside it, nor from how its columns came to be there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lopa_dist.kernels.exact_attention import Room, attend_exact, in_order, plan
from lopa_dist.kernels.segment_attention import Segments, attend_plain
from lopa_dist.ragged import Ints, begins
from tests.bits import same_row_bits
from tests.kernels.mixes import Mix, mixes, rows_of, tensors

CPU, KV_HEADS = torch.device("cpu"), 2


def attend(segments: Segments, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    groups = plan(segments, len(q), q.shape[1], keys.shape[1], CPU)
    return attend_exact(q, keys, values, groups)


@pytest.mark.parametrize("group", [1, 3, 16])
@given(mix=mixes(bounded=True), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_equals_the_oracle(group: int, mix: Mix, seed: int) -> None:
    qkv = tensors(mix, KV_HEADS, group, 16, seed)
    assert torch.allclose(attend(mix.segments, *qkv), attend_plain(*qkv, mix.segments), atol=3e-6)


@same_row_bits
@given(first=st.integers(0, 150), count=st.integers(2, 40), cut=st.integers(0, 60), group=st.sampled_from([1, 2, 5]))
@settings(max_examples=60, deadline=None)
def test_a_row_has_the_same_bits_alone(first: int, count: int, cut: int, group: int) -> None:
    """Verified after others or run alone, and with its first tokens in a range of their own or not."""
    generator = torch.Generator().manual_seed(first)
    pool = torch.randn(2, 600, KV_HEADS, 16, generator=generator)
    keys, values = pool[0], pool[1]
    keys[400 : 400 + cut], values[400 : 400 + cut] = keys[100 : 100 + cut], values[100 : 100 + cut]
    q = torch.randn(48, KV_HEADS * group, 16, generator=generator)
    together = attend(rows_of(first, count, 100, cut, 400), q, keys, values)
    for row in {0, count // 2, count - 1}:
        alone = torch.zeros_like(q)
        alone[0] = q[row]
        found = attend(rows_of(first + row, 1, 100, 0, 0), alone, keys, values)
        assert torch.equal(found[0], together[row])


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40), st.integers(0, 40))
def test_zeros_after_a_sum_change_no_bit(values: list[float], zeros: int) -> None:
    short, long = torch.tensor([values]), torch.tensor([values + [0.0] * zeros])
    total = short.sum()
    found = in_order(short, [1] * len(values))
    assert torch.equal(found, in_order(long, [1] * (len(values) + zeros)))
    assert torch.allclose(found, total, atol=1e-2)


@given(firsts=st.lists(st.integers(0, 150), min_size=2, max_size=7), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_a_row_has_the_same_bits_beside_other_sequences(firsts: list[int], seed: int) -> None:
    """They reach fewer or more column tiles, have more rows, and ran in memory that others have used."""
    generator, room = torch.Generator().manual_seed(seed), Room()
    keys, values = torch.randn(2, 200 * len(firsts), KV_HEADS, 16, generator=generator)
    counts = np.arange(len(firsts)) * 3 % 11 + 1
    q = torch.randn(int(counts.sum()), KV_HEADS * 2, 16, generator=generator)
    parts = [rows_of(first, count, 200 * i, 0, 0) for i, (first, count) in enumerate(zip(firsts, counts, strict=True))]
    together = joined(parts)
    for _ in range(2):  # the second time in used memory
        found = attend_exact(q, keys, values, plan(together, len(q), KV_HEADS * 2, KV_HEADS, CPU), room)
        for part, start, count in zip(parts, together.start, counts, strict=True):
            assert torch.equal(found[start : start + count], attend(part, q[start : start + count], keys, values))


def joined(parts: list[Segments]) -> Segments:
    """Return the segments of several sequences, one after the other."""

    def of(name: str) -> Ints:
        return np.concatenate([getattr(part, name) for part in parts])

    rows = of("rows")
    tails = [part.tail for part in parts if part.tail]
    tail = np.concatenate([base for base, _ in tails]), np.concatenate([count for _, count in tails])
    return Segments(begins(rows), rows, of("shared_base"), of("shared"), of("own_base"), of("hi"), tail, of("seen"))


@given(
    first=st.integers(0, 100), drafts=st.integers(0, 12), masks=st.integers(1, 9), cut=st.integers(0, 40),
    group=st.sampled_from([1, 2, 5]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_masks_after_a_chain_change_none_of_its_bits(first: int, drafts: int, masks: int, cut: int, group: int) -> None:
    """They see what the chain sees, and themselves, so both are computed together."""
    generator = torch.Generator().manual_seed(first)
    keys, values = torch.randn(2, 600, KV_HEADS, 16, generator=generator)
    q = torch.randn(32, KV_HEADS * group, 16, generator=generator)
    count = drafts + 1
    chain = rows_of(first, count, 100, cut, 400)
    assert chain.tail is not None
    assert chain.seen is not None
    tail = chain.tail[0].repeat(2), chain.tail[1].repeat(2)
    both = Segments(
        np.array([0, count]), np.array([count, masks]), chain.shared_base.repeat(2), chain.shared.repeat(2),
        np.array([0, 500]), np.append(chain.hi, np.arange(masks) + 1), tail,
        np.append(chain.seen, np.full(masks, first + count)),
    )  # fmt: skip
    assert len(plan(both, len(q), KV_HEADS * group, KV_HEADS, CPU)) == 1
    found = attend(both, q, keys, values)
    assert torch.equal(found[:count], attend(chain, q, keys, values)[:count])
    assert torch.allclose(found, attend_plain(q, keys, values, both), atol=3e-6)


def test_columns_with_gaps_are_refused() -> None:
    segments = rows_of(4, 2, 100, 0, 0)
    segments.drafts = np.ones(2, np.int64), torch.ones(2)
    with pytest.raises(ValueError, match="without gaps"):
        plan(segments, 2, 2, 2, CPU)
