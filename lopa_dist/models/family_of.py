"""Which family a checkpoint belongs to, and how long its blocks are."""

from __future__ import annotations

import re
from typing import Any

from lopa_dist.models.families import FAMILIES, Family

LAYOUTS = "docs/models.md#a-checkpoint-of-your-own"
SDAR_BLOCKS = (4, 8, 16, 32, 64)
I_DLM_BLOCKS = (1, 2, 3)


def family_of(raw: dict[str, Any], name: str = "") -> str:
    """Return the key of `FAMILIES` that a checkpoint belongs to: its `model_type`, except where families share one.

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
        return "Stable-DiffCoder"  # its code has its name
    if kind in ("sdar", "sdar_moe"):
        return sdar(kind, raw, name)
    if kind == "llada2_moe":
        return llada2(raw, name)
    if kind.startswith("a2d") and not kind.endswith("bd3lm"):
        return a2d(kind, raw, name)
    if FAMILIES[kind].mask_token is None:
        check_plain(kind, raw)
    return kind


def sdar(kind: str, raw: dict[str, Any], name: str) -> str:
    """Return whether a checkpoint is SDAR or I-DLM. `kind` is its `model_type`; other arguments as in `family_of`.

    I-DLM (arXiv 2604.11035) calls itself ``sdar``. Its weights have the same names, but it is causal and has the logit
    shift. If it ran as SDAR, it would write wrong text without an error. `use_regular_causal` tells the two apart, or
    else `block_size`: SDAR's blocks have 4 to 64 tokens, and I-DLM's strides have 1 to 3. A checkpoint without
    `use_regular_causal` is refused if its blocks are of another size, if its name says I-DLM but its blocks say SDAR,
    or if it has no `block_size` and its name has neither SDAR nor TraDo.
    """
    block, causal = block_size(FAMILIES[kind], raw, name), raw.get("use_regular_causal")
    if kind == "sdar" and (causal or (causal is None and block in I_DLM_BLOCKS)):
        return "I-DLM"
    sizes = ", ".join(map(str, SDAR_BLOCKS))
    if causal is None and (block not in SDAR_BLOCKS or "i-dlm" in name.lower()):
        raise ValueError(
            f"model_type {kind!r} with block_size={block} in {name or 'this checkpoint'}: SDAR's blocks are of {sizes} "
            "tokens, and I-DLM models have this model_type, too. Set use_regular_causal in config.json: false for "
            "SDAR, true for I-DLM"
        )
    if causal is None and raw.get("block_size") is None and not re.search("sdar|trado", name, re.IGNORECASE):
        raise ValueError(
            f"model_type {kind!r} without block_size: SDAR's blocks are of {sizes} tokens, and I-DLM models have this "
            "model_type, too. Set block_size in config.json, and use_regular_causal: false for SDAR, true for I-DLM"
        )
    return kind


def a2d(kind: str, raw: dict[str, Any], name: str) -> str:
    """Return whether an A2D model was trained in blocks, which only its name or `block_size` says.

    `kind` is its `model_type`; other arguments as in `family_of`.
    """
    blocks = raw.get("block_size", 32 if "bd3lm" in name else 0 if "mdlm" in name else None)
    if blocks is None:
        raise ValueError(
            f"model_type {kind!r}: neither config.json nor the name {name!r} says if it was trained in blocks; "
            "set block_size in config.json: to the size of its blocks (bd3lm), or to 0 (mdlm)"
        )
    return f"{kind}-bd3lm" if blocks else kind


def check_plain(kind: str, raw: dict[str, Any]) -> None:
    """Raise a ValueError if a checkpoint of an autoregressive `kind` has code or masks of its own.

    Diffusion models that were converted from Llama or Qwen may keep the `model_type`.
    """
    for key in ("auto_map", "mask_token_id"):
        if raw.get(key) is not None:
            raise ValueError(
                f"model_type {kind!r} with {key}={raw[key]!r}: not a plain {kind} model but one with code or masks "
                f"of its own, which is not known. A diffusion model has the model_type of its family ({LAYOUTS})"
            )


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
