"""Matrix products give a row the same bits in any batch, also by MKL's code for CPUs without AVX-512."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from lopa_dist.kernels.row_bits import same_bits

PROGRAM = "import lopa_dist; from lopa_dist.kernels.row_bits import warn_of_bits; warn_of_bits(); warn_of_bits()"
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
