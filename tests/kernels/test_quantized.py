"""Eight-bit linears: bounds of what quantising loses, and the GPU's kernels against their plain forms.

Without a GPU the kernels are interpreted, and cross-compiled.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lopa_dist.kernels import quantized
from lopa_dist.kernels.quantized import (
    FP8,
    SMALLEST,
    fp8_linear,
    int8_linear,
    quantize_fp8,
    quantize_int8,
    quantize_rows,
    quantize_rows_plain,
)
from lopa_dist.kernels.virtual_gemm import vgemm
from tests.kernels.cross_compile import Variant, compile_all

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
QUANTISERS = pytest.mark.parametrize("quantize", [quantize_fp8, quantize_int8])


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Rows of very different sizes, some zero, some with one huge number, in any dtype."""
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    low, high = (-4, 4) if dtype == torch.float16 else (-24, 36)
    sizes = draw(st.lists(st.one_of(st.just(0.0), st.integers(low, high).map(lambda e: 10.0**e)), min_size=rows))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    weight = torch.randn(rows, columns, generator=generator).clamp(-6, 6) * torch.tensor(sizes[:rows])[:, None]
    if draw(st.booleans()):
        weight[0, 0] = torch.finfo(dtype).max
    return weight.to(dtype)


@QUANTISERS
@given(weight=weights())
@settings(max_examples=80, deadline=None)
def test_what_quantising_loses(quantize: object, weight: Tensor) -> None:
    assert callable(quantize)
    eight, scale = quantize(weight)
    assert eight.shape == weight.shape
    assert scale.shape == (len(weight),)
    assert scale.dtype == torch.float32
    assert scale.gt(0).all()
    assert eight.float().isfinite().all()
    wide, back = weight.double(), eight.double() * scale.double()[:, None]
    greatest = wide.abs().amax(1, keepdim=True)
    error = (back - wide).abs()
    if quantize is quantize_int8:
        assert eight.dtype == torch.int8
        assert eight.ge(-127).all()
        bound = greatest / 127 / 2
    else:
        assert eight.dtype == FP8
        bound = torch.maximum(wide.abs() / 16, greatest / 448 * 2.0**-10)  # half a step: relative, or of subnormals
    assert (error <= bound * 1.0001 + SMALLEST).all()
    assert back.sign().eq(wide.sign()).logical_or(back == 0).all()
    assert not eight.float()[greatest[:, 0] == 0].any()


@QUANTISERS
def test_the_greatest_number_of_a_row_stays(quantize: object) -> None:
    assert callable(quantize)
    weight = torch.tensor([[1.0, -3.0, 0.5], [1e-20, 0, 0], [0, 3e38, 1]])
    eight, scale = quantize(weight)
    back = eight.float() * scale[:, None]
    assert torch.allclose(back.abs().amax(1), weight.abs().amax(1), rtol=1e-6)


@QUANTISERS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_weight_is_refused(quantize: object, bad: float) -> None:
    assert callable(quantize)
    weight = torch.ones(5, 8)
    weight[3, 2] = bad
    with pytest.raises(ValueError, match=r"row 3 of a weight of shape \[5, 8\] holds NaN or infinity .* checkpoint"):
        quantize(weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 48), (17, 300), (64, 128)])
def test_rows_to_fp8(dtype: torch.dtype, rows: int, size: int) -> None:
    """The interpreter's own cast to fp8 forgets to carry, so what the cast gets is compared, cast by torch."""
    from lopa_dist.kernels import rows_triton

    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(0)).to(dtype).to(DEVICE)
    x[rows // 2] *= 1e-3
    if rows > 3:
        x[1] = 0
    wide, scale = rows_triton.quantize_rows(x, torch.float32)
    # a CPU divides, as the kernel does; torch on a GPU multiplies with what 1 / 448 is rounded to
    wanted, wanted_scale = (one.to(DEVICE) for one in quantize_rows_plain(x.cpu()))
    assert torch.equal(scale, wanted_scale)
    assert torch.equal(wide.to(FP8).view(torch.uint8), wanted.view(torch.uint8))
    eight, _ = rows_triton.quantize_rows(x)
    if DEVICE.type == "cuda":
        assert torch.equal(eight.view(torch.uint8), wanted.view(torch.uint8))
    else:
        assert (eight.view(torch.uint8) == wanted.view(torch.uint8)).float().mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 48), (17, 300), (5, 9000)])
def test_what_is_quantised_at_once_has_the_bits_of_two_steps(dtype: torch.dtype, rows: int, size: int) -> None:
    from lopa_dist.kernels import rows_triton

    generator = torch.Generator().manual_seed(0)
    x, residual, gate_up, weight = (
        torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)
        for shape in ((rows, size), (rows, size), (rows, 2 * size), (size,))
    )
    if rows > 3:
        x[1], residual[1], gate_up[1] = 0, 0, 0
        x[2, 7], gate_up[2, size - 1] = torch.inf, torch.nan
    normed, total = rows_triton.add_rms_norm(x, residual, weight, 1e-6)
    eight, scale, summed = rows_triton.add_rms_norm_fp8(x, residual, weight, 1e-6, torch.float32)
    assert torch.equal(summed, total)
    of_gate = rows_triton.swiglu_fp8(gate_up, torch.float32)
    for found, wanted in (
        ((eight, scale), rows_triton.quantize_rows(normed, torch.float32)),
        (of_gate, rows_triton.quantize_rows(rows_triton.swiglu(gate_up), torch.float32)),
    ):
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one.nan_to_num(nan=-7), other.nan_to_num(nan=-7))
        assert found[1].isnan().tolist() == [rows > 3 and row == 2 for row in range(rows)]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_breaks_alone(bad: float) -> None:
    from lopa_dist.kernels import rows_triton

    weight, scale = quantize_fp8(torch.randn(16, 32, generator=torch.Generator().manual_seed(0)))
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    whole = fp8_linear(x, weight, scale)
    x[2, 7] = bad
    found = fp8_linear(x, weight, scale)
    assert found[2].isnan().all()
    others = torch.arange(6) != 2
    assert torch.equal(found[others], whole[others])
    scales = rows_triton.quantize_rows(x.to(DEVICE))[1].cpu()
    assert scales.isnan().tolist() == [False, False, True, False, False, False]
    assert torch.equal(scales[others], quantize_rows(x).scale[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linears_are_close_to_the_whole_weight(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(33, 256, generator=generator).to(dtype), torch.randn(64, 256, generator=generator)
    bias = torch.randn(64, generator=generator).to(dtype)
    wanted = x.float() @ weight.T + bias.float()
    for found, most in (
        (fp8_linear(x, *quantize_fp8(weight), bias), 0.05),
        (int8_linear(x, *quantize_int8(weight), bias), 0.015),
    ):
        assert found.dtype == dtype
        error = (found.float() - wanted).norm() / wanted.norm()
        assert 0 < error < most


def test_a_row_of_a_linear_follows_from_itself_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator)
    x = torch.randint(-8, 9, (20, 64), generator=generator).float()  # sums are exact
    x[5:] *= 1000
    for linear, parts in ((fp8_linear, quantize_fp8(weight)), (int8_linear, quantize_int8(weight))):
        assert torch.allclose(linear(x, *parts)[:5], linear(x[:5], *parts), rtol=1e-6, atol=1e-6)


def test_int8_is_the_plain_product_of_the_scaled_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(9, 40, generator=generator), torch.randn(12, 40, generator=generator)
    eight, scale = quantize_int8(weight)
    wanted = x @ (eight.float() * scale[:, None]).T
    rows = torch.tensor([9], dtype=torch.int32)
    for found in (int8_linear(x, eight, scale), vgemm(x, eight, rows, None, scale)):
        assert torch.allclose(found, wanted, atol=1e-5)


def test_what_cannot_be_multiplied_in_fp8_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ValueError, match=r"A100: its products need compute capability 8\.9 .* has 8\.0; use int8"):
        quantized.check_fp8(torch.device("cuda"), (16, 32))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    quantized.check_fp8(torch.device("cuda"), (16, 32))
    with pytest.raises(ValueError, match=r"\[16, 24\] is not in multiples of 16"):
        quantized.check_fp8(torch.device("cuda"), (16, 24))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("rows", [1, 33])
def test_the_gpus_product_is_called_as_torch_wants_it(rows: int, bias: bool, dtype: torch.dtype) -> None:
    """torch has the product on a CPU, too: same arguments, and the emulation is what it computes."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, 256, generator=generator).to(dtype), torch.randn(48, 256, generator=generator)
    eight, scale = quantize_fp8(weight)
    added = torch.randn(48, generator=generator).to(dtype) if bias else None
    rows = quantize_rows(x)
    given = (rows.eight, rows.scale, eight, scale, added)
    try:
        found = quantized.fp8_product(*given)
    except (NotImplementedError, RuntimeError) as error:
        if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
            raise
        pytest.skip(f"torch {torch.__version__} has no such product on a CPU: {error}")
    assert found.dtype == torch.bfloat16
    assert found.is_contiguous()
    wanted = fp8_linear(x, eight, scale, added)
    assert torch.allclose(found.float(), wanted.float(), rtol=2**-7, atol=0.05)
    shape = quantized.fp8_product(*(None if one is None else one.to("meta") for one in given)).shape
    assert shape == found.shape, "its rules for a GPU's sizes and strides hold"


@pytest.mark.no_gpu
def test_cross_compiled() -> None:
    """Down projections' rows of 18,944 numbers stay in registers; the cast is the hardware's, which saturates."""
    types = {"x": "*bf16", "out": "*fp8e4nv", "scale": "*fp32"}
    kernel = "lopa_dist.kernels.rows_triton:quantize_rows_kernel"
    variants = [
        Variant(kernel, types, {"SIZE": size, "BLOCK": block}, tuple(types), 90, {"num_warps": warps})
        for size, block, warps in ((3584, 4096, 4), (18944, 32768, 16))
    ]
    types = {"gate_up": "*bf16", "eight": "*fp8e4nv", "scale": "*fp32"}
    kernel = "lopa_dist.kernels.rows_triton:swiglu_fp8_kernel"
    variants.append(Variant(kernel, types, {"SIZE": 18944, "BLOCK": 8192}, tuple(types), 90, {"num_warps": 16}))
    names = ("x", "residual", "weight", "eight", "scale", "total")
    types = dict.fromkeys(names, "*bf16") | {"eight": "*fp8e4nv", "scale": "*fp32", "eps": "fp32"}
    kernel = "lopa_dist.kernels.rows_triton:add_rms_norm_fp8_kernel"
    variants.append(Variant(kernel, types, {"SIZE": 3584, "BLOCK": 4096}, names, 90, {"num_warps": 8}))
    for one, compiled in zip(variants, compile_all(variants), strict=True):
        print(one.constexprs, compiled.registers, compiled.stack, compiled.shared)
        assert compiled.stack == 0
        assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.ptx
        assert "ld.global.v4" in compiled.ptx
