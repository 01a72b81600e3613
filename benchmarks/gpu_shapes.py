"""What the GPU programs run: models with random weights, windows of a sequence, and a runner for them.

On a CPU, small toy models replace the real shapes. Then the programs only show that they work, and measure nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.runner import Runner
from lopa_dist.engine.runners import FUSED, Runners
from lopa_dist.kernels.meta_attention import MetaPlan
from lopa_dist.kernels.sampling import Sampling
from lopa_dist.kernels.segment_attention import Segments
from lopa_dist.kernels.tiles import Capacity, Split, tile, tile_rows_for
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.quantize import quantize
from lopa_dist.models.transformer import Transformer
from lopa_dist.rows.forward_batch import ForwardBatch, Heads, Predictions, RowTable, Windows
from lopa_dist.rows.share import ALONE

CPU = torch.device("cpu")
DREAM = ModelConfig(
    family="Dream", vocab_size=152064, hidden_size=3584, layers=28, heads=28, kv_heads=4, head_dim=128,
    intermediate_size=18944, rms_eps=1e-6, rope_theta=1e6, qkv_bias=True, tied=False, shift=True, mask_id=151666,
    eos_ids=(151643,), pad_id=151643, max_positions=131072,
)  # fmt: skip
LLADA = ModelConfig(
    family="llada", vocab_size=126464, hidden_size=4096, layers=32, heads=32, kv_heads=32, head_dim=128,
    intermediate_size=12288, rms_eps=1e-5, rope_theta=5e5, qkv_bias=False, tied=False, shift=False, mask_id=126336,
    eos_ids=(126081,), pad_id=126081, max_positions=4096,
)  # fmt: skip
QWEN = ModelConfig(
    family="idlm", vocab_size=151936, hidden_size=4096, layers=36, heads=32, kv_heads=8, head_dim=128,
    intermediate_size=12288, rms_eps=1e-6, rope_theta=1e6, qkv_bias=False, tied=False, shift=True, mask_id=151669,
    eos_ids=(151645,), pad_id=151643, max_positions=40960, qk_norm=True,
)  # fmt: skip
GRAPHS = EngineConfig(1, attention="meta", graphs="always")  # on a CPU, the same buffers without graphs


def toy(shape: ModelConfig) -> ModelConfig:
    """Return the shape of a small model that has as many query heads per K/V head as `shape`."""
    kv_heads = max(1, 7 * shape.kv_heads // shape.heads)
    return replace(
        shape, vocab_size=512, hidden_size=64, layers=2, heads=7, kv_heads=kv_heads, head_dim=16, intermediate_size=96,
        mask_id=511, eos_ids=(510,), pad_id=510,
    )  # fmt: skip


def models(device: torch.device) -> dict[str, ModelConfig]:
    """Return the shapes of the models by their names; on a CPU, toys of them."""
    both = {"Dream-7B": DREAM, "LLaDA-8B": LLADA}
    return both if device.type == "cuda" else {name: toy(shape) for name, shape in both.items()}


def causal_model(device: torch.device) -> ModelConfig:
    """Return the shape of an I-DLM model in the size of Qwen3-8B; on a CPU, a toy of it."""
    return QWEN if device.type == "cuda" else toy(QWEN)


def dtype_of(device: torch.device) -> torch.dtype:
    """Return the precision that is checked on a device."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def noise(device: torch.device, *shape: int) -> Tensor:
    """Return normally distributed random numbers in the precision that is checked."""
    return torch.randn(shape, device=device, dtype=dtype_of(device))


def has_fp8(device: torch.device) -> bool:
    """Return whether a device multiplies in fp8; a CPU does, because torch computes there what a GPU would."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


def random_model(config: ModelConfig, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Transformer:
    """Return a model with random weights, which are drawn on its device."""
    with torch.device("meta"):
        model = Transformer(config)
    model = model.to(dtype).to_empty(device=device)
    for name, parameter in model.named_parameters():
        parameter.data.fill_(1) if "norm" in name else parameter.data.normal_(0, 0.02)
    return model.requires_grad_(False).eval()


class Weights:
    """The one model that a stage has in memory; making it is a separate fact, because memory may run out."""

    model: Transformer  # after `make`

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def make(self, shape: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
        """Make a random model, which replaces the previous one; return the number of its weights."""
        if hasattr(self, "model"):
            FUSED.pop(self.model, None)
            del self.model
        self.model = random_model(shape, self.device, dtype)
        return {"weights": sum(parameter.numel() for parameter in self.model.parameters())}

    def to_fp8(self) -> dict[str, Any]:
        """Quantise the model to fp8."""
        FUSED.pop(self.model, None)
        quantize(self.model, "fp8")
        return {}


def windows(count: int, window: int, prefix: int, mask_id: int, device: torch.device, every: int = 2) -> ForwardBatch:
    """Return a batch of `count` windows of one sequence after `prefix` cached tokens.

    Each window has `window` rows. Of all rows together, each `every`-th one predicts.
    """
    numbers, total = np.arange(count), count * window
    rows = np.full(count, window)
    head = torch.arange(0, total, every, device=device)
    return ForwardBatch(
        table=RowTable(
            sequence=0 * numbers, branch=numbers, start=numbers * window, rows=rows, shared=np.full(count, prefix),
            first=np.zeros(count, int), hi=np.full(total, window), depth=np.zeros(total, int),
        ),
        tokens=torch.full((total,), mask_id, device=device),
        positions=prefix + torch.arange(window, device=device).repeat(count),
        heads=Heads(
            predict=lambda: Predictions(head, None, head), slots=torch.arange(len(head), device=device),
            sequence=np.zeros(len(head), int), branches=1, columns=len(head),
        ),
        share=ALONE, computed=np.array([total]), prefill=None, windows=Windows(rows * 0, rows, window, None),
    )  # fmt: skip


def plan_of(
    segments: Segments, rows: int, shape: ModelConfig, stack: int, split: Split | None, device: torch.device
) -> MetaPlan:
    """Return a plan for the attention of `rows` rows, of which the segments' come first; a stack has `stack` rows."""
    tiles = tile(segments, tile_rows_for(shape.heads // shape.kv_heads, stack), split)
    capacity = Capacity(len(tiles.table), len(tiles.merges), tiles.parts)
    sizes = shape.heads, shape.kv_heads, shape.head_dim
    plan = MetaPlan(rows, capacity, *sizes, tiles.tile_rows, tiles.scratch, device)
    plan.fill(tiles)
    return plan


def runner_of(
    model: Transformer,
    branches: int,
    window: int,
    prefix: int,
    options: EngineConfig,
    sampling: Sampling | None = None,
    longest: int = 0,
) -> Runner:
    """Return a runner for batches of `windows`, over a pool of random K/V; prompts may have `longest` tokens."""
    pool = KVPool(model.config, 1, prefix, model.head_weight.dtype, model.head_weight.device)
    pool.allocate(0, prefix)
    pool.reserve(branches * window)
    pool.keys.normal_()
    pool.values.normal_()
    decode = DecodeConfig(
        verify="confidence", drafts=0, branches=branches - 1, block_size=window, max_active_blocks=1,
        max_new_tokens=window,
    )  # fmt: skip
    return Runners(model, decode, options).make(pool, sampling or Sampling(), 1, longest or prefix)


def qwen2(model: Transformer, device: torch.device) -> Any:
    """Return transformers' Qwen2 with a model's weights, in the same memory; each of its rows sees all others."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    shape = model.config
    config = Qwen2Config(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, rms_norm_eps=shape.rms_eps, rope_theta=shape.rope_theta, tie_word_embeddings=False,
        attn_implementation="sdpa", pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        qwen = Qwen2ForCausalLM(config).to(model.head_weight.dtype)
    qwen.load_state_dict(model.state_dict(), assign=True)
    qwen.model.rotary_emb = Qwen2RotaryEmbedding(config=config).to(device)
    for layer in qwen.model.layers:
        layer.self_attn.is_causal = False
    return qwen.requires_grad_(False).eval()
