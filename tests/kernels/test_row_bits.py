"""Matrix products give a row the same bits in any batch, also by MKL's code for CPUs without AVX-512."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from lopa_dist.kernels import row_bits
from lopa_dist.kernels.row_bits import fault, same_bits, warn_of_bits

PROGRAM = """import lopa_dist; from lopa_dist.kernels.row_bits import warn_of_bits
import torch
for _ in range(2): warn_of_bits(torch.float32)"""
MKL = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch multiplies without MKL")


def told(**environment: str) -> str:
    """What a new process says that has this environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MKL_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=clean | environment, capture_output=True, text=True, check=True
    )
    return done.stderr


@MKL
def test_here() -> None:
    assert same_bits()


@MKL
def test_without_avx_512() -> None:
    assert told(MKL_ENABLE_INSTRUCTIONS="AVX2") == ""


@MKL
def test_where_the_user_asks_for_another_mode_texts_may_differ_and_it_is_said_once() -> None:
    said = told(MKL_ENABLE_INSTRUCTIONS="AVX2", MKL_CBWR="AVX2")
    if said:  # a CPU of another maker may not have this mode
        assert said.count("MKL_CBWR=AUTO,STRICT") == 1


def test_another_precision_is_checked_of_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CPUs with AMX add up products in bf16 by the number of rows. Nothing in the environment mends that."""
    monkeypatch.setattr(row_bits, "same_bits", lambda dtype: dtype == torch.float32)
    warn_of_bits.cache_clear()
    assert fault(torch.float32) is None
    for _ in range(2):
        warn_of_bits(torch.bfloat16)
    [said] = caplog.messages
    assert "products in bfloat16 depend on how many rows there are" in said
    assert "model.dtype=fp32" in said


def test_a_product_that_adds_up_by_the_number_of_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = torch.nn.functional.linear

    def by_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (
            linear(x.float(), weight.float()).to(x.dtype)
            if len(x) < 32
            else linear(x.double(), weight.double()).to(x.dtype)
        )

    monkeypatch.setattr(row_bits.F, "linear", by_rows)
    same_bits.cache_clear()
    assert not same_bits(torch.float32)
    same_bits.cache_clear()
