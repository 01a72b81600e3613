"""LLaDA2's ways of decoding: the authors' own texts; and editing in every combination, against the naive engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lopa_dist.config import DecodeOptions
from lopa_dist.decode import DecodeConfig
from lopa_dist.decode.written import ACCEPTED, EDITED, WAY
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request
from lopa_dist.jobs.setup.resolve import resolve_decode
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.families import training_pattern
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from tests.engine.naive import Naive
from tests.engine.ranks import on_ranks
from tests.engine.test_loop import texts
from tests.models import llada2
from tests.models.small_checkpoints import write

AUTO: dict[str, Any] = dict.fromkeys(("context", "block_size", "max_active_blocks"), "auto")
PLAIN: dict[str, Any] = AUTO | {"verify": "confidence", "drafts": 0, "branches": 0, "confidence": "probability"}


def small(folder: Path, sharpness: float, edits: bool) -> Transformer:
    """The checkpoint as LLaDA2.1, which has a longer context, or 2.0."""
    config = llada2.CONFIG | {"eos_token_id": llada2.EOS} | ({"max_position_embeddings": 32768} if edits else {})
    at = write(folder, replace(llada2.KIND, config=config), llada2.weights(sharpness))
    return load_model(at, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("number", range(len(llada2.SETTINGS)))
def test_texts_are_those_of_the_authors(number: int, tmp_path: Path) -> None:
    """Token for token, and in as many forwards, or fewer: masks after the end of the answer may stay."""
    setting, wanted = llada2.SETTINGS[number], json.loads(llada2.TEXTS.read_text())[number]
    assert len(wanted) == setting.prompts
    model = small(tmp_path, setting.sharpness, setting.tau_edit is not None)
    options = DecodeOptions(**PLAIN, tau_conf=setting.tau_conf, tau_edit=setting.tau_edit, max_new_tokens=96)
    config = resolve_decode(options, training_pattern(model.config))
    requests = [Request(i, one["prompt"], one["most"], i) for i, one in enumerate(wanted)]
    for generation in Engine(model, config, Solo(), EngineConfig(50)).generate(requests):
        one = wanted[generation.request.index]
        tokens = generation.tokens + [llada2.EOS] * (generation.finish_reason == "stop")
        assert tokens == one["answer"]
        assert generation.forwards <= one["forwards"]
        assert setting.tau_edit is None or generation.forwards == one["forwards"]


def editing(model: Transformer, **options: Any) -> DecodeConfig:
    few: dict[str, Any] = {"block_size": 8, "max_new_tokens": 20, "tau_conf": 0.5, "tau_edit": 0.4}
    return resolve_decode(DecodeOptions(**PLAIN | few | options), training_pattern(model.config))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return small(tmp_path_factory.mktemp("llada21"), 3.0, True)


def requests_for(count: int) -> list[Request]:
    draw = np.random.RandomState(2)
    lengths = zip(draw.randint(1, 20, count), draw.randint(5, 21, count), strict=True)
    return [Request(i, draw.randint(0, 77, prompt).tolist(), int(most), i) for i, (prompt, most) in enumerate(lengths)]


VERIFIED = {"verify": "agreement", "drafts": 3}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sub_block_size": 4},
        {"branches": 2},
        VERIFIED,
        VERIFIED | {"branches": 2, "tau_conf": 1.0},
        VERIFIED | {"tau_edit": 0.0, "stop_at_eos": False},
    ],
)
def test_editing_is_the_naive_engine(model: Transformer, options: dict[str, Any]) -> None:
    """With verified drafts, too: an accepted one that the model takes back later is replaced."""
    config, requests = editing(model, **options), requests_for(3)
    found = texts(model, config, requests)
    for request in requests:
        naive = Naive(model, config, list(request.prompt), request.max_new_tokens)
        tokens, wins = naive.generate()
        stops = [i for i, t in enumerate(tokens) if t in model.config.eos_ids]
        wanted = (tokens[: stops[0]] if stops else tokens, len(wins))
        assert found[request.index] == wanted or naive.near_tie
    assert texts(model, config, requests[::-1], max_sequences=2) == found
    assert texts(model, config, requests, attention="meta", graphs="always") == found
    for of_rank in on_ranks(2, lambda comm: texts(model, config, requests, comm)):
        assert of_rank == found


def test_accepted_drafts_are_edited(model: Transformer) -> None:
    """Tokens are told with the way in which they were last written."""
    config = editing(model, **VERIFIED, tau_conf=0.9, tau_edit=0.8)
    requests = [replace(request, token_steps=True) for request in requests_for(12)]
    accepted, edited = set(), set()

    def watch(engine: Engine) -> None:
        state = engine.batch.state
        at = state.written[:, WAY, :-1]
        for slot, position in (at == EDITED).nonzero().tolist():
            if (slot, position) in accepted:
                edited.add((slot, position))
        accepted.update(map(tuple, (at == ACCEPTED).nonzero().tolist()))

    engine = Engine(model, config, Solo(), EngineConfig(12), watch)
    ways = {one.way for generation in engine.generate(requests) for one in generation.written or ()}
    assert ways == {"filled", "accepted", "bonus", "edited"}
    assert edited


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": "vanilla"}, "tau_edit=0.4 needs decode.context=blocks"),
        ({"max_active_blocks": 2}, "and decode.max_active_blocks=1"),
        ({"tau_edit": 1.5}, "tau_edit=1.5: must be between 0 and 1, or null"),
    ],
)
def test_what_editing_needs(model: Transformer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        editing(model, **options)


def test_only_models_that_were_trained_to_edit_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tau_edit=0\.4: only LLaDA2\.1 was trained"):
        editing(small(tmp_path, 1.0, False))
