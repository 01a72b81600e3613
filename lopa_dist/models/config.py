"""What the transformer must know about a checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lopa_dist.kernels.rope_scaling import Llama3Scaling, QueryScaling, YarnScaling

QUANTIZATIONS = "fp8", "int8"  # what weights may be quantised to (`models.quantize`)
SIZES = (
    "vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "intermediate_size", "max_positions",
)  # fmt: skip


@dataclass(frozen=True)
class Experts:
    """The mixture of experts in a model's layers."""

    count: int
    chosen: int  # how many experts a row goes through
    size: int  # intermediate size of an expert
    router: str  # softmax or grouped_sigmoid (`kernels.routing.choose`)
    renormalise: bool  # whether the chosen experts' weights are scaled to sum to 1
    scale: float = 1.0  # factor of these weights
    groups: int = 1  # groups of equally many experts
    chosen_groups: int = 1  # groups that a row chooses first; its experts come from these
    shared: int = 0  # intermediate size of the expert that all rows go through; 0: none
    dense_layers: int = 0  # this many first layers have one feed-forward instead

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.count:
            raise ValueError(f"num_experts_per_tok={self.chosen}: must be between 1 and num_experts={self.count}")
        if self.count % self.groups:
            raise ValueError(f"n_group={self.groups}: must divide num_experts={self.count}")
        if not 1 <= self.chosen_groups <= self.groups or self.chosen > self.chosen_groups * (self.count // self.groups):
            raise ValueError(
                f"topk_group={self.chosen_groups}: must be between 1 and n_group={self.groups}, and its groups of "
                f"{self.count // self.groups} experts must have num_experts_per_tok={self.chosen}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """The shape and conventions of one model, diffusion or autoregressive.

    `family` is a key of `families.FAMILIES`. With `shift`, the row of position p-1 predicts the token at position p.

    A model without a mask token uses the first id after its vocabulary as `mask_id`. That id marks what is not filled
    yet; it is never predicted, is in no prompt, and has no embedding, so a row of it is an error. An adapter may bring
    an embedding for it (`learned_mask`), which changes nothing that the model itself reads or writes.

    Raises:
        ValueError: a size or a constant is out of range.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    rope_theta: float
    qkv_bias: bool
    tied: bool
    shift: bool
    mask_id: int
    eos_ids: tuple[int, ...]  # the checkpoint's eos_token_id first, then its end-of-turn tokens
    pad_id: int
    max_positions: int
    rope_fp32: bool = False  # queries and keys are rotated in fp32, whatever the weights' precision
    qk_norm: bool = False  # queries and keys are normalised per head before the rotation
    rope_scaling: Llama3Scaling | YarnScaling | None = None
    query_scaling: QueryScaling | None = None
    experts: Experts | None = None  # instead of one feed-forward per layer
    rotated: int | None = None  # dimensions of a head that are rotated; None: all
    learned_mask: bool = False  # whether the embeddings have one more row, for a mask after the vocabulary
    block_drafts: bool = False  # masks see one another and predict their own positions; only with `shift`
    block_size: int = 32  # tokens per block, as trained, or as usually decoded
    # what its generation_config.json asks for that changes texts and is not done here
    not_applied: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: must be a positive integer")
        for name in ("rms_eps", "rope_theta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r}: must be a positive number")

    @property
    def has_mask(self) -> bool:
        """Return whether the model has a mask token. Without one it can only predict the next token."""
        return self.mask_id < self.vocab_size or self.learned_mask
