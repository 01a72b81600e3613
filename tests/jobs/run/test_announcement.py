"""The first line of a job."""

from __future__ import annotations

import copy

from lopa_dist.jobs.run.announcement import parameters
from lopa_dist.models.transformer import Transformer


def test_a_head_that_shares_the_embeddings_counts_once(small_model: Transformer) -> None:
    numbers = sum(parameter.numel() for parameter in small_model.parameters())
    assert parameters(small_model) == numbers
    small_model = copy.deepcopy(small_model)
    small_model.lm_head.weight = small_model.model.embed_tokens.weight
    assert parameters(small_model) == numbers - small_model.lm_head.weight.numel()
