"""What a step of learning takes in memory: an 8B model learns on a card of 80 GB, and a step shrinks to what fits."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.learn.drafts_adapter import DraftsAdapter
from lopa_dist.learn.memory import SHARE, bytes_of_adapter, bytes_of_step, rows_that_fit
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.config import ModelConfig
from tests.models.small_checkpoints import CAUSAL_KINDS, reference, weights_of, write

QWEN3_8B = ModelConfig(
    family="qwen3", vocab_size=151_936, hidden_size=4096, layers=36, heads=32, kv_heads=8, head_dim=128,
    intermediate_size=12_288, rms_eps=1e-6, rope_theta=1e6, qkv_bias=False, tied=False, shift=True, mask_id=151_936,
    eos_ids=(151_645,), pad_id=151_643, max_positions=40_960,
)  # fmt: skip
GB = 10**9
WEIGHTS = 16.4 * GB


def test_an_8b_model_learns_on_80_gb() -> None:
    free = int(80 * GB - WEIGHTS)
    assert rows_that_fit(QWEN3_8B, free, 64, 2048, 2, 4096, 32) == 4096
    assert bytes_of_adapter(QWEN3_8B, 64) < 3 * GB
    assert 2048 <= rows_that_fit(QWEN3_8B, free, 64, 8192, 2, 4096, 32) <= 4096


@given(free=st.integers(0, 80 * GB), longest=st.integers(2, 40_000), rank=st.sampled_from([8, 64]))
def test_a_step_fits_or_is_the_least(free: int, longest: int, rank: int) -> None:
    rows = rows_that_fit(QWEN3_8B, free, rank, longest, 2, 4096, 32)
    taken = bytes_of_step(QWEN3_8B, rows, longest, 2) + bytes_of_adapter(QWEN3_8B, rank)
    assert rows == 32 or taken <= SHARE * free


def test_an_adapter_has_the_bytes_that_are_planned(tmp_path: Path) -> None:
    kind = CAUSAL_KINDS["qwen3"]
    model = load_model(write(tmp_path, kind, weights_of(kind, reference(kind))), torch.float32, torch.device("cpu"))
    adapter = DraftsAdapter(model, 8)
    pairs = sum(p.numel() for p in [*adapter.a, *adapter.b])
    assert bytes_of_adapter(model.config, 8) == 4 * 4 * pairs
