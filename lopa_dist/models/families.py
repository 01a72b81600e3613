"""The model families: all that distinguishes one `model_type` of `config.json` from others, in one table.

A new family in one of these layouts is a new entry of `FAMILIES`. What a checkpoint says itself (sizes, ids, tied
embeddings) is read from its files and is never in this table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from lopa_dist.decode.context import CONTEXTS, Context
from lopa_dist.models.config import ModelConfig


@dataclass(frozen=True)
class TrainingPattern:
    """How a model was trained to see text, as values of the decode options with these names."""

    context: str
    block_size: int = 32
    sub_block_size: int | None = None
    edits: bool = False  # filled rows predict their own positions, too, as `decode.tau_edit` needs

    @property
    def scope(self) -> Context:
        """The context's row of `CONTEXTS`."""
        return CONTEXTS[self.context]


PATTERNS = {
    "vanilla": TrainingPattern("dual"),  # rows see all others; without the dual cache, all would run in every step
    "d2f": TrainingPattern("d2f"),  # discrete diffusion forcing
    "block_diffusion": TrainingPattern("blocks"),
    "causal": TrainingPattern("causal"),  # also autoregressive models, which have no masks
}

HF_ONLY: dict[str, Any] = {
    "hidden_act": "silu", "use_sliding_window": False, "use_mrope": False, "partial_rotary_factor": 1.0,
    "quantization_config": None,
}  # fmt: skip
NO_BIAS = HF_ONLY | {"attention_bias": False, "mlp_bias": False}
QWEN3_MOE_ONLY = HF_ONLY | {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
"""The only supported values of these options: a checkpoint whose `config.json` has another is refused."""


LLAMA_MODULES = (
    "embed_tokens", "norm", "layers.*.input_layernorm", "layers.*.post_attention_layernorm",
    *(f"layers.*.self_attn.{name}_proj" for name in "qkvo"),
    *(f"layers.*.mlp.{name}_proj" for name in ("gate", "up", "down")),
)  # fmt: skip
"""The modules of a model in LLaMA's layout, without the `model.` before them."""


@dataclass(frozen=True)
class Family:
    """One `model_type`, or one of several families that share it (`family_of`)."""

    pattern: str  # key of PATTERNS
    shift: bool  # row p-1 predicts position p
    mask_token: str | None  # its text in the tokenizer; None: the family has none
    mask_id: int | None  # of the published checkpoints; used if no file has it
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_key: str | None = None  # key of config.json that says if q and k are rotated in fp32; None: never
    keys: dict[str, str] = field(default_factory=dict)  # transformers' config.json key -> this family's, if different
    only: dict[str, Any] = field(default_factory=lambda: HF_ONLY)
    block_size: int = 32  # as trained, or as usually decoded
    block_key: str | None = None  # key of config.json that overrides it
    sub_block_size: int | None = None  # its own decoder fills blocks in parts of this size, left to right
    eos_id: int | None = None  # used if no file says what ends an answer
    rope_theta: float | None = None  # used if config.json has none, as the authors' programs do
    partial_rotary_factor: float = 1.0  # likewise
    router: str | None = None  # softmax or grouped_sigmoid; None: no mixture of experts
    rope_types: tuple[str, ...] = ("default", "llama3")  # supported ways of changing its frequencies
    edits: bool = False  # whether it is trained to predict filled positions, too
    block_drafts: bool = False  # masks see one another and predict their own positions; tokens before do not see them
    names: dict[str, str] = field(default_factory=dict)  # our module -> the checkpoint's, if different; *: a layer

    @property
    def causal(self) -> bool:
        """Whether rows see nothing after themselves, so that drafts change no text."""
        return PATTERNS[self.pattern].scope.causal


SDAR = Family(  # Qwen3's layout
    pattern="block_diffusion", shift=False, mask_token="<|MASK|>", mask_id=151669, qk_norm=True, only=NO_BIAS,
    block_size=4, block_key="block_size",
)  # fmt: skip
# A2D: Qwen without the causal mask, trained on whole texts (mdlm) or in blocks (bd3lm)
A2D_QWEN2 = Family(pattern="vanilla", shift=False, mask_token="<|mask|>", mask_id=151665, qkv_bias=True)
A2D_QWEN3 = Family(pattern="vanilla", shift=False, mask_token="<|mask|>", mask_id=151669, qk_norm=True, only=NO_BIAS)
LLADA2 = Family(
    pattern="block_diffusion", shift=False, mask_token="<|mask|>", mask_id=156895, qk_norm=True,
    eos_id=156892, router="grouped_sigmoid", partial_rotary_factor=0.5,
    only={key: value for key, value in HF_ONLY.items() if key != "partial_rotary_factor"} | {
        "use_qkv_bias": False, "use_bias": False, "use_qk_norm": True, "norm_head": False, "norm_softmax": False,
        "norm_topk_prob": True, "score_function": "sigmoid", "router_dtype": "fp32", "use_rmsnorm": True,
        "moe_router_enable_expert_bias": True, "image_token_offset": None,
    },
    names={
        "model.embed_tokens": "model.word_embeddings",
        **{f"model.layers.*.self_attn.{x}_proj": "model.layers.*.attention.query_key_value" for x in "qkv"},
        "model.layers.*.self_attn.q_norm": "model.layers.*.attention.query_layernorm",
        "model.layers.*.self_attn.k_norm": "model.layers.*.attention.key_layernorm",
        "model.layers.*.self_attn.o_proj": "model.layers.*.attention.dense",
    },
)  # fmt: skip


FAMILIES = {
    "Dream": Family(  # Dream-v0, DiffuCoder, and the embedded model: Qwen2's layout
        pattern="vanilla", shift=True, mask_token="<|mask|>", mask_id=151666, qkv_bias=True,
    ),
    "llada": Family(  # LLaDA-8B and LLaDA-1.5: LLaMA's layout under OLMo's names
        pattern="vanilla", shift=False, mask_token="<|mdm_mask|>", mask_id=126336,
        rope_key="rope_full_precision",
        keys={
            "vocab_size": "embedding_size", "hidden_size": "d_model", "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads",
            "intermediate_size": "mlp_hidden_size", "max_position_embeddings": "max_sequence_length",
            "tie_word_embeddings": "weight_tying",
        },
        only={
            "activation_type": "silu", "alibi": False, "attention_layer_norm": False, "bias_for_layer_norm": False,
            "block_group_size": 1, "block_type": "llama", "clip_qkv": None, "include_bias": False,
            "include_qkv_bias": False, "input_emb_norm": False, "layer_norm_type": "rms",
            "layer_norm_with_affine": True, "multi_query_attention": False, "rope": True, "scale_logits": False,
        },
        names={
            "model.embed_tokens": "model.transformer.wte",
            "model.layers.*.input_layernorm": "model.transformer.blocks.*.attn_norm",
            "model.layers.*.self_attn.q_proj": "model.transformer.blocks.*.q_proj",
            "model.layers.*.self_attn.k_proj": "model.transformer.blocks.*.k_proj",
            "model.layers.*.self_attn.v_proj": "model.transformer.blocks.*.v_proj",
            "model.layers.*.self_attn.o_proj": "model.transformer.blocks.*.attn_out",
            "model.layers.*.post_attention_layernorm": "model.transformer.blocks.*.ff_norm",
            "model.layers.*.mlp.gate_proj": "model.transformer.blocks.*.ff_proj",
            "model.layers.*.mlp.up_proj": "model.transformer.blocks.*.up_proj",
            "model.layers.*.mlp.down_proj": "model.transformer.blocks.*.ff_out",
            "model.norm": "model.transformer.ln_f",
            "lm_head": "model.transformer.ff_out",
        },
    ),
    "illada": Family(  # iLLaDA-8B: LLaMA's layout
        pattern="vanilla", shift=False, mask_token="<[MASK]>", mask_id=5,
        only=NO_BIAS | {"layer_norm_eps": None},
    ),
    "sdar": SDAR,
    "sdar_moe": replace(SDAR, only=QWEN3_MOE_ONLY, router="softmax"),  # SDAR-30B-A3B: Qwen3-MoE's layout
    "llada2_moe": LLADA2,  # LLaDA2.0 (arXiv 2512.15745)
    "LLaDA2.1": replace(LLADA2, edits=True),  # arXiv 2602.08676
    "rnd1": Family(  # RND1: Qwen3-MoE's layout
        pattern="vanilla", shift=True, mask_token="<|MASK|>", mask_id=151669, qk_norm=True,
        only=QWEN3_MOE_ONLY, router="softmax",
    ),
    "Fast_dLLM_Qwen": Family(  # Fast-dLLM v2: Qwen2's layout
        pattern="block_diffusion", shift=True, mask_token="|<MASK>|", mask_id=151665, qkv_bias=True,
        block_key="bd_size", sub_block_size=8,
    ),
    "Stable-DiffCoder": Family(  # Seed-Coder's layout, which is LLaMA's
        pattern="block_diffusion", shift=False, mask_token="<[MASK▁TOKEN]>", mask_id=5,
        only=NO_BIAS | {"layer_norm_eps": None}, block_size=4,
    ),
    "a2d-qwen2": A2D_QWEN2,
    "a2d-qwen2-bd3lm": replace(A2D_QWEN2, pattern="block_diffusion", block_key="block_size"),
    "a2d-qwen3": A2D_QWEN3,
    "a2d-qwen3-bd3lm": replace(A2D_QWEN3, pattern="block_diffusion", block_key="block_size"),
    "I-DLM": Family(  # I-DLM-8B and -32B (arXiv 2604.11035): Qwen3's layout
        pattern="causal", shift=True, mask_token="<|MASK|>", mask_id=151669, qk_norm=True, only=NO_BIAS,
    ),
    "nemotron_labs_diffusion": Family(  # Nemotron-Labs-Diffusion 3B, 8B, 14B (arXiv 2607.05722): Ministral 3's layout
        pattern="causal", shift=True, mask_token="<SPECIAL_100>", mask_id=None, rope_types=("yarn",), block_drafts=True,
        only=NO_BIAS | {"sliding_window": None, "vision_config": None},
        names={f"model.{name}": f"encoder.{name}" for name in LLAMA_MODULES} | {"lm_head": "diffusion_head"},
    ),
    "lopa_causal": Family(  # the causal model in the package: Qwen2's layout
        pattern="causal", shift=True, mask_token="<|mask|>", mask_id=1, qkv_bias=True,
    ),
    # autoregressive models, with which diffusion models are compared
    "qwen2": Family(pattern="causal", shift=True, mask_token=None, mask_id=None, qkv_bias=True),
    "qwen3": Family(pattern="causal", shift=True, mask_token=None, mask_id=None, qk_norm=True, only=NO_BIAS),
    "llama": Family(  # Llama 2's files have no rope_theta
        pattern="causal", shift=True, mask_token=None, mask_id=None, only=NO_BIAS, rope_theta=10000.0,
    ),
}  # fmt: skip


def training_pattern(config: ModelConfig, pattern: str = "auto") -> TrainingPattern:
    """Return how this model was trained: its family's pattern, or `pattern`, the user's choice (`model.pattern`).

    Raises:
        ValueError: the model is causal and the pattern is not, or the reverse without a logit shift.
    """
    family = FAMILIES[config.family]
    if pattern != "auto":
        if family.causal and pattern != family.pattern:
            raise ValueError(f"model.pattern={pattern}: {config.family} models are causal; leave it at auto")
        if PATTERNS[pattern].scope.causal and not config.shift:
            raise ValueError(
                f"model.pattern={pattern}: in {config.family} models a row predicts its own position, not the next one"
            )
    trained = PATTERNS[family.pattern if pattern == "auto" else pattern]
    return replace(trained, block_size=config.block_size, sub_block_size=family.sub_block_size, edits=family.edits)


def check_drafts(config: ModelConfig, drafts: int | str, branches: int = 0, draft_from: str = "auto") -> None:
    """Raise a ValueError if a model has no masks for the drafts asked for, or cannot have these branches."""
    if branches and config.block_drafts:
        raise ValueError(
            f"decode.branches={branches}: {config.family} models draft in a block after cached tokens, and a branch's "
            "tokens are not cached: set decode.branches=0"
        )
    if drafts and draft_from == "masks" and not config.has_mask:
        raise ValueError(
            f"decode.draft_from=masks needs a mask token, whose rows predict tokens further on; {config.family} models "
            "have none: leave it at auto, which drafts from text, or set decode.drafts=0"
        )


def checkpoint_name(family: str, ours: str) -> str:
    """Return the checkpoint's name, in this family, for our parameter `ours`."""
    module, _, kind = ours.rpartition(".")
    layer = "".join(re.findall(r"\d+", module)[:1])
    starred = re.sub(r"\d+", "*", module, count=1)
    return f"{FAMILIES[family].names.get(starred, starred).replace('*', layer)}.{kind}"
