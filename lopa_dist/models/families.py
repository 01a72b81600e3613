"""The model families: all that distinguishes one `model_type` of `config.json` from others, in one table.

A new family in one of these layouts is a new entry of `FAMILIES`. What a checkpoint says itself (sizes, ids, tied
embeddings) is read from its files and is never in this table.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

from lopa_dist.decode.context import CONTEXTS, Context
from lopa_dist.kernels.rope_scaling import Llama3Scaling, QueryScaling, YarnScaling
from lopa_dist.models.config import Experts, ModelConfig
from lopa_dist.models.files import unsupported


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

END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|role_end|>")
"""Tokens that end an answer besides the files' eos_token_id; in an autoregressive model only if its chat template
contains them. transformers and vLLM use eos_token_id alone, so texts may end earlier here."""

HF_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "rms_eps": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
}
"""Our fields -> keys of `config.json` in transformers' Llama, Qwen2 and Qwen3."""

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


ROTATED = "partial_rotary_factor"
LAYOUTS = "docs/models.md#a-checkpoint-of-your-own"
SDAR_BLOCKS = (4, 8, 16, 32, 64)
I_DLM_BLOCKS = (1, 2, 3)


def family_of(raw: dict[str, Any], name: str = "") -> str:
    """Return the key of `FAMILIES` that a checkpoint belongs to.

    That is its `model_type`, except where families share one:

    - I-DLM (arXiv 2604.11035) calls itself ``sdar``. Its weights have the same names, but it is causal and has the
      logit shift, so run as SDAR it would write wrong text without an error. `use_regular_causal` tells them apart,
      else `block_size`: SDAR's blocks have 4 to 64 tokens, I-DLM's strides 1 to 3. A name that says I-DLM where the
      blocks say SDAR is refused, as is a checkpoint with neither, unless it has SDAR's or TraDo's name.
    - A2D models say only by their name or `block_size` whether they were trained in blocks.
    - Stable-DiffCoder calls itself ``llama``, but its code has its name.

    Any other autoregressive `model_type` with code or masks of its own is refused: diffusion models that were converted
    from Llama or Qwen may keep it.

    Args:
        raw: its `config.json`.
        name: of its folder or repository.

    Raises:
        ValueError: the family is not known, or cannot be told from others.
    """
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type {kind!r} is not known; known: {', '.join(FAMILIES)} ({LAYOUTS})")
    if kind == "llama" and re.search("(stable|seed)_diffcoder", str(raw.get("auto_map"))):
        return "Stable-DiffCoder"
    if kind == "llada2_moe":
        return llada2(raw, name)
    if kind.startswith("a2d") and not kind.endswith("bd3lm"):
        blocks = raw.get("block_size", 32 if "bd3lm" in name else 0 if "mdlm" in name else None)
        if blocks is None:
            raise ValueError(
                f"model_type {kind!r}: neither config.json nor the name {name!r} says if it was trained in blocks; "
                "set block_size in config.json: of its blocks (bd3lm), or 0 (mdlm)"
            )
        return f"{kind}-bd3lm" if blocks else kind
    if FAMILIES[kind].mask_token is None:
        for key in ("auto_map", "mask_token_id"):
            if raw.get(key) is not None:
                raise ValueError(
                    f"model_type {kind!r} with {key}={raw[key]!r}: not a plain {kind} model but one with code or masks "
                    f"of its own, which is not known. A diffusion model has the model_type of its family ({LAYOUTS})"
                )
    if kind not in ("sdar", "sdar_moe"):
        return kind
    block, causal = block_size(FAMILIES[kind], raw, name), raw.get("use_regular_causal")
    if kind == "sdar" and (causal or (causal is None and block in I_DLM_BLOCKS)):
        return "I-DLM"
    if causal is None and (block not in SDAR_BLOCKS or "i-dlm" in name.lower()):
        raise ValueError(
            f"model_type {kind!r} with block_size={block} in {name or 'this checkpoint'}: SDAR's blocks are of "
            f"{', '.join(map(str, SDAR_BLOCKS))} tokens, and I-DLM models have this model_type, too. Set "
            "use_regular_causal in config.json: false for SDAR, true for I-DLM"
        )
    if causal is None and raw.get("block_size") is None and not re.search("sdar|trado", name, re.IGNORECASE):
        raise ValueError(
            f"model_type {kind!r} without block_size: SDAR's blocks are of {', '.join(map(str, SDAR_BLOCKS))} tokens, "
            "and I-DLM models have this model_type, too. Set block_size in config.json, and use_regular_causal: false "
            "for SDAR, true for I-DLM"
        )
    return kind


def llada2(raw: dict[str, Any], name: str) -> str:
    """Return which LLaDA2 a checkpoint is: by its name, else by its context length. Arguments as in `family_of`."""
    length = raw.get("max_position_embeddings", 0)
    numbered = re.search(r"LLaDA2\.(\d)", name)
    version = int(numbered[1]) if numbered else 0 if length <= 16384 else 1 if length <= 32768 else 2
    if version > 1:
        raise ValueError(
            f"model_type 'llada2_moe' with max_position_embeddings={length} in {name or 'this checkpoint'} is "
            "LLaDA2.2, which inserts and deletes tokens and chooses experts by the block: it is not supported. If it "
            "is LLaDA2.1 or 2.0, name its folder so"
        )
    return "LLaDA2.1" if version else "llada2_moe"


def model_config(
    raw: dict[str, Any], generation: dict[str, Any], special: dict[str, int], name: str = "", template: str = ""
) -> ModelConfig:
    """Return a checkpoint's configuration.

    Args:
        raw: its `config.json`.
        generation: its `generation_config.json`, or empty.
        special: ids of its tokenizer's special tokens.
        name: of its folder or repository.
        template: its chat template, or empty.

    Raises:
        KeyError: config.json lacks a key that it must have.
        ValueError: a family or option is not supported.
    """
    kind = family_of(raw, name)
    family = FAMILIES[kind]
    rope = rope_options(family, raw)
    if message := unsupported(raw | {ROTATED: rope[ROTATED]}, family.only):
        raise ValueError(message)
    if others := set(raw.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(
            f"layer_types of {', '.join(map(repr, sorted(others)))} are not supported, only 'full_attention'"
        )
    sizes = {ours: raw[family.keys.get(key, key)] for ours, key in HF_KEYS.items()}
    sizes["kv_heads"] = sizes["kv_heads"] or sizes["heads"]  # null: as many
    turns = {name: special[name] for name in END_OF_TURN if name in special and (family.mask_token or name in template)}
    eos = eos_ids(raw, generation, turns, sizes["vocab_size"], family.eos_id)
    head_dim = raw.get("head_dim") or sizes["hidden_size"] // sizes["heads"]
    rotated = int(head_dim * rope[ROTATED])
    return ModelConfig(
        **sizes,
        family=kind,
        head_dim=head_dim,
        rotated=None if rotated == head_dim else rotated,
        rope_theta=rope["rope_theta"],
        rope_scaling=rope_scaling(rope, family.rope_types),
        query_scaling=query_scaling(rope, family.rope_types),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        rope_fp32=family.rope_key is not None and raw.get(family.rope_key, True),
        tied=raw.get(family.keys.get("tie_word_embeddings", "tie_word_embeddings"), False),
        shift=family.shift,
        block_drafts=family.block_drafts,
        mask_id=mask_id(family, raw, generation, special, sizes["vocab_size"]),
        eos_ids=eos,
        pad_id=next(id for id in (raw.get("pad_token_id"), generation.get("pad_token_id"), eos[0]) if id is not None),
        experts=experts(family, raw),
        block_size=block_size(family, raw, name),
    )


def rope_options(family: Family, raw: dict[str, Any]) -> dict[str, Any]:
    """Return how positions become angles, with the base and the share of each head that is rotated.

    That is `rope_parameters`; in older files `rope_scaling`, with the rest beside it.

    Raises:
        KeyError: no file has the base, and neither have the authors' programs.
        ValueError: two places differ.
    """
    newer, older = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    if newer and older and named(newer) != named(older):
        raise ValueError("rope_parameters and rope_scaling differ, and programs differ in which they take: remove one")
    rope = newer or older
    theta = rope.get("rope_theta", raw.get("rope_theta", family.rope_theta))
    if theta is None:
        raise KeyError("rope_theta")
    shares = [place[ROTATED] for place in (rope, raw) if place.get(ROTATED) is not None]
    if len(set(shares)) > 1:
        raise ValueError(f"{ROTATED} is {shares[1]} in config.json and {shares[0]} in its rope_parameters: remove one")
    return rope | {"rope_theta": theta, ROTATED: shares[0] if shares else family.partial_rotary_factor}


def named(rope: dict[str, Any]) -> dict[str, Any]:
    """Return a scaling of positions by its newer names, without the base, which older files have elsewhere."""
    return {"rope_type" if key == "type" else key: value for key, value in rope.items() if key != "rope_theta"}


def block_size(family: Family, raw: dict[str, Any], name: str) -> int:
    """Return the tokens per block: as in config.json, else in SDAR's names (SDAR-4B-Chat-b32), else of the family.

    Raises:
        ValueError: config.json and name contradict each other.
    """
    in_file = raw.get(family.block_key or "")
    if isinstance(in_file, bool) or not isinstance(in_file, int | None):
        raise ValueError(f"{family.block_key}={in_file!r}: must be a number of tokens")
    in_name = re.search(r"SDAR.*-b(\d+)(?=-|$)", name)
    if in_file and in_name and int(in_name[1]) != in_file:
        raise ValueError(f"block_size={in_file}, but the name {name} says {in_name[1]}; correct whichever is wrong")
    return in_file or (int(in_name[1]) if in_name else family.block_size)


def experts(family: Family, raw: dict[str, Any]) -> Experts | None:
    """Return a model's mixture of experts, or None."""
    if family.router is None:
        return None
    size = raw["moe_intermediate_size"]
    mixture = Experts(raw["num_experts"], raw["num_experts_per_tok"], size, family.router, renormalise=True)
    if family.router == "softmax":
        return replace(mixture, renormalise=raw["norm_topk_prob"])
    return replace(
        mixture,
        scale=raw["routed_scaling_factor"],
        groups=raw["n_group"],
        chosen_groups=raw["topk_group"],
        shared=size * (raw["num_shared_experts"] or 0),
        dense_layers=raw["first_k_dense_replace"],
    )


def rope_scaling(rope: dict[str, Any], types: tuple[str, ...]) -> Llama3Scaling | YarnScaling | None:
    """Return how frequencies are changed for long contexts, or None.

    Raises:
        ValueError: it is none of the `types` that the family supports, or has unsupported options.
    """
    kind = rope.get("rope_type", rope.get("type"))
    if kind is None and (others := sorted(rope.keys() - {"rope_theta", "llama_4_scaling_beta", ROTATED})):
        raise ValueError(
            f"rope_scaling has {', '.join(others)}, but no rope_type: set it there, 'default' for no scaling"
        )
    kind = "default" if kind is None else kind
    if kind not in types:
        allowed = " and ".join(map(repr, types))
        raise ValueError(f"rope_scaling of type {kind!r} is not supported, only {allowed}")
    if kind == "default":
        return None
    if kind == "llama3":
        keys: tuple[str, ...] = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
        return Llama3Scaling(*(positive(rope, key) for key in keys))
    if message := unsupported(rope, {"attention_factor": None, "truncate": True}):
        raise ValueError(f"rope_parameters: {message}")
    if not rope["mscale"] or rope["mscale"] != rope["mscale_all_dim"]:  # else cosines and sines would be scaled
        raise ValueError(
            f"rope_parameters: mscale={rope['mscale']!r} with mscale_all_dim={rope['mscale_all_dim']!r} is not "
            "supported, only equal ones"
        )
    keys = "rope_theta", "factor", "beta_fast", "beta_slow", "original_max_position_embeddings"
    return YarnScaling(*(positive(rope, key) for key in keys))


def positive(rope: dict[str, Any], key: str) -> Any:
    """Return the number under `key`; raise a ValueError unless it is positive and finite."""
    value = rope[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"rope_scaling: {key}={value!r} must be a positive number")
    return value


def query_scaling(rope: dict[str, Any], types: tuple[str, ...]) -> QueryScaling | None:
    """Return how queries grow along a text, in families with YaRN.

    Raises:
        ValueError: a checkpoint of another family asks for it.
    """
    key = "llama_4_scaling_beta"
    if "yarn" in types:
        return QueryScaling(rope[key], rope["original_max_position_embeddings"])
    if rope.get(key):
        raise ValueError(f"{key}={rope[key]!r} is not supported in this family")
    return None


def mask_id(
    family: Family, raw: dict[str, Any], generation: dict[str, Any], special: dict[str, int], vocabulary: int
) -> int:
    """Return the mask token's id: from the files, else the tokenizer's token of that name, else the family's.

    If the family has none, it is the first id after the vocabulary.

    Raises:
        ValueError: there is none, or it is not an id in the vocabulary.
    """
    if family.mask_token is None:
        return vocabulary
    places = raw.get("mask_token_id"), generation.get("mask_token_id"), special.get(family.mask_token), family.mask_id
    mask = next((id for id in places if id is not None), None)
    if isinstance(mask, bool) or not isinstance(mask, int | None):
        raise ValueError(f"mask_token_id={mask!r}: must be the number of the mask token, not its text")
    if mask is None:
        raise ValueError(f"no mask_token_id, and the tokenizer has no {family.mask_token!r}: set it in config.json")
    if not 0 <= mask < vocabulary:
        raise ValueError(
            f"the mask token's id {mask} is outside the vocabulary of {vocabulary}; set mask_token_id in config.json "
            f"(the tokenizer has no {family.mask_token!r})"
        )
    return mask


def eos_ids(
    raw: dict[str, Any], generation: dict[str, Any], turns: dict[str, int], vocabulary: int, usual: int | None = None
) -> tuple[int, ...]:
    """Return every token that ends an answer, those of `config.json` first, `turns` last; `usual` if no file has any.

    Raises:
        ValueError: there is none, or one is not an id in the vocabulary, so that no answer would end with it.
    """
    ids: list[Any] = []
    for source in (raw, generation):
        eos = source.get("eos_token_id")
        ids += eos if isinstance(eos, list) else [] if eos is None else [eos]
    for eos in ids:
        if isinstance(eos, bool) or not isinstance(eos, int) or not 0 <= eos < vocabulary:
            raise ValueError(
                f"eos_token_id={eos!r}, here or in generation_config.json: must be the number of a token, below "
                f"vocab_size={vocabulary}"
            )
    if not ids and usual is None:
        raise ValueError(
            "no eos_token_id, here or in generation_config.json, and the tokenizer names no eos_token: set it to the "
            "id of the token that ends an answer"
        )
    if not ids and usual is not None:
        ids = [usual]
    ids += [number for number in turns.values() if number < vocabulary]
    return tuple(dict.fromkeys(ids))


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


def with_masks(config: ModelConfig, special: dict[str, int], trained: int | None = None) -> ModelConfig:
    """Return a causal model's configuration with masks, for an adapter that acts on their rows only.

    If the adapter brings an embedding, it is the mask's; `trained` is then the token that has it in PEFT's form.
    Otherwise the mask is the token of that name among `special`, the special tokens of the adapter's own tokenizer, or
    I-DLM's.

    Raises:
        ValueError: the model is not causal, its vocabulary has no such id, or its mask is another token.
    """
    family, masked = FAMILIES[config.family], FAMILIES["I-DLM"]
    if not family.causal:
        raise ValueError(
            f"model.lora_rows=masks is for causal models, whose tokens do not see masks; {config.family} models are "
            "not: use model.lora_rows=all"
        )
    if trained is not None:
        if trained > config.vocab_size or (config.has_mask and trained != config.mask_id):
            raise ValueError(
                f"the adapter's mask is token {trained}, which this model does not have, or does not draft from: "
                "model.lora is for another checkpoint"
            )
        return config if config.has_mask else replace(config, learned_mask=True)
    return config if config.has_mask else replace(config, mask_id=mask_id(masked, {}, {}, special, config.vocab_size))


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
