"""Groups in training predict what the engine's groups predict."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.learn.learning import Learning
from lopa_dist.learn.network import clean_forward, drafts_forward
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from lopa_dist.rules.causal import proposals
from tests.engine.test_loop import random_requests
from tests.models.small_checkpoints import CAUSAL_KINDS, reference, weights_of, write

MASKS = 3
Seen = dict[tuple[int, ...], list[int]]
"""What the masks of a group predicted, by the tokens that stood before the next pending one."""


def learned(name: str, folder: Path) -> Learning:
    """A small model whose masks draft with an adapter that is nowhere zero."""
    kind = CAUSAL_KINDS[name]
    model = load_model(write(folder, kind, weights_of(kind, reference(kind))), torch.float32, torch.device("cpu"))
    learning = Learning(model, 79, 4)
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in learning.adapter.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=random))
    return learning


def of_engine(model: Transformer) -> Seen:
    config = DecodeConfig(context="causal", drafts=MASKS, draft_from="masks", max_new_tokens=20)
    requests = random_requests(21, 6, 20)
    found: Seen = {}

    def watch(engine: Engine) -> None:
        assert engine.batch
        assert engine.winner
        state, tokens = engine.batch.state, proposals(engine.winner).token.tolist()
        for slot, row in enumerate(tokens):
            if int(state.done[slot]) or -1 in row or len(row) < MASKS:
                continue
            request, known = engine.batch.running[slot].request, int(state.known[slot])
            written = state.answers[slot, known : int(state.complete[slot])].tolist()
            found[(*request.prompt, *written[:-1])] = row

    engine = Engine(model, config, Solo(), EngineConfig(4, attention="torch"), watch)
    list(engine.generate(requests))
    return found


@pytest.mark.parametrize("name", CAUSAL_KINDS)
def test_a_group_predicts_what_the_engines_group_predicts(name: str, tmp_path: Path) -> None:
    learning = learned(name, tmp_path)
    model = learning.model
    config = model.config
    learning.adopt()
    found = of_engine(model)
    assert len(found) > 10
    for tokens, predicted in found.items():
        text, start = torch.tensor([[*tokens, 0, 0]]), torch.tensor([[len(tokens) - 1]])
        with torch.no_grad():
            clean = clean_forward(model, text)
            hidden = drafts_forward(model, learning.adapter, clean, text, start, MASKS)
        logits = F.linear(hidden[0, 0], model.head_weight)
        logits[:, config.mask_id :] = -torch.inf
        assert logits.argmax(-1).tolist() == predicted
    assert config.block_drafts == (name == "nemotron")


def test_gradients_are_the_same_layer_by_layer(tmp_path: Path) -> None:
    learning = learned("qwen3", tmp_path)
    text = torch.arange(12).view(1, -1)
    starts = torch.tensor([[2, 5, 7]])
    found = []
    for by_layer in (False, True):
        clean = clean_forward(learning.model, text)
        hidden = drafts_forward(learning.model, learning.adapter, clean, text, starts, MASKS, by_layer)
        learning.adapter.zero_grad()
        hidden.square().sum().backward()
        found.append([parameter.grad for parameter in learning.adapter.parameters()])
    for once, again in zip(*found, strict=True):
        assert once is not None
        assert again is not None
        torch.testing.assert_close(once, again)
