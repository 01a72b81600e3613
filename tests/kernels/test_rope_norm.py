"""Normalisation and rotary embedding against their formulas, element by element."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lopa_dist.kernels.rope import apply_rope, rope_table
from lopa_dist.kernels.rope_scaling import Llama3Scaling, QueryScaling, YarnScaling
from lopa_dist.kernels.rows import rms_norm


@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_rms_norm(eps: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 5, 24, generator=generator) * 0.3, torch.randn(24, generator=generator)
    out = rms_norm(x, weight, eps)
    for row, normed in zip(x.flatten(0, 1).tolist(), out.flatten(0, 1).tolist(), strict=True):
        scale = 1 / math.sqrt(sum(v * v for v in row) / 24 + eps)
        assert normed == pytest.approx([v * scale * w for v, w in zip(row, weight.tolist(), strict=True)], rel=1e-5)


def test_rms_norm_of_bf16_is_computed_in_fp32_and_scaled_after_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(64, 256, generator=generator) * 100).bfloat16()
    weight = torch.randn(256, generator=generator).bfloat16()
    out = rms_norm(x, weight, 1e-6)
    wide = x.double()
    normed = (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()).bfloat16()
    assert out.dtype == torch.bfloat16
    assert (out != normed * weight).double().mean() < 0.001  # fp32 against fp64 may round a few the other way
    assert torch.allclose(out.float(), (normed * weight).float(), rtol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 48, 192, 896])
def test_rms_norm_has_the_same_bits_with_and_without_gradients(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(48, size, generator=generator).to(dtype), torch.randn(size, generator=generator).to(dtype)
    with torch.inference_mode():
        without = rms_norm(x, weight, 1e-6)
    assert torch.equal(rms_norm(x, weight, 1e-6), without)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize(("head_dim", "theta"), [(8, 10_000.0), (16, 1_000_000.0)])
def test_rope_rotates_pairs_of_halves(head_dim: int, theta: float) -> None:
    positions = torch.tensor([0, 1, 7, 500, 3])
    x = torch.randn(5, 3, head_dim, generator=torch.Generator().manual_seed(0))
    out = apply_rope(x, *rope_table(positions, head_dim, theta, torch.float32))
    half = head_dim // 2
    for r, position in enumerate(positions.tolist()):
        for head in range(3):
            for i in range(half):
                turn = cmath.exp(1j * position * theta ** (-2 * i / head_dim))
                turned = complex(x[r, head, i], x[r, head, i + half]) * turn
                seen = complex(out[r, head, i], out[r, head, i + half])
                assert abs(seen - turned) < 2e-4


def test_rope_at_position_zero_changes_nothing_and_keeps_lengths() -> None:
    x = torch.randn(6, 2, 32, generator=torch.Generator().manual_seed(0))
    cos, sin = rope_table(torch.tensor([0, 0, 5, 90, 1000, 30_000]), 32, 10_000.0, torch.float32)
    assert cos.shape == sin.shape == (6, 1, 32)
    out = apply_rope(x, cos, sin)
    assert torch.equal(out[:2], x[:2])
    assert torch.allclose(out.norm(dim=-1), x.norm(dim=-1), rtol=1e-5)
    assert not torch.allclose(out[2:], x[2:], atol=0.1)


def test_rope_scores_depend_on_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 32, generator=generator)

    def score(m: int, n: int) -> float:
        turned = [
            apply_rope(x, *rope_table(torch.tensor([p]), 32, 10_000.0, torch.float32)) for x, p in ((q, m), (k, n))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-3)
    assert score(4, 9) == pytest.approx(score(0, 5), abs=1e-3)
    assert score(9, 4) != pytest.approx(score(9, 8), abs=1e-3)


def test_a_wide_table_rotates_in_fp32() -> None:
    x = torch.randn(200, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    table = rope_table(torch.arange(200) * 151, 64, 5e5, torch.float32)
    assert torch.equal(apply_rope(x, *table), apply_rope(x.float(), *table).bfloat16())
    assert not torch.equal(apply_rope(x, *table), apply_rope(x, *(part.bfloat16() for part in table)))


@pytest.mark.parametrize("scaling", [Llama3Scaling(8.0, 1.0, 4.0, 8192), Llama3Scaling(32.0, 1.0, 4.0, 8192)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama3_frequencies_are_those_of_transformers(scaling: Llama3Scaling, head_dim: int) -> None:
    """To the bit; there are some of each kind: kept, between, and divided."""
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 5e5, "factor": scaling.factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    )  # fmt: skip
    wanted, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / 5e5 ** (torch.arange(0, head_dim, 2) / head_dim)
    assert torch.equal(scaling(plain), wanted)
    kinds = [wanted == plain, (wanted - plain / scaling.factor).abs() < 1e-6 * wanted]
    assert all(kind.any() for kind in (*kinds, ~(kinds[0] | kinds[1])))
    cos, sin = rope_table(torch.tensor([9]), head_dim, 5e5, torch.float32, scaling)
    assert torch.equal(cos[0, 0], (9 * wanted).cos().repeat(2))
    assert torch.equal(sin[0, 0], torch.cat([-(9 * wanted).sin(), (9 * wanted).sin()]))


PUBLISHED = YarnScaling(1e6, 16.0, 32.0, 1.0, 16384)


@pytest.mark.parametrize("scaling", [PUBLISHED, PUBLISHED._replace(factor=0.25), YarnScaling(1e4, 4.0, 8.0, 8.0, 64)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_yarn_frequencies_are_those_of_transformers(scaling: YarnScaling, head_dim: int) -> None:
    """To the bit; where the two bounds differ, there are some of each kind: kept, between, and divided."""
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": scaling.theta, "factor": scaling.factor, "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": scaling.original_positions,
        },
    )  # fmt: skip
    wanted, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    assert factor == 1
    plain = 1 / scaling.theta ** (torch.arange(0, head_dim, 2) / head_dim)
    assert torch.equal(scaling(plain), wanted)
    if scaling.beta_fast != scaling.beta_slow:
        kinds = [wanted == plain, (wanted - plain / scaling.factor).abs() < 1e-6 * wanted]
        assert all(kind.any() for kind in (*kinds, ~(kinds[0] | kinds[1])))


def test_queries_grow_from_the_original_length_on() -> None:
    scale = QueryScaling(0.1, 16384)
    positions = torch.tensor([0, 16383, 16384, 32767, 32768, 262_143])
    assert scale(positions).tolist() == pytest.approx([1, 1, *(1 + 0.1 * math.log(n) for n in (2, 2, 3, 16))])
    assert scale(torch.arange(16384)).eq(1).all()


def test_rope_table_in_bf16_is_the_rounded_fp32_table() -> None:
    positions = torch.arange(0, 4000, 37)
    wide = rope_table(positions, 64, 1e6, torch.float32)
    narrow = rope_table(positions, 64, 1e6, torch.bfloat16)
    for a, b in zip(wide, narrow, strict=True):
        assert torch.equal(a.bfloat16(), b)
