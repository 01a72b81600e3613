"""PEFT LoRA adapters: read, checked against the base model, and merged into its weights as they are loaded."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from lopa_dist.atomic import atomic, write_lines
from lopa_dist.models.config_file import trained_token
from lopa_dist.models.files import CheckpointError, opened, read_json, unsupported

PREFIX = "base_model.model."
LORA = re.compile(r"(?P<module>.+)\.lora_(?P<part>A|B)\.weight")
# ends of names of base weights that PEFT stores, too
UNCHANGED = ("lm_head.base_layer.weight", "lm_head.weight", "embed_tokens.weight")
TOKENS = "token_adapter.trainable_tokens_delta"  # end of the name of the trained tokens' embeddings
BASE = "base_revision"  # metadata key, in files learned here, for the revision of their checkpoint
ONLY: dict[str, Any] = {
    "peft_type": "LORA", "bias": "none", "lora_bias": False, "use_dora": False, "use_qalora": False,
    "fan_in_fan_out": False, "rank_pattern": {}, "alpha_pattern": {}, "layer_replication": None,
    "target_parameters": None, "alora_invocation_tokens": None,
    "arrow_config": None, "kasa_config": None, "monteclora_config": None, "use_bdlora": False, "velora_config": None,
}  # fmt: skip
"""Options of `adapter_config.json` of which only this value is supported."""
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base weights as they are; others belong to changed base weights."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: weight W of a module becomes W + scale x B @ A. Keys are names in the base checkpoint.

    With `rows` ``masks`` it acts on rows of masks only, so nothing is merged (`mask_rows`).
    """

    folder: Path
    base: str | None  # the model that it was trained on, as in its config
    scale: float
    targets: tuple[str, ...] | str  # how the names of its target modules end, or a pattern of them; empty: unknown
    pairs: dict[str, tuple[Tensor, Tensor]]  # weight -> A [r, in], B [out, r]
    saved: dict[str, Tensor]  # tensors that replace the base model's (modules_to_save)
    unchanged: dict[str, Tensor]  # tensors of the base model, which PEFT keeps with an adapted head or embedding
    rows: str = "all"  # or "masks"
    mask_id: int | None = None  # the token whose trained embedding stands for a mask
    mask: Tensor | None = None  # [d] embedding of that token
    base_revision: str | None = None  # of the checkpoint that it was learned on; None: unknown

    def check(self, shapes: dict[str, list[int]]) -> None:
        """Raise an error unless the adapter fits the names and shapes of the base checkpoint.

        Raises:
            CheckpointError: the base model lacks an adapted module or has another shape of it, or the adapter lacks a
                target module.
        """
        own = {name: [b.shape[0], a.shape[1]] for name, (a, b) in self.pairs.items()}
        own |= {name: list(tensor.shape) for name, tensor in (self.saved | self.unchanged).items()}
        strange = sorted(own.keys() - shapes.keys())
        if strange:
            raise CheckpointError(
                f"{self.folder}: of {len(own)} adapted modules, {len(own) - len(strange)} are in the base model; "
                f"not in it: {', '.join(strange[:8])}"
            )
        wrong = [f"{name} {own[name]}, base {shapes[name]}" for name in sorted(own) if own[name] != shapes[name]]
        if wrong:
            raise CheckpointError(f"{self.folder}: {len(wrong)} modules of another shape: {', '.join(wrong[:8])}")
        modules = [name.removesuffix(".weight") for name in shapes if name.endswith(".weight")]
        targeted = [module for module in modules if self.is_target(module)]
        absent = [module for module in targeted if f"{module}.weight" not in self.pairs]
        if absent:
            raise CheckpointError(
                f"{self.folder}: target_modules names {len(targeted)} modules of the base model, the adapter has "
                f"{len(targeted) - len(absent)}; absent: {', '.join(absent[:8])}"
            )

    def check_base(self, name: str, weight: Tensor) -> None:
        """Raise a CheckpointError if the adapter stores other values for the base weight `name` than `weight` has."""
        own = self.unchanged.get(name)
        if own is not None and not (
            torch.equal(own.to(weight.dtype), weight) or torch.equal(own, weight.to(own.dtype))
        ):
            raise CheckpointError(f"{self.folder}: its {name} is not the base model's; is that another base?")

    def is_target(self, module: str) -> bool:
        """Return whether the adapter has to have a pair for `module` of the base model."""
        if isinstance(self.targets, str):
            return re.fullmatch(self.targets, module) is not None
        return any(ends_in(module, end) for end in self.targets)

    def changes(self, name: str) -> bool:
        """Return whether the weight `name` is merged with the adapter."""
        return self.rows == "all" and (name in self.saved or name in self.pairs)

    def pair(self, name: str, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return A, and scale x B, of the weight `name`."""
        a, b = self.pairs[name]
        return a.to(device, dtype), (b.float() * self.scale).to(device, dtype)

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight `name` as the adapter changes it; a LoRA pair gives fp32, for the caller to round once."""
        if name in self.saved:
            return self.saved[name].to(weight.device)
        a, b = (x.to(weight.device, torch.float32) for x in self.pairs[name])
        return torch.addmm(weight.float(), b, a, alpha=self.scale)

    def mismatch(self, path: str) -> str | None:
        """Return a message for the user if the adapter was trained on another model than that at `path`, else None."""
        if self.base is None or Path(self.base).name.lower() == Path(path).name.lower():
            return None
        return f"model.lora={self.folder} was trained on {self.base}, but model.path is {path}: is that the right base?"


def ends_in(name: str, end: str) -> bool:
    """Return whether the last parts of a dotted name are `end`."""
    return f".{name}".endswith(f".{end}")


def load_adapter(folder: Path, rows: str = "all") -> Adapter:
    """Return the adapter in `adapter_config.json` and `adapter_model.safetensors`; `rows` are the rows that it acts on.

    Raises:
        CheckpointError: a file is missing, or this kind of adapter is not supported.
    """
    config_file, file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    for needed in (config_file, file):
        if not needed.exists():
            hint = " (pickles are refused: convert to safetensors)" if list(folder.glob("adapter_model.bin")) else ""
            raise CheckpointError(f"{folder}: no {needed.name}{hint}; model.lora must name a PEFT LoRA adapter")
    raw = read_json(config_file)
    if message := unsupported(raw, ONLY):
        raise CheckpointError(f"{config_file}: {message}")
    if (start := raw.get("init_lora_weights")) not in PLAIN_STARTS:
        raise CheckpointError(
            f"{config_file}: init_lora_weights={start!r}: such an adapter belongs to changed base weights; convert it "
            "with PEFT to a plain LoRA first"
        )
    try:
        rank, alpha = raw["r"], raw["lora_alpha"]
    except KeyError as error:
        raise CheckpointError(f"{config_file}: no {error.args[0]!r} in it") from error
    if not (isinstance(rank, int) and isinstance(alpha, int | float) and rank > 0 and math.isfinite(alpha)):
        raise CheckpointError(f"{config_file}: r={rank!r} and lora_alpha={alpha!r} must be numbers, r above 0")
    pairs, saved, unchanged, mask = read_tensors(file, to_save := tuple(raw.get("modules_to_save") or ()))
    if absent := [module for module in to_save if not any(ends_in(name, f"{module}.weight") for name in saved)]:
        raise CheckpointError(f"{file}: modules_to_save names {', '.join(absent)}, which is not in it")
    check_finite(file, pairs, saved, mask)
    mask_id = trained_token(raw, config_file)
    if (mask_id is None) != (mask is None) or (mask_id is not None and rows == "all"):
        raise CheckpointError(
            f"{config_file}: trainable_token_indices={raw.get('trainable_token_indices')}: only a mask's embedding can "
            "be trained, with model.lora_rows=masks, and it must be in the file"
        )
    for name, (a, b) in pairs.items():
        if len(a) != rank or b.shape[1] != rank:
            raise CheckpointError(f"{file}: {name}: A {list(a.shape)} and B {list(b.shape)} are not of rank r={rank}")
    targets = raw.get("target_modules")
    selected = any(raw.get(key) for key in ("layers_to_transform", "layers_pattern", "exclude_modules"))
    return Adapter(
        folder,
        raw.get("base_model_name_or_path") or None,
        alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank),
        () if selected or targets == "all-linear" else tuple(targets) if isinstance(targets, list) else targets or "",
        pairs,
        saved,
        unchanged,
        rows,
        mask_id,
        mask,
        metadata(file).get(BASE),
    )


def check_finite(
    file: Path, pairs: dict[str, tuple[Tensor, Tensor]], saved: dict[str, Tensor], mask: Tensor | None
) -> None:
    """Raise a CheckpointError if what `read_tensors` returned has NaN or infinity, which would ruin every answer."""
    named = [*((name, x) for name, pair in pairs.items() for x in pair), *saved.items()]
    if mask is not None:
        named.append(("the mask's embedding", mask))
    broken = sorted({name for name, x in named if not finite(x)})
    if broken:
        raise CheckpointError(f"{file}: {len(broken)} tensors have NaN or infinity: {', '.join(broken[:8])}")


def finite(x: Tensor) -> bool:
    """Return whether all numbers of a tensor are finite."""
    return bool(x.isfinite().all())


def metadata(file: Path) -> dict[str, str]:
    """Return a safetensors file's metadata."""
    with opened(file) as tensors:
        return tensors.metadata() or {}


def read_tensors(
    file: Path, modules_to_save: tuple[str, ...]
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor], dict[str, Tensor], Tensor | None]:
    """Return the adapter's pairs (A, B), tensors to save and unchanged ones, and a mask's embedding.

    Tensors are by the names of the base weights.
    """
    halves: dict[str, dict[str, Tensor]] = {}
    saved: dict[str, Tensor] = {}
    unchanged: dict[str, Tensor] = {}
    mask: Tensor | None = None
    strange = []
    with opened(file) as tensors:
        for key in tensors.keys():  # noqa: SIM118 - not a dictionary
            name = key.removeprefix(PREFIX)
            match = LORA.fullmatch(name)
            if match and key.startswith(PREFIX):
                halves.setdefault(match["module"] + ".weight", {})[match["part"]] = tensors.get_tensor(key)
            elif any(ends_in(name, f"{module}.weight") for module in modules_to_save):
                saved[name] = tensors.get_tensor(key)
            elif name.endswith(UNCHANGED) and key.startswith(PREFIX):
                unchanged[name.replace(".base_layer", "")] = tensors.get_tensor(key)
            elif key.endswith(TOKENS):
                mask = tensors.get_tensor(key)[0]
            else:
                strange.append(key)
    strange += [name for name, pair in halves.items() if len(pair) != 2]
    if strange or not halves:
        what = f"{len(strange)} tensors are not half of a LoRA pair: {', '.join(sorted(strange)[:8])}"
        raise CheckpointError(f"{file}: {what if strange else 'no LoRA weights in it'}")
    return {name: (pair["A"], pair["B"]) for name, pair in halves.items()}, saved, unchanged, mask


def save_adapter(
    folder: Path, pairs: dict[str, tuple[Tensor, Tensor]], mask_id: int, mask: Tensor, base: str, revision: str
) -> None:
    """Write an adapter for rows that draft, in PEFT's form, which `load_adapter` and PEFT read.

    Args:
        folder: made if it does not exist; files of an earlier adapter in it are replaced.
        pairs: A ``[r, in]`` and B ``[out, r]`` by the names of the base weights.
        mask_id: the token that stands for a mask.
        mask: ``[d]`` its embedding.
        base: the name of the checkpoint.
        revision: a hash of the checkpoint's content.

    Raises:
        OSError: it cannot be written, for instance because the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    embedding = "model.embed_tokens"
    tensors = {f"{PREFIX}{embedding}.{TOKENS}": mask.detach().cpu().float()[None].contiguous()}
    for name, pair in pairs.items():
        for part, tensor in zip("AB", pair, strict=True):
            own = f"{PREFIX}{name.removesuffix('.weight')}.lora_{part}.weight"
            tensors[own] = tensor.detach().cpu().float().contiguous()
    rank = len(next(iter(pairs.values()))[0])
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-2] for name in pairs}),
        "trainable_token_indices": [mask_id],
        "inference_mode": True,
    }
    with atomic(folder / "adapter_model.safetensors") as partial:
        partial.write_bytes(save(tensors, {BASE: revision, "format": "pt"}))  # `save_file` would hide it from others
    write_lines(folder / "adapter_config.json", [json.dumps(config, indent=1) + "\n"])
