"""All layers in one call in C are, to the bit, the network's operations one by one."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lopa_dist.kernels import native
from lopa_dist.kernels.dispatch import KERNELS, by_torch
from lopa_dist.kernels.segment_attention import Segments
from lopa_dist.models.adapter import load_adapter
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.fused import Cache, FusedTransformer
from lopa_dist.models.native_layers import NativeLayers
from lopa_dist.models.transformer import Transformer, rope_of
from tests.models.small_checkpoints import CAUSAL_KINDS, KINDS, reference, weights_of, write
from tests.models.test_adapter import adapter_for, write_adapter
from tests.models.test_mask_rows import TARGETS

pytestmark = [
    pytest.mark.skipif(isinstance(native.found(), str), reason=f"no C here: {native.found()}"),
    pytest.mark.usefixtures("inference"),
]
CPU = torch.device("cpu")
SCRATCH, LONGEST = 100, 2000


class Forward:
    """A forward of two prompts, the first of which has cached tokens, through both forms."""

    def __init__(self, model: Transformer, rows: int, slots: bool = False) -> None:
        self.network, config = FusedTransformer(copy.deepcopy(model)), model.config
        self.rotations = rope_of(config, torch.arange(LONGEST), model.head_weight.dtype)
        generator = torch.Generator().manual_seed(rows)
        self.tokens = torch.randint(0, config.vocab_size, (rows,), generator=generator)
        first = max(rows // 3, 1)
        sizes = np.array([first, rows - first] if rows > first else [first])
        start, n = sizes.cumsum() - sizes, len(sizes)
        place = np.concatenate([np.arange(size) for size in sizes])
        self.positions = torch.from_numpy(place + 7)
        shape = config.layers, SCRATCH + rows, config.kv_heads, config.head_dim
        self.pool = torch.randn(2, *shape, generator=generator).to(model.head_weight.dtype)
        none = np.zeros(n, np.int64)
        cached = np.array([5, 0])[:n]
        self.plan = native.plan(Segments(start, sizes, none, cached, SCRATCH + start, place + 1, None, None, None))
        self.slots = SCRATCH + torch.arange(rows) if slots else None

    def one_by_one(self, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the hidden states, and the pool, of the operations one by one."""
        keys, values = pool = self.pool.clone()
        cos, sin = (table[self.positions] for table in self.rotations)
        cache = Cache(keys, values, SCRATCH, None, self.slots)

        def attend(layer: int, q: Tensor) -> Tensor:
            return native.attend(q, keys[layer], values[layer], self.plan)

        return self.network(self.tokens, self.positions, None, cache, attend, wanted, (cos, sin)), pool

    def at_once(self, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the same of the one call."""
        keys, values = pool = self.pool.clone()
        cache = Cache(keys, values, SCRATCH, None, self.slots)
        whole = NativeLayers(self.network, self.rotations)
        assert whole.runs(self.tokens, cache)
        return whole(self.tokens, self.positions, cache, self.plan, wanted), pool


def small(folder: Path, kind: str = "fast_dllm_v2", dtype: torch.dtype = torch.float32) -> Transformer:
    """A small model of a family."""
    family = KINDS[kind]
    return load_model(write(folder, family, weights_of(family, reference(family))), dtype, CPU)


@pytest.mark.parametrize("dtype", native.NAMES.values(), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_family(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    forward = Forward(small(tmp_path, kind, dtype), 9)
    suits = NativeLayers.suits(forward.network, forward.rotations)
    assert suits == (kind != "llada" or dtype == torch.float32), "LLaDA rotates in fp32, also in bf16"
    if suits:
        for found, expected in zip(forward.at_once(), forward.one_by_one(), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("rows", [1, 2, 40, 1200])
@pytest.mark.parametrize("slots", [False, True])
def test_rows_that_are_wanted(rows: int, slots: bool, tmp_path: Path) -> None:
    """None, some, some of them twice, more than there are; the feed-forward takes 512 rows at once."""
    model = small(tmp_path)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        forward = Forward(model, rows, slots)
        for wanted in (None, torch.arange(0), torch.tensor([rows - 1]), torch.arange(rows).repeat(2).flip(0)):
            for found, expected in zip(forward.at_once(wanted), forward.one_by_one(wanted), strict=True):
                assert torch.equal(found, expected)


def test_rows_in_no_segment_see_nothing(tmp_path: Path) -> None:
    """And whatever lay in the room before takes no part."""
    forward = Forward(small(tmp_path), 12)
    forward.plan = forward.plan._replace(segments=forward.plan.segments[:1], rows=4)
    for found, expected in zip(forward.at_once(), forward.one_by_one(), strict=True):
        assert not found.isnan().any()
        assert torch.equal(found, expected)


def test_the_network_computes_where_somebody_has_hooked_in(tmp_path: Path) -> None:
    forward = Forward(small(tmp_path), 3)
    layers, cache = NativeLayers(forward.network, forward.rotations), Cache(*forward.pool, SCRATCH)
    assert layers.runs(forward.tokens, cache)
    with by_torch(frozenset(KERNELS)):
        assert not layers.runs(forward.tokens, cache)
        assert not NativeLayers.suits(forward.network, forward.rotations)
    assert not layers.runs(forward.tokens, Cache(*forward.pool, SCRATCH, torch.zeros(3, dtype=torch.bool)))
    hook = forward.network.layers[0].out.register_forward_hook(lambda *_: None)
    assert not layers.runs(forward.tokens, cache)
    hook.remove()
    assert layers.runs(forward.tokens, cache)


def test_an_adapter_of_masks_leaves_forwards_without_masks_to_c(tmp_path: Path) -> None:
    """The rows' bits are the same; where a mask is among the rows, the network computes, with the adapter."""
    kind = CAUSAL_KINDS["qwen3"]
    weights = weights_of(kind, reference(kind))
    folder = write_adapter(tmp_path / "lora", adapter_for(weights, TARGETS), target_modules=TARGETS, lora_alpha=0.4)
    (folder / "added_tokens.json").write_text('{"<|MASK|>": 79}')
    base = write(tmp_path / "base", kind, weights)
    forward = Forward(load_model(base, torch.float32, CPU, load_adapter(folder, "masks")), 9)
    mask = forward.network.config.mask_id
    forward.tokens[forward.tokens == mask] = 1
    layers, cache = NativeLayers(forward.network, forward.rotations), Cache(*forward.pool, SCRATCH)
    assert NativeLayers.suits(forward.network, forward.rotations)
    assert layers.runs(forward.tokens, cache)
    plain = Forward(load_model(base, torch.float32, CPU), 9)
    plain.tokens = forward.tokens
    for found, expected, bare in zip(forward.at_once(), forward.one_by_one(), plain.at_once(), strict=True):
        assert torch.equal(found, expected)
        assert torch.equal(found, bare)
    forward.tokens[4] = mask
    assert not layers.runs(forward.tokens, cache)
    hook = forward.network.layers[0].out.register_forward_hook(lambda *_: None)
    forward.tokens[4] = 1
    assert not layers.runs(forward.tokens, cache)
    hook.remove()


def test_what_c_has_not_is_left_to_the_network(tmp_path: Path) -> None:
    half = small(tmp_path).half()
    for model in (half, load_model(tmp_path, torch.float32, CPU, quantization="int8")):
        network = FusedTransformer(model)
        rotations = rope_of(model.config, torch.arange(LONGEST), model.head_weight.dtype)
        assert not NativeLayers.suits(network, rotations)
