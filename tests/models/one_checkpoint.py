"""A small checkpoint in Dream's layout, for tests that change it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lopa_dist.models.config import ModelConfig
from lopa_dist.models.transformer import Transformer
from tests.conftest import SMALL
from tests.models import small_checkpoints
from training.checkpoint import config_json


def config_of(tied: bool = False) -> ModelConfig:
    return replace(
        SMALL, vocab_size=32, hidden_size=16, head_dim=4, intermediate_size=24, tied=tied, mask_id=1, eos_ids=(2,),
        pad_id=3, max_positions=64,
    )  # fmt: skip


def weights_of(config: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(p.shape, generator=generator) for n, p in Transformer(config).state_dict().items()}
    if config.tied:
        del weights["lm_head.weight"]
    return weights


def write(folder: Path, config: ModelConfig, weights: dict[str, Tensor], shards: int = 1) -> Path:
    (folder / "config.json").write_text(json.dumps(config_json(config)))
    small_checkpoints.save(folder, weights, shards)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; ``...`` removes one."""
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))
