"""The cascade on varlen_attn equals the oracle and keeps to what varlen_attn documents.

varlen_attn has no CPU kernel: a stand-in with its parameters and results takes its place, and checks its arguments.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import varlen as torch_varlen

from lopa_dist.kernels.segment_attention import Segments, attend_plain
from lopa_dist.kernels.varlen_attention import attend_varlen, has_varlen, plan_varlen, varlen_function
from tests.kernels.mixes import Mix, mixes, poisoned, tensors

CPU = torch.device("cpu")
KV_HEADS, DIM = 2, 8


def stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: torch_varlen.AuxRequest,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    heads_first: bool = True,
) -> tuple[Tensor, Tensor]:
    assert seqused_k is not None
    assert cu_seq_q.dtype == cu_seq_k.dtype == seqused_k.dtype == torch.int32
    assert return_aux.lse
    assert enable_gqa
    assert num_splits == 1
    assert cu_seq_q[0] == cu_seq_k[0] == 0
    assert cu_seq_q[-1] == len(query)
    assert cu_seq_k[-1] == len(key)
    assert (cu_seq_q.diff() > 0).all()
    assert (seqused_k <= cu_seq_k.diff()).all()
    assert (cu_seq_q.diff().max(), seqused_k.max()) == (max_q, max_k)
    out, lse = torch.empty_like(query), torch.empty(query.shape[:2])
    repeat = query.shape[1] // key.shape[1]
    for n, used in enumerate(seqused_k.tolist()):
        rows, begin = slice(int(cu_seq_q[n]), int(cu_seq_q[n + 1])), int(cu_seq_k[n])
        k, v = (x[begin : begin + used].repeat_interleave(repeat, 1) for x in (key, value))
        scores = torch.einsum("rhd,chd->rhc", query[rows], k) * query.shape[2] ** -0.5
        out[rows], lse[rows] = torch.einsum("rhc,chd->rhd", scores.softmax(2), v), scores.logsumexp(2)
    return out, lse.T.contiguous() if heads_first else lse


def documented(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return stand_in(*args, **options, heads_first=False)


@pytest.mark.skipif(not has_varlen(), reason="varlen_attn of torch 2.11 lacks parameters")
def test_the_stand_in_has_torchs_parameters() -> None:
    theirs, ours = (list(inspect.signature(f).parameters) for f in (torch_varlen.varlen_attn, stand_in))
    assert ours == [*theirs, "heads_first"]


@pytest.mark.parametrize("group", [1, 2, 7])
@given(mix=mixes(), as_documented=st.booleans(), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_the_cascade_equals_the_oracle(group: int, mix: Mix, as_documented: bool, seed: int) -> None:
    qkv = tensors(mix, KV_HEADS, group, DIM, seed)
    calls = plan_varlen(mix.segments, CPU)
    square = any(len(call.rows) == KV_HEADS * group for call in calls)
    found = attend_varlen(*qkv, calls, documented if as_documented and not square else stand_in)
    assert torch.allclose(found, attend_plain(*qkv, mix.segments), atol=2e-6)


@given(mix=mixes())
@settings(max_examples=30, deadline=None)
def test_poison_is_never_read(mix: Mix) -> None:
    qkv = tensors(mix, KV_HEADS, 2, DIM)
    calls = plan_varlen(mix.segments, CPU)
    clean = attend_varlen(*qkv, calls, stand_in)
    assert torch.equal(attend_varlen(*poisoned(mix, *qkv), calls, stand_in), clean)


@given(mix=mixes())
@settings(max_examples=30, deadline=None)
def test_cached_tokens_are_read_where_they_lie(mix: Mix) -> None:
    """And so are own ones, unless the rows of a segment differ; a stack is one sequence."""
    segments = mix.segments
    *cached, own = plan_varlen(segments, CPU)
    sequences = {s for s, n in zip(mix.sequence, segments.shared, strict=True) if n}
    assert all(isinstance(call.columns, slice) for call in cached)
    if sequences:
        assert len(cached[0].used) == len(sequences)
    alike = all(
        (segments.hi[s : s + n] == segments.hi[s]).all() for s, n in zip(segments.start, segments.rows, strict=True)
    )
    assert isinstance(own.columns, slice) or not alike


def test_ranges_in_any_order_and_ranges_that_two_stacks_share() -> None:
    start = np.array([0, 5, 9])
    hi = np.repeat([5, 4, 6], [5, 4, 6])
    for base in ([20, 4, 40], [20, 4, 20]):
        segments = Segments(start, np.array([5, 4, 6]), np.array(base), np.array([9, 7, 9]), 60 + start, hi)
        mix = Mix(segments, 15, 75, 60, [0, 1, 2])
        qkv = tensors(mix, KV_HEADS, 2, DIM)
        found = attend_varlen(*qkv, plan_varlen(segments, CPU), stand_in)
        assert torch.allclose(found, attend_plain(*qkv, segments), atol=2e-6)


def test_torchs_function_is_found_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_varlen, "varlen_attn", stand_in)
    assert varlen_function() is stand_in

    def older(query: Tensor, return_aux: Any = None, enable_gqa: bool = False) -> None: ...

    monkeypatch.setattr(torch_varlen, "varlen_attn", older)
    with pytest.raises(RuntimeError, match="lacks num_splits, seqused_k: choose"):
        varlen_function()
    monkeypatch.delattr(torch_varlen, "varlen_attn")
    with pytest.raises(RuntimeError, match="install torch"):
        varlen_function()
