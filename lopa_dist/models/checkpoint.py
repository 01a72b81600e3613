"""Loading Hugging Face checkpoints: safetensors only, nothing unpickled, no remote code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerFast

from lopa_dist.models.config import ModelConfig
from lopa_dist.models.transformer import Transformer

EMBEDDED = Path(__file__).parent.parent / "assets" / "embedded"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why and what to do."""


def find(path: str) -> Path:
    """The folder of `path`: ``embedded``, a local folder, or a hub id (downloaded, safetensors only)."""
    if path == "embedded":
        return EMBEDDED
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or path.startswith("."):
        raise CheckpointError(f"model.path={path}: no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise CheckpointError(
            f"model.path={path}: neither a folder here nor a model that the Hugging Face hub gave out ({error})"
        ) from error


def read_config(folder: Path) -> ModelConfig:
    """`config.json` of a Dream-family checkpoint."""
    file = folder / "config.json"
    if not file.exists():
        raise CheckpointError(f"{folder}: no config.json; model.path must name a Hugging Face checkpoint folder")
    raw = read_json(file)
    if raw.get("model_type") != "Dream":
        raise CheckpointError(f"{file}: model_type {raw.get('model_type')!r} is not known; known: Dream")
    if raw.get("rope_scaling") or raw.get("use_sliding_window"):
        raise CheckpointError(f"{file}: rope_scaling and sliding windows are not supported")
    try:
        return dream(raw)
    except KeyError as error:
        raise CheckpointError(f"{file}: no {error.args[0]!r} in it") from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object, or an error that names the file."""
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return raw


def dream(raw: dict[str, Any]) -> ModelConfig:
    """The Dream family's `config.json`; newer transformers write `rope_parameters` instead of `rope_theta`."""
    eos = raw["eos_token_id"]
    theta = raw.get("rope_parameters", raw)["rope_theta"]
    return ModelConfig(
        family="Dream",
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        layers=raw["num_hidden_layers"],
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        intermediate_size=raw["intermediate_size"],
        rms_eps=raw["rms_norm_eps"],
        rope_theta=theta,
        qkv_bias=True,
        tied=raw.get("tie_word_embeddings", False),
        shift=True,
        mask_id=raw["mask_token_id"],
        eos_ids=tuple(eos) if isinstance(eos, list) else (eos,),
        pad_id=raw["pad_token_id"],
        max_positions=raw["max_position_embeddings"],
    )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, single or sharded."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index}: no weight_map in it")
        names = sorted(set(weight_map.values()))
    else:
        names = ["model.safetensors"]
    missing = [n for n in names if not (folder / n).exists()]
    if missing:
        hint = " (pickle checkpoints are refused: convert to safetensors)" if list(folder.glob("*.bin")) else ""
        raise CheckpointError(f"{folder}: {', '.join(missing)} missing{hint}")
    return [folder / n for n in names]


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Build on the meta device and stream the tensors in; every tensor used, every parameter filled, else an error."""
    config = read_config(folder)
    with torch.device("meta"):
        model = Transformer(config)
    wanted = model.state_dict()
    if config.tied:
        wanted.pop("lm_head.weight")
    unknown, misshaped = [], []
    loaded: dict[str, torch.Tensor] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dictionary
                    if name not in wanted:
                        if not (config.tied and name == "lm_head.weight"):  # some write the tied copy too
                            unknown.append(name)
                        continue
                    tensor = tensors.get_tensor(name)
                    if tensor.shape != wanted[name].shape:
                        misshaped.append(f"{name} {list(tensor.shape)} instead of {list(wanted[name].shape)}")
                    loaded[name] = tensor.to(device, dtype)
        except SafetensorError as error:
            raise CheckpointError(f"{file}: damaged or incomplete ({error}); fetch it again") from error
    missing = sorted(set(wanted) - set(loaded))
    for problem, names in (("missing", missing), ("not known", unknown), ("of the wrong shape", misshaped)):
        if names:
            raise CheckpointError(f"{folder}: {len(names)} tensors {problem}: {', '.join(names[:8])}")
    model.load_state_dict(loaded, strict=False, assign=True)
    if config.tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.requires_grad_(False).eval()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The checkpoint's own tokenizer, from `tokenizer.json`."""
    if not (folder / "tokenizer.json").exists():
        raise CheckpointError(f"{folder}: no tokenizer.json")
    return PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)
