"""Texts of the authors' own programs, token for token, by the settings that docs/models.md calls their way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request
from lopa_dist.jobs.commands.models import compared
from lopa_dist.jobs.setup.resolve import resolve_decode
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.families import training_pattern
from lopa_dist.parallel.communicator import Solo
from tests.models import authors
from tests.models.small_checkpoints import write
from tests.test_config import composed

CASES = [(name, number) for name, one in authors.COMPARISONS.items() for number in range(len(one.settings))]


@pytest.mark.parametrize(("name", "number"), CASES)
def test_texts_are_those_of_the_authors(name: str, number: int, tmp_path: Path) -> None:
    """Token for token, and in as many forwards, or fewer: masks after the end of the answer may stay."""
    comparison, wanted = authors.COMPARISONS[name], authors.texts(name)[number]
    setting = comparison.settings[number]
    assert len(wanted) == setting.prompts
    kind = replace(comparison.kind, config=comparison.kind.config | {"mask_token_id": authors.MASK})
    folder = write(tmp_path, kind, comparison.weights())
    model = load_model(folder, torch.float32, torch.device("cpu"))
    assert model.config.family == comparison.family
    overrides = (*setting.decode, f"decode.max_new_tokens={max(one['most'] for one in wanted)}")
    config = resolve_decode(composed(*overrides).decode, training_pattern(model.config))
    requests = [Request(i, one["prompt"], one["most"], i, suffix=comparison.suffix) for i, one in enumerate(wanted)]
    for generation in Engine(model, config, Solo(), EngineConfig(50)).generate(requests):
        one = wanted[generation.request.index]
        tokens = generation.tokens + [authors.EOS] * (generation.finish_reason == "stop")
        assert tokens == one["answer"]
        assert generation.forwards <= one["forwards"]


@pytest.mark.parametrize("model", ["dparallel_llada", "dparallel_dream"])
def test_presets_that_say_so_decode_their_authors_way(model: str) -> None:
    assert composed(f"model={model}").decode == composed(f"model={model}", "decode=low_entropy").decode


@pytest.mark.parametrize("name", authors.COMPARISONS)
def test_the_page_says_how_many(name: str) -> None:
    """And by which program; the number is that of the stored texts."""
    comparison = authors.COMPARISONS[name]
    count = sum(setting.prompts for setting in comparison.settings)
    assert f"{comparison.program}: {count} of {count}" in compared()[comparison.family]["texts"]
