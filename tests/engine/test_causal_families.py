"""Causal models write what `transformers` generates greedily with the same weights, with and without drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from lopa_dist.config import DecodeOptions
from lopa_dist.engine.request import Request
from lopa_dist.jobs.setup.resolve import resolve_decode
from lopa_dist.models.adapter import load_adapter
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.families import training_pattern
from lopa_dist.models.files import CheckpointError
from lopa_dist.models.transformer import Transformer
from tests.engine.test_loop import random_requests, texts
from tests.models.small_checkpoints import CAUSAL_KINDS, reference, weights_of, write
from tests.models.test_adapter import adapter_for, write_adapter

CPU = torch.device("cpu")
REQUESTS = random_requests(21, 4, 20)


@torch.no_grad()
def greedy(model: PreTrainedModel, request: Request, mask: int) -> list[int]:
    """One token at a time, without a cache, up to an end-of-text; the mask itself is never written."""
    answer: list[int] = []
    while len(answer) < request.max_new_tokens:
        logits = model(torch.tensor([[*request.prompt, *answer]]), use_cache=False).logits[0, -1]
        logits[mask:] = -torch.inf
        if (token := int(logits.argmax())) == 78:
            break
        answer.append(token)
    return answer


def written(model: Transformer, drafts: int) -> dict[int, tuple[list[int], int]]:
    options = DecodeOptions(
        drafts=drafts, max_new_tokens=20, context="auto", max_active_blocks="auto",
    )  # fmt: skip
    return texts(model, resolve_decode(options, training_pattern(model.config)), REQUESTS)


@pytest.mark.parametrize("name", CAUSAL_KINDS)
def test_causal_families_write_their_greedy_text(name: str, tmp_path: Path) -> None:
    kind = CAUSAL_KINDS[name]
    other = reference(kind)
    model = load_model(write(tmp_path, kind, weights_of(kind, other)), torch.float32, CPU)
    wanted = {request.index: greedy(other, request, model.config.mask_id) for request in REQUESTS}
    for drafts in (0, 3) if model.config.has_mask else (0,):
        found = written(model, drafts)
        assert {index: tokens for index, (tokens, _) in found.items()} == wanted


@pytest.mark.parametrize("name", ["qwen3", "nemotron"])
def test_an_adapter_on_masks_leaves_the_text_and_brings_drafts(name: str, tmp_path: Path) -> None:
    """Random drafts are seldom right; that they are verified and never seen is what counts."""
    kind = CAUSAL_KINDS[name]
    other = reference(kind)
    base = write(tmp_path / "base", kind, weights_of(kind, other))
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]
    tensors = adapter_for(weights_of(kind, other), targets)
    lora = write_adapter(tmp_path / "linear_spec_lora", tensors, target_modules=targets)
    (lora / "added_tokens.json").write_text('{"<|MASK|>": 79}')
    adapter = load_adapter(lora, "masks")
    wanted = {request.index: greedy(other, request, 79) for request in REQUESTS}
    model = load_model(base, torch.float32, CPU, adapter)
    found = written(model, 3)
    assert {index: tokens for index, (tokens, _) in found.items()} == wanted
    if name == "nemotron":
        with pytest.raises(CheckpointError, match=r"only for rows that draft; set model\.lora_rows=masks"):
            load_model(base, torch.float32, CPU, load_adapter(lora))
