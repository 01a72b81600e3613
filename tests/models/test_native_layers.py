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
        assert whole.runs(cache)
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
    assert layers.runs(cache)
    with by_torch(frozenset(KERNELS)):
        assert not layers.runs(cache)
        assert not NativeLayers.suits(forward.network, forward.rotations)
    assert not layers.runs(Cache(*forward.pool, SCRATCH, torch.zeros(3, dtype=torch.bool)))
    hook = forward.network.layers[0].out.register_forward_hook(lambda *_: None)
    assert not layers.runs(cache)
    hook.remove()
    assert layers.runs(cache)


def adapted(folder: Path, targets: list[str], dtype: torch.dtype, rank: int = 4) -> tuple[Transformer, Transformer]:
    """A small model with an adapter for rows that draft, and without it."""
    kind = CAUSAL_KINDS["qwen3"]
    weights = weights_of(kind, reference(kind))
    pairs = adapter_for(weights, targets, rank)
    lora = write_adapter(folder / "lora", pairs, target_modules=targets, lora_alpha=0.4, r=rank)
    (lora / "added_tokens.json").write_text('{"<|MASK|>": 79}')
    base = write(folder / "base", kind, weights)
    return load_model(base, dtype, CPU, load_adapter(lora, "masks")), load_model(base, dtype, CPU)


@pytest.mark.parametrize("targets", [TARGETS, ["v_proj", "down_proj"]], ids=["all", "some"])
@pytest.mark.parametrize("dtype", native.NAMES.values(), ids=str)
def test_an_adapter_for_rows_that_draft(dtype: torch.dtype, targets: list[str], tmp_path: Path) -> None:
    """It changes the rows that draft, wherever they stand, and no bit of any other row before attention."""
    model, base = adapted(tmp_path, targets, dtype)
    for rows, drafting in ((9, []), (9, [4]), (9, [0, 3, 8]), (1100, range(500, 1060, 7))):
        for wanted in (None, torch.arange(0), torch.tensor([0, 3, 3]), torch.arange(rows).flip(0)):
            forward, plain = Forward(model, rows), Forward(base, rows)
            assert NativeLayers.suits(forward.network, forward.rotations)
            mask = forward.network.config.mask_id
            forward.tokens[forward.tokens == mask] = 1
            forward.tokens[list(drafting)] = mask
            plain.tokens = forward.tokens
            found, expected, bare = forward.at_once(wanted), forward.one_by_one(wanted), plain.at_once(wanted)
            assert all(torch.equal(*both) for both in zip(found, expected, strict=True))
            (_, values), (_, bare_values) = found[1], bare[1]
            changed = (values[0, SCRATCH:] != bare_values[0, SCRATCH:]).flatten(1).any(1)
            assert changed.nonzero()[:, 0].tolist() == list(drafting)


def test_an_adapter_that_rests(tmp_path: Path) -> None:
    """While others are trained, rows that draft run with the base weights alone."""
    forward, plain = (Forward(model, 9) for model in adapted(tmp_path, TARGETS, torch.float32))
    forward.tokens[4] = plain.tokens[4] = forward.network.config.mask_id
    assert not torch.equal(forward.at_once()[0], plain.at_once()[0])
    assert forward.network.mask_rows is not None
    with forward.network.mask_rows.rest():
        assert torch.equal(forward.at_once()[0], plain.at_once()[0])


def test_adapters_of_odd_rank_in_bf16(tmp_path: Path) -> None:
    """In bf16 C multiplies pairs of numbers."""
    for dtype, suits in ((torch.float32, True), (torch.bfloat16, False)):
        folder = tmp_path / str(suits)
        folder.mkdir()
        forward = Forward(adapted(folder, TARGETS, dtype, rank=3)[0], 9)
        assert NativeLayers.suits(forward.network, forward.rotations) == suits


def test_what_c_has_not_is_left_to_the_network(tmp_path: Path) -> None:
    half = small(tmp_path).half()
    for model in (half, load_model(tmp_path, torch.float32, CPU, quantization="int8")):
        network = FusedTransformer(model)
        rotations = rope_of(model.config, torch.arange(LONGEST), model.head_weight.dtype)
        assert not NativeLayers.suits(network, rotations)
