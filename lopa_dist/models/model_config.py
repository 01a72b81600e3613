"""A model's configuration, from its family and the contents of its files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lopa_dist.models.config import Experts, ModelConfig
from lopa_dist.models.families import FAMILIES, Family
from lopa_dist.models.family_of import block_size, family_of
from lopa_dist.models.files import unsupported
from lopa_dist.models.rope_options import ROTATED, query_scaling, rope_options, rope_scaling

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


def with_masks(config: ModelConfig, special: dict[str, int], trained: int | None = None) -> ModelConfig:
    """Return a causal model's configuration with masks, for an adapter that acts on their rows only.

    If the adapter brings an embedding for the mask, `trained` is the token that has this embedding in PEFT's form.
    Otherwise the mask is the token with I-DLM's name for it in `special`, the special tokens of the adapter's own
    tokenizer, or else the token with I-DLM's mask id.

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
