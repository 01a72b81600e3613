"""Every family generates, with and without cache, and the same text alone as in a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lopa_dist.config import DecodeOptions
from lopa_dist.engine.request import Request
from lopa_dist.jobs.setup.resolve import resolve_decode
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.families import training_pattern
from lopa_dist.models.transformer import Transformer
from tests.engine.naive import Naive
from tests.engine.ranks import on_ranks
from tests.engine.test_loop import random_requests, texts
from tests.models.small_checkpoints import KINDS, MOE_KINDS, reference, weights_of, write
from tests.test_config import composed

DECODED = KINDS | {"sdar_moe": MOE_KINDS["sdar_moe"]}


@pytest.fixture(params=DECODED, scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    kind = DECODED[request.param]
    folder = write(tmp_path_factory.mktemp(request.param), kind, weights_of(kind, reference(kind)))
    return load_model(folder, torch.float32, torch.device("cpu"))


def requests_for(model: Transformer, seed: int, count: int) -> list[Request]:
    """Random prompts without the mask token (iLLaDA's is 5)."""
    return [
        replace(r, prompt=[t + 1 if t == model.config.mask_id else t for t in r.prompt])
        for r in random_requests(seed, count, 20)
    ]


@pytest.mark.parametrize("context", ["vanilla", "auto"])
@pytest.mark.parametrize("branches", [0, 3])
def test_alone_and_together(model: Transformer, branches: int, context: str) -> None:
    """LoPA and plain decoding with the family's own attention and blocks."""
    options = DecodeOptions(
        verify="confidence", drafts=0, branches=branches, max_new_tokens=20, tau_conf=0.1, tau_act=0.5,
        stop_at_eos=False, context=context, block_size="auto", max_active_blocks="auto",
    )  # fmt: skip
    config = resolve_decode(options, training_pattern(model.config))
    requests = requests_for(model, 11, 5)
    alone = texts(model, config, requests, max_sequences=1)
    assert texts(model, config, requests[::-1], max_sequences=5) == alone
    assert texts(model, config, requests, attention="meta", graphs="always") == alone
    assert len({tuple(tokens) for tokens, _ in alone.values()}) == 5
    mask = model.config.mask_id
    assert all(mask not in tokens for tokens, _ in alone.values())
    assert any(len(tokens) > forwards for tokens, forwards in alone.values())  # several tokens per forward


@pytest.mark.parametrize("preset", [["lopa"], ["threshold", "context=dual"]])
@pytest.mark.parametrize("branches", [1, 3])
def test_lopa_is_the_naive_engine_on_any_number_of_ranks(model: Transformer, branches: int, preset: list[str]) -> None:
    """LoPA in the family's own pattern, and over Fast-dLLM's cache: on SDAR and LLaDA nobody has published it."""
    at = training_pattern(model.config)
    tau = 0.9 if model.config.tied else 0.12  # these small models with tied embeddings are sure of nearly everything
    few = (f"branches={branches}", "max_new_tokens=18", f"tau_conf={tau}", "block_size=8", *preset[1:])
    options = composed(f"decode={preset[0]}", *(f"decode.{o}" for o in few)).decode
    config = resolve_decode(options, at)
    requests = requests_for(model, 13, 3)
    wins: list[int] = []
    wanted = {}
    for request in requests:
        tokens, chosen = Naive(model, config, request.prompt, request.max_new_tokens).generate()
        stops = [i for i, t in enumerate(tokens) if t in model.config.eos_ids]
        wanted[request.index] = (tokens[: stops[0]] if stops else tokens, len(chosen))
        wins += chosen
    assert texts(model, config, requests) == wanted
    for found in on_ranks(2, lambda comm: texts(model, config, requests, comm)):
        assert found == wanted
    assert len(set(wins)) > 1  # some lookahead won


@pytest.mark.parametrize("branches", [0, 3])
def test_verified_lookahead_is_the_naive_engine(model: Transformer, branches: int) -> None:
    """In the family's own pattern, with the logit shift and without."""
    tau = 1.0 if model.config.tied else 0.3  # small models with tied embeddings are sure of nearly everything
    options = DecodeOptions(
        branches=branches, drafts=3, max_new_tokens=18, tau_conf=tau, tau_act=0.5, context="auto",
        block_size="auto", max_active_blocks="auto",
    )  # fmt: skip
    config = resolve_decode(options, training_pattern(model.config))
    requests = requests_for(model, 13, 3)
    found = texts(model, config, requests)
    accepted = 0
    for request in requests:
        naive = Naive(model, config, request.prompt, request.max_new_tokens)
        tokens, wins = naive.generate()
        stops = [i for i, t in enumerate(tokens) if t in model.config.eos_ids]
        wanted = (tokens[: stops[0]] if stops else tokens, len(wins))
        assert found[request.index] == wanted or naive.near_tie
        accepted += sum(naive.oracle.accepted)
    assert accepted
