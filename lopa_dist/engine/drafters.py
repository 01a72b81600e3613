"""Which drafter a model has."""

from __future__ import annotations

from lopa_dist.decode.config import DecodeConfig
from lopa_dist.engine import c_drafter
from lopa_dist.engine.drafter import Drafter
from lopa_dist.engine.plain_drafter import PlainDrafter
from lopa_dist.models.config import ModelConfig


def drafter_for(config: DecodeConfig, model: ModelConfig) -> Drafter | None:
    """Return the drafter of a model, as `config` says; None if nothing is drafted from text."""
    if not config.drafts_text:
        return None
    kind = PlainDrafter if c_drafter.fault() else c_drafter.CDrafter
    return kind(model.eos_ids if config.stop_at_eos else (), config.max_drafts, config.drafts_masks and model.has_mask)
