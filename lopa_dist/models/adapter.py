"""PEFT LoRA adapters: read, compared with the base model, and merged into its weights as they are loaded."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lopa_dist.models.files import CheckpointError, opened, read_json, unsupported

PREFIX = "base_model.model."
LORA = re.compile(r"(?P<module>.+)\.lora_(?P<part>A|B)\.weight")
ONLY: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "lora_bias": False,
    "use_dora": False,
    "use_qalora": False,
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
    "use_bdlora": False,
    "velora_config": None,
}
"""Options of `adapter_config.json` that we have one value of."""
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base weights as they are; others are relative to changed ones."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: weight W of a module becomes W + scale x B @ A. Keys are names in the base checkpoint.

    With `rows` ``masks`` it does so for rows of masks alone, so nothing is merged (`mask_rows`).
    """

    folder: Path
    base: str | None  # the model that it was trained on, as its config names it
    scale: float
    targets: tuple[str, ...]  # ends of the names of the modules it was made for; empty: unknown
    pairs: dict[str, tuple[Tensor, Tensor]]  # weight -> A [r, in], B [out, r]
    whole: dict[str, Tensor]  # tensors that replace the base model's (modules_to_save)
    rows: str = "all"  # or "masks"

    def check(self, shapes: dict[str, list[int]]) -> None:
        """Compare with the names and shapes of the base checkpoint.

        A CheckpointError names modules that the base has not, of another shape, or that the adapter should have.
        """
        strange = sorted((set(self.pairs) | set(self.whole)) - set(shapes))
        if strange:
            fitting = len(self.pairs) + len(self.whole) - len(strange)
            raise CheckpointError(
                f"{self.folder}: of {fitting + len(strange)} adapted modules, {fitting} are in the base model; not in "
                f"it: {', '.join(strange[:8])}"
            )
        made = {n: [b.shape[0], a.shape[1]] for n, (a, b) in self.pairs.items()}
        made |= {n: list(tensor.shape) for n, tensor in self.whole.items()}
        wrong = [f"{n} {shape}, base {shapes[n]}" for n, shape in sorted(made.items()) if shape != shapes[n]]
        if wrong:
            raise CheckpointError(f"{self.folder}: {len(wrong)} modules of another shape: {', '.join(wrong[:8])}")
        modules = [n.removesuffix(".weight") for n in shapes if n.endswith(".weight")]
        targeted = [m for m in modules if any(m == t or m.endswith("." + t) for t in self.targets)]
        absent = [m for m in targeted if f"{m}.weight" not in self.pairs]
        if absent:
            raise CheckpointError(
                f"{self.folder}: target_modules names {len(targeted)} modules of the base model, the adapter has "
                f"{len(targeted) - len(absent)}; absent: {', '.join(absent[:8])}"
            )

    def changes(self, name: str) -> bool:
        """Whether the weight `name` is another with the adapter."""
        return self.rows == "all" and (name in self.whole or name in self.pairs)

    def pair(self, name: str, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A and scale x B of the weight `name`."""
        a, b = self.pairs[name]
        return a.to(device, dtype), (b.float() * self.scale).to(device, dtype)

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """The weight `name`, which the adapter changes; an adapted one is in fp32, for the caller to round once."""
        if name in self.whole:
            return self.whole[name].to(weight.device)
        a, b = (x.to(weight.device, torch.float32) for x in self.pairs[name])
        return torch.addmm(weight.float(), b, a, alpha=self.scale)

    def mismatch(self, path: str) -> str | None:
        """What to tell the user if the adapter was trained on another model than the one at `path`."""
        if self.base is None or last(self.base) == last(path):
            return None
        return f"model.lora={self.folder} was trained on {self.base}, but model.path is {path}: is that the right base?"


def last(path: str) -> str:
    """The last part of a path or hub id, which is the model's name."""
    return Path(path.rstrip("/")).name.lower()


def load_adapter(folder: Path, rows: str = "all") -> Adapter:
    """Read `adapter_config.json` and `adapter_model.safetensors`; `rows` are those that it acts on.

    Raises:
        CheckpointError: files that are missing, or a kind of adapter that is not supported.
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
    pairs, whole = read_tensors(file, tuple(raw.get("modules_to_save") or ()))
    for name, (a, b) in pairs.items():
        if len(a) != rank or b.shape[1] != rank:
            raise CheckpointError(f"{file}: {name}: A {list(a.shape)} and B {list(b.shape)} are not of rank r={rank}")
    targets = raw.get("target_modules")
    selected = any(raw.get(key) for key in ("layers_to_transform", "layers_pattern", "exclude_modules"))
    return Adapter(
        folder,
        raw.get("base_model_name_or_path") or None,
        alpha / (math.sqrt(rank) if raw.get("use_rslora") else rank),
        tuple(targets) if isinstance(targets, list) and not selected else (),
        pairs,
        whole,
        rows,
    )


def read_tensors(
    file: Path, modules_to_save: tuple[str, ...]
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """The adapter's pairs (A, B) and its whole tensors, by the names of the base weights."""
    parts: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    strange = []
    with opened(file) as tensors:
        for key in tensors.keys():  # noqa: SIM118 - not a dictionary
            name = key.removeprefix(PREFIX)
            match = LORA.fullmatch(name)
            if match and key.startswith(PREFIX):
                parts.setdefault(match["module"] + ".weight", {})[match["part"]] = tensors.get_tensor(key)
            elif any(f".{name}".endswith(f".{m}.weight") for m in modules_to_save):
                whole[name] = tensors.get_tensor(key)
            else:
                strange.append(key)
    strange += [name for name, found in parts.items() if len(found) != 2]
    if strange or not parts:
        what = f"{len(strange)} tensors are not half of a LoRA pair: {', '.join(sorted(strange)[:8])}"
        raise CheckpointError(f"{file}: {what if strange else 'no LoRA weights in it'}")
    return {name: (found["A"], found["B"]) for name, found in parts.items()}, whole
