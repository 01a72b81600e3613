"""Segment attention with torch's own varlen_attn: a cascade of two or three calls, merged by log-sum-exp.

One call takes every stack of branches as a sequence against its cached tokens (one more against its tail), another one
every segment against its own window. varlen_attn wants the K/V of its sequences in ascending order. The ranges of a
pool are in any order, so the stacks are sorted by their range: query rows are moved, which are few, and cached K/V,
which are many, are read where they lie; `seqused_k` skips the gaps. Own K/V are read in place too, unless rows of a
segment see different columns (causal, block-causal, drafts): then runs of equal rows become sequences of their own, and
their K/V are gathered. That is cheap for blocks, and dear for causal prompts, where each row is a run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lopa_dist.kernels.segment_attention import Segments
from lopa_dist.kernels.tiles import stacks
from lopa_dist.ragged import Ints, ragged_arange

MOST_DIM = 256  # of a head

Varlen = Callable[..., Any]  # with the parameters and results of `torch.nn.attention.varlen.varlen_attn`


@dataclass
class Call:
    """One call: N sequences of query rows, each against one run of K/V."""

    rows: Tensor  # [n] query rows, by sequence
    cu_q: Tensor  # [N + 1] int32
    cu_k: Tensor  # [N + 1] int32
    used: Tensor  # [N] int32 K/V seen of each
    max_q: int
    max_k: int
    columns: Tensor | slice  # K/V slots that `cu_k` counts


def plan_varlen(segments: Segments, device: torch.device) -> list[Call]:
    """The calls of one forward; every layer uses them."""
    order, view, first = stacks(segments)
    start, rows = segments.start[order], segments.rows[order]
    height = np.add.reduceat(rows, first) if len(first) else rows
    base, cached, tail_base, tail = view[:, first]
    calls = [call(start[first], height, b, n, device) for b, n in ((base, cached), (tail_base, tail))]

    # runs of rows that see the same own columns
    row = ragged_arange(rows) + np.repeat(start, rows)
    hi = segments.hi[row]
    lo = np.zeros_like(hi) if segments.lo is None else segments.lo[row]
    changes = (np.diff(hi, prepend=-1) != 0) | (np.diff(lo, prepend=-1) != 0)
    begins = np.flatnonzero(changes | (ragged_arange(rows) == 0))
    run = np.diff(np.append(begins, len(row)))
    own = np.repeat(segments.own_base[order], rows) + lo
    calls.append(call(row[begins], run, own[begins], (hi - lo)[begins], device))
    return [one for one in calls if one is not None]


def call(start: Ints, rows: Ints, base: Ints, columns: Ints, device: torch.device) -> Call | None:
    """A call for runs of query rows against runs of pool slots; None where nothing is seen."""
    order = np.argsort(base, kind="stable")
    order = order[columns[order] > 0]  # what a sequence without K/V gives differs by kernel
    if not len(order):
        return None
    start, rows, base, columns = start[order], rows[order], base[order], columns[order]
    at: Ints | slice = slice(int(base[0]), int(base[-1] + columns[-1]))
    if (base[:-1] + columns[:-1] <= base[1:]).all():
        cu_k = np.append(base, base[-1] + columns[-1]) - base[0]
    else:
        at = ragged_arange(columns) + np.repeat(base, columns)
        cu_k = np.append(0, np.cumsum(columns))
    cu_q = np.append(0, np.cumsum(rows))
    whole = ragged_arange(rows) + np.repeat(start, rows)
    small = (cu_q, cu_k, columns)
    sent = torch.from_numpy(np.concatenate([part.astype(np.int32) for part in small])).to(device)
    sent_q, sent_k, used = sent.split([len(part) for part in small])
    found = at if isinstance(at, slice) else torch.from_numpy(at).to(device)
    return Call(torch.from_numpy(whole).to(device), sent_q, sent_k, used, int(rows.max()), int(columns.max()), found)


def attend_varlen(q: Tensor, keys: Tensor, values: Tensor, calls: list[Call], varlen: Varlen | None = None) -> Tensor:
    """As `attend_plain`, with `plan_varlen`'s calls.

    Args:
        q, keys, values: ``[R', H, D]`` and ``[slots, Hkv, D]``; half precision, as torch's kernels want it.
        calls: of the batch.
        varlen: instead of torch's function, see `varlen_function`.

    Raises:
        RuntimeError: this torch has no varlen_attn that will do.
    """
    from torch.nn.attention.varlen import AuxRequest

    varlen = varlen or varlen_function()
    result = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device)
    for one in calls:
        k, v = keys[one.columns], values[one.columns]
        found, found_lse = varlen(
            q[one.rows], k, v, one.cu_q, one.cu_k, one.max_q, one.max_k, return_aux=AuxRequest(lse=True),
            enable_gqa=True, seqused_k=one.used, num_splits=1,
        )  # fmt: skip
        # Documented as [T, H], made as [H, T] (so in torch 2.13's source): square ones are taken as they are made.
        if found_lse.shape == (q.shape[1], len(one.rows)):
            found_lse = found_lse.T
        before = lse[one.rows]
        merged = torch.logaddexp(before, found_lse)
        weighted = found * (found_lse - merged).exp()[..., None]
        result[one.rows] = result[one.rows] * (before - merged).exp()[..., None] + weighted
        lse[one.rows] = merged
    return result.to(q.dtype)


def takes(dim: int, dtype: torch.dtype) -> bool:
    """Whether torch's kernel, which is FlashAttention, has heads of `dim` numbers of `dtype`."""
    return dtype in (torch.float16, torch.bfloat16) and dim % 8 == 0 and dim <= MOST_DIM


def has_varlen() -> bool:
    """Whether this torch has what the cascade needs."""
    try:
        varlen_function()
    except RuntimeError:
        return False
    return True


def varlen_function() -> Varlen:
    """Torch's varlen_attn, where it can do what the cascade needs.

    Raises:
        RuntimeError: with the remedy.
    """
    remedy = "choose engine.attention=torch, or install torch 2.12 or newer"
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise RuntimeError(f"this torch has no varlen_attn: {remedy}") from error
    missing = {"return_aux", "enable_gqa", "seqused_k", "num_splits"} - set(inspect.signature(varlen_attn).parameters)
    if missing:
        raise RuntimeError(f"this torch's varlen_attn lacks {', '.join(sorted(missing))}: {remedy}")
    return varlen_attn
