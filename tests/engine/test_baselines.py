"""The baseline presets against plain loops, token by token and forward by forward, on every family."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.request import Request
from lopa_dist.jobs.setup.resolve import resolve_decode
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.families import training_pattern
from lopa_dist.models.transformer import Transformer
from tests.engine.baselines import block_diffusion, fast_dllm, vanilla
from tests.engine.test_families import requests_for
from tests.engine.test_loop import texts
from tests.models.small_checkpoints import KINDS, reference, weights_of, write
from tests.test_config import composed

FULL = {"dream": 22, "llada": 22, "illada": 28}  # trained without blocks; seeds that give short answers and full ones


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A random checkpoint of a family, made once; four tokens end an answer, and many prompts contain one."""

    @cache
    def of(family: str) -> Transformer:
        kind = KINDS[family]
        folder = write(tmp_path_factory.mktemp(family), kind, weights_of(kind, reference(kind)))
        model = load_model(folder, torch.float32, torch.device("cpu"))
        model.config = replace(model.config, eos_ids=(*model.config.eos_ids, 11, 42, 60))
        return model

    return of


def preset(model: Transformer, name: str, *overrides: str) -> DecodeConfig:
    """A decode config of the command line, with the model's own values for what is auto."""
    decode = composed(f"decode={name}", "decode.max_new_tokens=20", *(f"decode.{o}" for o in overrides)).decode
    return resolve_decode(decode, training_pattern(model.config))


def compare(model: Transformer, config: DecodeConfig, requests: list[Request], wanted: Any) -> list[float]:
    """The engine's text and forwards are `wanted`'s; tokens per forward of each request."""
    found = texts(model, config, requests)
    for request in requests:
        assert found[request.index] == wanted(request)
    ended = [len(found[r.index][0]) < r.max_new_tokens for r in requests]
    assert any(ended)
    assert not all(ended)
    return [len(tokens) / forwards for tokens, forwards in found.values()]


@pytest.mark.parametrize("family", FULL)
@pytest.mark.parametrize("entropy", [False, True])
def test_vanilla(models: Any, family: str, entropy: bool) -> None:
    model = models(family)
    config = preset(model, "vanilla_entropy" if entropy else "vanilla")
    requests = requests_for(model, 21, 6)
    compare(model, config, requests, lambda r: vanilla(model, r.prompt, r.max_new_tokens, entropy))


def test_the_two_orders_differ(models: Any) -> None:
    model = models("dream")
    [request] = requests_for(model, 21, 1)
    assert vanilla(model, request.prompt, 20, True) != vanilla(model, request.prompt, 20, False)


@pytest.mark.parametrize("family", FULL)
@pytest.mark.parametrize(("kind", "context"), [("none", "vanilla"), ("dual", "dual")])
def test_threshold_is_fast_dllm(models: Any, family: str, kind: str, context: str) -> None:
    model = models(family)
    tau = 0.9 if model.config.tied else 0.15  # the small model with tied embeddings is sure of nearly everything
    config = preset(model, "threshold", f"context={context}", "block_size=8", f"tau_conf={tau}")
    assert (config.scope.window_attention, config.scope.prompt_attention) == ("full", "joint")
    speed = compare(
        model, config, requests_for(model, FULL[family], 6),
        lambda r: fast_dllm(model, r.prompt, r.max_new_tokens, 8, config.tau_conf, kind),
    )  # fmt: skip
    assert max(speed) > 1.5


def test_the_cache_is_an_approximation(models: Any) -> None:
    """Else the two comparisons would be one."""
    model = models("llada")
    requests = requests_for(model, 22, 4)
    found = [[fast_dllm(model, r.prompt, 16, 8, 0.15, kind) for r in requests] for kind in ("none", "dual")]
    assert found[0] != found[1]


@pytest.mark.parametrize(("family", "part"), [("sdar", 4), ("fast_dllm_v2", 4), ("fast_dllm_v2", 8)])
def test_threshold_is_block_diffusion(models: Any, family: str, part: int) -> None:
    """Prompts that end inside a block and at its end, and shorter ones; the cached engine against no cache at all."""
    model = models(family)
    size = model.config.block_size
    parts = [] if family == "sdar" else [f"sub_block_size={part}"]
    config = preset(model, "threshold", "tau_conf=0.15", *parts)
    assert (config.block_size, config.scope.window_attention, config.scope.cache) == (size, "block_causal", "block")
    rng = random.Random(23)
    requests = [
        Request(i, [rng.randrange(70) for _ in range(length)], 20 - i, i)
        for i, length in enumerate((1, 3, 4, 5, 8, 11, 15, 16, 18))
    ]
    speed = compare(
        model, config, requests,
        lambda r: block_diffusion(model, r.prompt, r.max_new_tokens, size, part, config.tau_conf),
    )  # fmt: skip
    assert max(speed) > 1.1


def test_published_sub_blocks(models: Any) -> None:
    """Fast-dLLM v2 fills blocks of 32 in parts of 8; other families have no parts."""
    config = preset(models("fast_dllm_v2"), "threshold", "block_size=32")
    assert (config.sub_block_size, config.scope.boundary, config.scope.prompt_attention) == (8, "fill", "blocks")
    assert preset(models("sdar"), "threshold").sub_block_size is None
