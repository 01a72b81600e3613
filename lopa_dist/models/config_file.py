"""What a checkpoint's files say of its model, without its weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from lopa_dist.models.config import ModelConfig
from lopa_dist.models.families import FAMILIES
from lopa_dist.models.files import CheckpointError, read_json, read_json_if_there, repository
from lopa_dist.models.model_config import model_config, with_masks
from lopa_dist.models.tokenizer import chat_templates, end_of_text, special_tokens, words

WITHOUT_EFFECT: dict[str, Any] = {
    "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0,
    "min_new_tokens": 0, "num_beams": 1, "guidance_scale": 1.0, "bad_words_ids": None, "suppress_tokens": None,
    "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None, "sequence_bias": None,
    "exponential_decay_length_penalty": None,
}  # fmt: skip
"""Options of a `generation_config.json` with which transformers' greedy decoding does not always take the most probable
token, and the value at which each option has no effect."""


def read_config(folder: Path, mask_adapter: Path | None = None, merged: Path | None = None) -> ModelConfig:
    """Return a checkpoint's configuration, from `config.json`, `generation_config.json` and the tokenizer's files.

    Args:
        folder: of the checkpoint.
        mask_adapter: folder of an adapter that acts on rows of masks only; it gives masks to a model without them.
        merged: folder of an adapter that is merged into it, whose chat template counts if the checkpoint has none.
    """
    file = folder / "config.json"
    if not file.exists():
        raise CheckpointError(f"{folder}: no config.json; model.path must name a Hugging Face checkpoint folder")
    raw, generation = read_json(file), read_json_if_there(folder / "generation_config.json")
    try:
        special = special_tokens(folder)
        if raw.get("eos_token_id") is None and generation.get("eos_token_id") is None:
            generation = generation | {"eos_token_id": end_of_text(folder, special)}
        templates = chat_templates(folder) or (chat_templates(merged) if merged else {})
        config = model_config(raw, generation, special, repository(folder), "\n".join(templates.values()))
        config = replace(config, not_applied=not_applied(generation))
        if raw.get("mask_token_id") is None and generation.get("mask_token_id") is None:
            check_mask(config, folder, special)
        if mask_adapter is None:
            return config
        trained = trained_token(read_json_if_there(mask_adapter / "adapter_config.json"), mask_adapter)
        return with_masks(config, special_tokens(mask_adapter), trained)
    except KeyError as error:
        raise CheckpointError(f"{file}: no {error.args[0]!r} in it") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error
    except (TypeError, AttributeError, ArithmeticError, IndexError) as error:
        raise CheckpointError(f"{file}, or a file beside it: a value of the wrong kind ({error})") from error


def not_applied(generation: dict[str, Any]) -> tuple[str, ...]:
    """Return the options of a `generation_config.json` that change even greedy texts and are not supported."""
    asked = ((key, generation.get(key), usual) for key, usual in WITHOUT_EFFECT.items())
    return tuple(f"{key}={value!s:.40}" for key, value, usual in asked if value not in (None, usual, []))


def check_mask(config: ModelConfig, folder: Path, special: dict[str, int]) -> None:
    """Raise a ValueError if no file names the mask, and the family's usual mask id is an ordinary word here."""
    mask = FAMILIES[config.family].mask_token
    if mask is None or mask in special or config.mask_id in special.values():
        return
    word = next((text for text, number in words(folder).items() if number == config.mask_id), mask)
    if word != mask:
        raise ValueError(
            f"no mask_token_id, the tokenizer has no {mask!r}, and {config.mask_id}, which it usually is, is its word "
            f"{word!r}: set mask_token_id"
        )


def trained_token(raw: dict[str, Any], file: Path) -> int | None:
    """Return the id of the token whose embedding an adapter brings, or None.

    Raises:
        CheckpointError: it brings several.
    """
    listed = raw.get("trainable_token_indices")
    ids = [i for some in listed.values() for i in some] if isinstance(listed, dict) else listed
    if not ids:
        return None
    if len(ids) > 1 or not isinstance(ids[0], int):
        raise CheckpointError(f"{file}: trainable_token_indices={listed}: only one token's embedding is supported")
    return ids[0]
