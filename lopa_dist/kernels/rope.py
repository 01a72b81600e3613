"""Rotary position embedding (rotate-half), alone and together with all else between projection and attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_dist.kernels import native
from lopa_dist.kernels.dispatch import dense, fused, in_c
from lopa_dist.kernels.rope_scaling import Llama3Scaling, YarnScaling
from lopa_dist.kernels.rows import rms_norm
from lopa_dist.staging import every_row


def rope_table(
    positions: Tensor,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: Llama3Scaling | YarnScaling | None = None,
    rotated: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of ``positions [R]`` for `apply_rope`: two ``[R, 1, head_dim]``, of angles in fp32.

    The first half of the table of sines has -sin, the second half sin. The formula equals transformers' to the bit: at
    position 30,000, a difference in a frequency's last bit turns the angle by as much as bf16 rounds away.

    Args:
        positions: ``[R]``.
        head_dim: D, an even number.
        theta: the base of the frequencies.
        dtype: of the result.
        scaling: how frequencies are changed.
        rotated: number of dimensions that rotate, in the order of `rotated_first`; None: all.
    """
    turning = head_dim if rotated is None else rotated
    inverse = 1 / theta ** (torch.arange(0, turning, 2, device=positions.device, dtype=torch.float32) / turning)
    inverse = inverse if scaling is None else scaling(inverse)
    inverse = F.pad(inverse, (0, (head_dim - turning) // 2))
    angles = positions[:, None].float() * inverse  # [R, head_dim / 2]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]


def rotated_first(head_dim: int, rotated: int) -> Tensor:
    """Return an order of a head's dimensions, ``[D]``, in which both halves begin with dimensions that are rotated.

    A model may rotate only the first `rotated` dimensions of a head, as two halves. If its weights are in this order,
    one rotation of the whole head does the same, with an angle of 0 for the other dimensions. The products of q and k
    do not change.
    """
    turning, still = torch.arange(rotated).chunk(2), torch.arange(rotated, head_dim).chunk(2)
    return torch.cat([turning[0], still[0], turning[1], still[1]])


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x [R, heads, head_dim]`` rotated by the table's angles, in the table's dtype, then rounded to x's."""
    wide = x.to(cos.dtype)
    swapped = wide.roll(x.shape[-1] // 2, -1)  # the two halves swapped
    return (wide * cos).add_(swapped.mul_(sin)).to(x.dtype)


def rope_and_store(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    scratch: int,
    rows: Tensor | None,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-6,
    must_be_finite: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """Return rotated q, and write rotated k, and v, into the pool: all steps between projection and attention.

    Packed row r goes to slot ``scratch + r``, or to ``slots[r]``. Only the first `rows` rows are read, rotated and
    written; the others' q is undefined, and their slots stay as they are. q may be a view of a larger tensor.

    Args:
        qkv: ``[R, (H + 2 Hkv) * D]``, the q heads first, then k, then v. D is even.
        cos, sin: ``[R, 1, D]`` of `rope_table`, in qkv's dtype, or in fp32 to rotate in fp32.
        keys, values: ``[slots, Hkv, D]``, one layer of the pool; written.
        scratch: the pool's slot of the first packed row.
        rows: ``[1]`` int32 on qkv's device, how many rows are real; None: all.
        norms: ``[D]`` twice, weights of the norms of every head's q and k before the rotation (Qwen3); or None.
        eps: of these norms.
        must_be_finite: ``[R]`` bool, as in `without_overflow`; None: nothing is replaced.
        slots: ``[R]`` int64, all different among real rows; None: the slots from `scratch` on.

    Returns:
        q ``[R, H, D]``.
    """
    if fused(qkv, "rotation"):
        from lopa_dist.kernels import rope_triton

        if rows is None:
            rows = every_row(qkv)
        cos, sin = cos.flatten(1), sin.flatten(1)
        return rope_triton.rope_and_store(qkv, cos, sin, keys, values, scratch, rows, norms, eps, must_be_finite, slots)
    plain = rows is None and must_be_finite is None
    if plain and in_c(qkv, cos, keys, *(norms or ())) and dense(qkv, cos, sin, keys, values, *(norms or ())):
        return native.rotate_and_store(qkv, cos, sin, keys, values, scratch, norms, eps, slots)
    kv_heads, dim = keys.shape[1:]
    of_heads = qkv.view(qkv.shape[0], -1, dim)
    heads = of_heads.shape[1] - 2 * kv_heads
    qk, v = of_heads.narrow(1, 0, heads + kv_heads), of_heads.narrow(1, heads + kv_heads, kv_heads)
    if norms is not None:
        qk = torch.cat([rms_norm(qk[:, :heads], norms[0], eps), rms_norm(qk[:, heads:], norms[1], eps)], 1)
    qk = apply_rope(qk, cos, sin)
    q, k = qk.narrow(1, 0, heads), qk.narrow(1, heads, kv_heads)
    k, v = without_overflow(k, must_be_finite), without_overflow(v, must_be_finite)
    if rows is not None:
        k, v = k[: int(rows)], v[: int(rows)]
        slots = slots if slots is None else slots[: int(rows)]
    if slots is None:
        keys.narrow(0, scratch, k.shape[0]).copy_(k)
        values.narrow(0, scratch, v.shape[0]).copy_(v)
    else:
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)
    return q


def without_overflow(x: Tensor, must_be_finite: Tensor | None) -> Tensor:
    """Return K or V ``[R, heads, head_dim]``, with 0 for every value that is not finite in the rows after windows.

    The window's rows do not see these rows, most of which hold drafts. But attention gives unseen columns the weight 0,
    and 0 times infinity is NaN. Drafts later in the chain are verified with these zeros. If they are accepted, their
    tokens are part of the window in the next forward, in which infinities are not replaced.

    Args:
        x: K or V of packed rows.
        must_be_finite: ``[R]`` bool, true for rows after windows; None: nothing is replaced.
    """
    return x if must_be_finite is None else x.where(x.isfinite() | ~must_be_finite[:, None, None], 0)
