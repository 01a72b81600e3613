"""Logits of all rows never exist at once, in no step of a whole generation."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request
from lopa_dist.kernels.dispatch import suits_c
from lopa_dist.kernels.record_head import ROWS, ROWS_IN_C
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from tests.conftest import SMALL
from tests.kernels.test_record_head import Sizes

VOCABULARY = 1021  # no other length in a step


@pytest.mark.parametrize("rules", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 9}], ids=str)
def test_no_step_makes_logits_of_all_its_rows(rules: dict[str, float]) -> None:
    """Six sequences with four branches of up to 64 masks, and prompts: far more rows than a tile of logits has."""
    model = Transformer(replace(SMALL, vocab_size=VOCABULARY)).requires_grad_(False).eval()
    config = DecodeConfig(
        verify="confidence", drafts=0, branches=3, max_new_tokens=64, tau_conf=0.5, tau_add=0.02, **rules
    )  # type: ignore[arg-type]
    rng = random.Random(5)
    requests = [Request(i, [rng.randrange(40) for _ in range(50)], 64, i) for i in range(6)]
    engine = Engine(model, config, Solo(), EngineConfig(6))
    with Sizes() as sizes:
        for _ in zip(range(1), engine.generate(requests), strict=False):  # until the first request is finished
            pass
    logits = {shape for shape in sizes.shapes if VOCABULARY in shape[1:]}
    most = ROWS_IN_C if suits_c(model.head_weight) and "top_k" not in rules else ROWS
    assert (most, VOCABULARY) in logits
    assert max(shape[0] for shape in logits) <= most
    assert engine.statistics.records > 2 * ROWS * engine.statistics.steps
