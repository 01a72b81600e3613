"""A model that is split over tensor ranks computes the bits of the whole one, and each rank has only its part."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from lopa_dist.kernels.record_head import SHARES, record_head, tiles
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.models.adapter import load_adapter
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.files import EMBEDDED
from lopa_dist.models.fused import Cache, FusedTransformer
from lopa_dist.models.tensor_parallel import check, head_shard, split
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator
from tests.bits import same_row_bits
from tests.conftest import SMALL
from tests.engine.ranks import on_mesh

CPU = torch.device("cpu")
RULES = (
    Sampling(),
    Sampling("probability"),
    Sampling("margin"),
    Sampling(temperature=0.8),
    Sampling(temperature=0.8, top_p=0.9),
    Sampling("margin", temperature=1.0, top_k=5),
)


def hidden_rows(model: Transformer, tokens: Tensor, ranks: int) -> Tensor:
    """``[R, d]`` as engines compute it, where everything sees everything."""
    config = model.config
    shape = config.layers, len(tokens), config.kv_heads // ranks, config.head_dim
    keys, values = torch.zeros(2, *shape)

    def attend(layer: int, q: Tensor) -> Tensor:
        k, v = (x[layer].repeat_interleave(config.heads // config.kv_heads, 1) for x in (keys, values))
        return F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1)

    fused = FusedTransformer(model)
    return fused(tokens, torch.arange(len(tokens)), None, Cache(keys, values, 0), attend)


def outcome(model: Transformer, rows: int, tensor: Communicator | None = None) -> list[Tensor]:
    """Hidden rows, and records under every rule."""
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(0, model.config.vocab_size, (rows,), generator=generator)
    with torch.inference_mode():
        hidden = hidden_rows(model, tokens, tensor.size if tensor else 1)
        keys = torch.arange(rows) * 31
        shard = {} if tensor is None else {"shard": head_shard(tensor)}
        return [hidden] + [record_head(hidden, model.head_weight, 1, keys, rule, **shard) for rule in RULES]


@same_row_bits
@pytest.mark.parametrize("rows", [16, 80, 272])
def test_hidden_rows_and_records_have_the_bits_of_one_rank(embedded_model: Transformer, rows: int) -> None:
    whole = outcome(copy.deepcopy(embedded_model), rows)

    def work(comm: Communicator, tensor: Communicator) -> list[Tensor]:
        model = copy.deepcopy(embedded_model)
        split(model, tensor)
        return outcome(model, rows, tensor)

    for parts in on_mesh(1, 2, work):
        for mine, expected in zip(parts, whole, strict=True):
            assert torch.equal(mine, expected)


def test_the_head_gathers_sums_and_not_logits() -> None:
    """7 numbers a row and tile, however large the vocabulary; whole rows of logits only under top-p and top-k."""
    generator = torch.Generator().manual_seed(0)
    weight, hidden = torch.randn(40_000, 8, generator=generator), torch.randn(32, 8, generator=generator)
    for sampling, size in ((Sampling(), 4 * 7 * SHARES // 2), (Sampling(temperature=1.0, top_k=9), 4 * 20_000)):
        whole = record_head(hidden, weight, 3, torch.arange(32), sampling)

        def work(comm: Communicator, tensor: Communicator, sampling: Sampling = sampling) -> tuple[Tensor, int]:
            own = weight[tensor.rank * 20_000 :][:20_000]
            records = record_head(hidden, own, 3, torch.arange(32), sampling, head_shard(tensor))
            return records, tensor.traffic["all_gather"]

        for records, sent in on_mesh(1, 2, work):
            assert torch.equal(records, whole)
            assert sent == 32 * size


@pytest.mark.parametrize("vocabulary", [48, 496, 40_000, 152_064, 151_936, 126_464])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_cut_the_vocabulary_alike(vocabulary: int, ranks: int) -> None:
    def edges(rank: int) -> list[int]:
        share = vocabulary // ranks
        cut = tiles(rank * share, (rank + 1) * share, vocabulary)
        return [edge for low, high, width in cut for edge in range(low, high, width)]

    assert [edge for rank in range(ranks) for edge in edges(rank)] == [
        edge for low, high, width in tiles(0, vocabulary, vocabulary) for edge in range(low, high, width)
    ]


def test_what_does_not_divide_is_named() -> None:
    with pytest.raises(ValueError, match=r"parallel\.tensor=4 does not divide the model's 2 K/V heads"):
        check(SMALL, 4)
    with pytest.raises(ValueError, match="does not divide the model's 4 heads and 2 K/V heads and 32 hidden size"):
        check(replace(SMALL), 3)
    with pytest.raises(ValueError, match="vocabulary of 49"):
        check(replace(SMALL, vocab_size=49), 2)
    check(SMALL, 1)


def lora(folder: Path) -> Path:
    """An adapter of a split projection, and of one that stays whole."""
    folder.mkdir()
    generator, weights = torch.Generator().manual_seed(1), {}
    for name, out, size in (("self_attn.k_proj", 96, 192), ("mlp.down_proj", 192, 512), ("self_attn.o_proj", 192, 192)):
        for layer in range(6):
            key = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{key}.lora_A.weight"] = torch.randn(4, size, generator=generator)
            weights[f"{key}.lora_B.weight"] = torch.randn(out, 4, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["k_proj", "down_proj", "o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("adapted", [False, True])
def test_each_rank_loads_its_part(adapted: bool, tmp_path: Path) -> None:
    adapter = load_adapter(lora(tmp_path / "lora")) if adapted else None
    whole = load_model(EMBEDDED, torch.float32, CPU, adapter)
    parts = on_mesh(1, 2, lambda comm, tensor: load_model(EMBEDDED, torch.float32, CPU, adapter, tensor))
    sizes = [sum(p.numel() for p in model.parameters()) for model in (whole, *parts)]
    assert sizes[1] == sizes[2] < 0.6 * sizes[0]
    shards = [model.state_dict() for model in parts]
    for name, weight in whole.state_dict().items():
        own = [shard[name] for shard in shards]
        assert torch.equal(own[0] if own[0].shape == weight.shape else torch.cat(own), weight), name


def test_a_tied_head_is_split_and_its_embedding_is_not(tmp_path: Path) -> None:
    model = Transformer(replace(SMALL, tied=True))
    weights = {n: w.detach().contiguous() for n, w in model.state_dict().items() if n != "lm_head.weight"}
    save_file(weights, tmp_path / "model.safetensors")
    config = json.loads((EMBEDDED / "config.json").read_text())
    config |= {
        "vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    embedding = model.model.embed_tokens.weight
    loaded = on_mesh(1, 2, lambda comm, tensor: load_model(tmp_path, torch.float32, CPU, None, tensor))
    for part, own in zip(loaded, embedding.chunk(2), strict=True):
        assert torch.equal(part.model.embed_tokens.weight, embedding)
        assert torch.equal(part.head_weight, own)
