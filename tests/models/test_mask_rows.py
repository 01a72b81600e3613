"""An adapter on rows of masks: they compute with it what a merged one computes, and all other rows keep their bits."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_dist.kernels.rope import apply_rope
from lopa_dist.models.adapter import load_adapter
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.config_file import read_config
from lopa_dist.models.files import CheckpointError
from lopa_dist.models.fused import Cache, FusedTransformer
from lopa_dist.models.mask_rows import MaskRowAdapter, adapter_of
from lopa_dist.models.transformer import Attend, Transformer, rope_of
from lopa_dist.parallel.communicator import Communicator
from tests.bits import same_row_bits
from tests.engine.ranks import on_mesh
from tests.models.small_checkpoints import CAUSAL_KINDS, KINDS, reference, weights_of, write
from tests.models.test_adapter import adapter_for, write_adapter

CPU = torch.device("cpu")
MASK, ROWS = 79, 32
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # not k_proj: a part without a pair
KIND = CAUSAL_KINDS["qwen3"]
TOKENS = torch.randint(0, MASK, (ROWS,), generator=torch.Generator().manual_seed(1))
TOKENS[[3, 4, 5, 11, 12, 30, 31]] = MASK
POSITIONS = torch.arange(ROWS)
MASKS = TOKENS == MASK
SEEN = (POSITIONS[:, None] >= POSITIONS) & ((MASKS[:, None] & MASKS) | ~MASKS)
"""Every row sees what is before it; masks are seen by masks alone."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("base"), KIND, weights_of(KIND, reference(KIND)))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = adapter_for(weights_of(KIND, reference(KIND)), TARGETS)
    folder = write_adapter(tmp_path_factory.mktemp("a") / "lora", tensors, target_modules=TARGETS, lora_alpha=0.4)
    (folder / "added_tokens.json").write_text('{"<|MASK|>": 79}')
    return folder


def plain(model: Transformer) -> Attend:
    """Attention of the modules."""
    group = model.config.heads // model.config.kv_heads

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attended(q, k, v, group)

    return attend


def attended(q: Tensor, k: Tensor, v: Tensor, group: int) -> Tensor:
    """A row's bits depend on what it sees alone."""
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    rows = [torch.where(SEEN[i, :, None], (q[i] * k).sum(-1), -torch.inf).softmax(0) for i in range(len(q))]
    return torch.stack([(torch.where(SEEN[i, :, None], row, 0)[..., None] * v).sum(0) for i, row in enumerate(rows)])


@torch.inference_mode()
def fused_rows(
    model: Transformer,
    ranks: int = 1,
    reproducible: bool = False,
    wanted: Tensor | None = None,
    fused: FusedTransformer | None = None,
) -> Tensor:
    """Hidden rows as engines compute them."""
    config = model.config
    keys, values = torch.zeros(2, config.layers, ROWS, config.kv_heads // ranks, config.head_dim)
    fused = fused or FusedTransformer(model)
    rows = torch.tensor([ROWS], dtype=torch.int32) if reproducible else None
    fused = fused.with_virtual_padding() if reproducible else fused
    cache = Cache(keys, values, 0)
    group = config.heads // config.kv_heads
    return fused(TOKENS, POSITIONS, rows, cache, lambda i, q: attended(q, keys[i], values[i], group), wanted)


def loaded(base: Path, adapter: Path | None, rows: str = "masks", tensor: Communicator | None = None) -> Transformer:
    found = None if adapter is None else load_adapter(adapter, rows)
    return load_model(base, torch.float32, CPU, found, tensor)


@torch.inference_mode()
def test_masks_go_through_merged_weights_and_tokens_through_the_base(base: Path, adapter: Path) -> None:
    """Layer by layer with two whole models, of which each row takes its own."""
    model, one, other = loaded(base, adapter), loaded(base, None), loaded(base, adapter, "all")
    own = MASKS[:, None]

    def both(name: str, x: Tensor) -> Tensor:
        return torch.where(own, other.get_submodule(name)(x), one.get_submodule(name)(x))

    rope, x = rope_of(one.config, POSITIONS, torch.float32), one.model.embed_tokens(TOKENS)
    for number, layer in enumerate(one.model.layers):
        at = f"model.layers.{number}"
        h = layer.input_layernorm(x)
        q, k, v = (both(f"{at}.self_attn.{p}_proj", h).unflatten(-1, (-1, 16)) for p in "qkv")
        q, k = apply_rope(layer.self_attn.q_norm(q), *rope), apply_rope(layer.self_attn.k_norm(k), *rope)
        x = x + both(f"{at}.self_attn.o_proj", attended(q, k, v, 2).flatten(1))
        h = layer.post_attention_layernorm(x)
        gate = F.silu(both(f"{at}.mlp.gate_proj", h))
        x = x + both(f"{at}.mlp.down_proj", gate * both(f"{at}.mlp.up_proj", h))
    expected = one.model.norm(x)
    found = model(TOKENS, POSITIONS, plain(model))
    assert (found - expected).abs().max() <= 1e-4
    untouched = one(TOKENS, POSITIONS, plain(one))
    assert (found - untouched)[MASKS].abs().amax(1).min() > 0.1, "the adapter matters"


@torch.inference_mode()
def test_another_adapter_leaves_the_merged_weights_where_they_are(base: Path, adapter: Path) -> None:
    model = loaded(base, adapter)
    fused = FusedTransformer(model)
    places = [linear.weight.data_ptr() for layer in fused.layers for linear in layer.projections]
    before = fused_rows(model, fused=fused)
    for layer in model.model.layers:
        for part in (*layer.self_attn.children(), *layer.mlp.children()):
            if (old := adapter_of(part)) is not None:
                doubled = [(size, pair and (pair[0], 2 * pair[1])) for size, pair in old.parts]
                MaskRowAdapter(old.masks, doubled).attach(part)
    fused.take_adapter(model)
    found = fused_rows(model, fused=fused)
    assert [linear.weight.data_ptr() for layer in fused.layers for linear in layer.projections] == places
    assert torch.equal(found, fused_rows(model))
    assert torch.equal(found[~MASKS], before[~MASKS])
    assert not torch.equal(found[MASKS], before[MASKS])


@torch.inference_mode()
def test_rows_of_tokens_have_the_base_models_bits(base: Path, adapter: Path) -> None:
    """In the modules, and in every way that engines run them."""
    model, one = loaded(base, adapter), loaded(base, None)
    expected, found = (m(TOKENS, POSITIONS, plain(m)) for m in (one, model))
    assert torch.equal(found[~MASKS], expected[~MASKS])
    for reproducible in (False, True):
        plain_rows, rows = (fused_rows(copy.deepcopy(m), reproducible=reproducible) for m in (one, model))
        assert torch.equal(rows[~MASKS], plain_rows[~MASKS])
        assert (rows - found).abs().max() <= 1e-4
        wanted = torch.tensor([31, 3, 0, 17, 12, 5, 5, 8] * 2)
        some = fused_rows(copy.deepcopy(model), reproducible=reproducible, wanted=wanted)
        assert (some - rows[wanted]).abs().max() <= 1e-5


@same_row_bits
def test_the_feed_forward_may_take_rows_in_parts(base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(base, adapter)
    every = fused_rows(copy.deepcopy(model))
    monkeypatch.setattr("lopa_dist.models.fused.CPU_ROWS", 16)
    assert torch.equal(fused_rows(model), every)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised_base_weights_stay_the_base_models(base: Path, adapter: Path, kind: str) -> None:
    one = load_model(base, torch.float32, CPU, quantization=kind)
    model = load_model(base, torch.float32, CPU, load_adapter(adapter, "masks"), quantization=kind)
    expected, found = fused_rows(one), fused_rows(model)
    assert torch.equal(found[~MASKS], expected[~MASKS])
    assert (found - expected)[MASKS].abs().amax(1).min() > 0.1


def test_tensor_ranks_add_their_outputs_part(base: Path, adapter: Path) -> None:
    whole = fused_rows(loaded(base, adapter))

    def rows(comm: Communicator, tensor: Communicator) -> tuple[Tensor, Tensor]:
        return tuple(fused_rows(loaded(base, each, tensor=tensor), 2) for each in (adapter, None))  # type: ignore[return-value]

    for part, one in on_mesh(1, 2, rows):
        assert torch.equal(part[~MASKS], one[~MASKS])
        assert (part - whole).abs().max() <= 1e-5


def test_the_adapter_brings_the_mask(base: Path, adapter: Path, tmp_path: Path) -> None:
    """Its own tokenizer's, or I-DLM's, which is refused where the vocabulary has no such id."""
    assert not read_config(base).has_mask
    assert read_config(base, adapter).mask_id == loaded(base, adapter).config.mask_id == MASK
    with pytest.raises(CheckpointError, match="mask token's id 151669 is outside the vocabulary of 80"):
        read_config(base, tmp_path)
    masked = write(tmp_path / "dream", KINDS["dream"], {})
    with pytest.raises(CheckpointError, match=r"lora_rows=masks is for causal models.*Dream models are not"):
        read_config(masked, adapter)


def test_what_cannot_be_adapted_by_row_is_named(base: Path, tmp_path: Path) -> None:
    tensors = adapter_for(weights_of(KIND, reference(KIND)), ["q_proj", "lm_head"])
    folder = write_adapter(tmp_path / "head", tensors, target_modules=["q_proj", "lm_head"])
    (folder / "added_tokens.json").write_text('{"<|MASK|>": 79}')
    with pytest.raises(CheckpointError, match=r"lora_rows=masks it cannot change lm_head\.weight"):
        loaded(base, folder)
