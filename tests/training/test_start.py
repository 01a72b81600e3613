"""Weights that make copying easy to find: the first layer looks at neighbours, a row names its token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lopa_dist.models.transformer import Transformer
from training import tokenizer
from training.start import CAUSAL_DISTANCES, DISTANCES, prepare_to_copy
from training.train import Shape, model_config
from training.vocabularies import list_words


def prepared(kv_heads: int = 4, distances: Sequence[int] = DISTANCES) -> Transformer:
    torch.manual_seed(0)
    config = model_config(Shape(128, 3, 4, kv_heads, 64), tokenizer.build(list_words()))
    model = Transformer(config)
    prepare_to_copy(model, distances)
    return model


@pytest.mark.parametrize("distances", [DISTANCES, CAUSAL_DISTANCES], ids=["masked", "causal"])
def test_heads_of_the_first_layer_look_at_fixed_distances_wherever_they_stand(distances: Sequence[int]) -> None:
    model, shares = prepared(distances=distances), []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        if distances == CAUSAL_DISTANCES:
            scores = scores.masked_fill(torch.ones(200, 200).triu(1).bool(), -torch.inf)
        share = scores.softmax(-1)
        shares.append(share)
        return torch.einsum("hqk,khd->qhd", share, v)

    with torch.no_grad():
        model(torch.randint(270, 370, (200,)), torch.arange(200), attend)
    for head, distance in enumerate(distances):
        assert shares[0][head].diagonal(distance).min() > 0.7


def test_a_layer_writes_what_it_reads() -> None:
    model = prepared()
    for layer in model.model.layers:
        attention = layer.self_attn
        product = attention.o_proj.weight @ attention.v_proj.weight
        assert torch.allclose(product, torch.eye(128), atol=1e-5)
    tokens = model.model.embed_tokens.weight
    assert (model.model.norm(tokens) @ model.head_weight.T).argmax(-1).tolist() == list(range(len(tokens)))


def test_shared_kv_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_heads=2"):
        prepared(kv_heads=2)
