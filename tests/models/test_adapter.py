"""LoRA adapters: merged exactly, or refused with the reason."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lopa_dist.models.adapter import load_adapter
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.families import checkpoint_name
from lopa_dist.models.files import CheckpointError
from tests.models.small_checkpoints import KINDS, reference, weights_of, write

CPU = torch.device("cpu")
RANK = 3
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "Dream-org/Dream-v0-Base-7B",
    "r": RANK,
    "lora_alpha": 12,
    "lora_dropout": 0.1,
    "target_modules": ["q_proj", "v_proj", "up_proj"],
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "use_dora": False,
    "use_rslora": False,
}


def base_of(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    kind = KINDS[name]
    return {n: w.to(dtype) for n, w in weights_of(kind, reference(kind)).items()}


def adapter_for(weights: dict[str, Tensor], targets: list[str], rank: int = RANK) -> dict[str, Tensor]:
    """Random pairs for all modules whose name ends in a target, under PEFT's names."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, weight in weights.items():
        if name.split(".")[-2] in targets and name.endswith(".weight"):
            key = "base_model.model." + name.removesuffix(".weight")
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=generator)
            tensors[f"{key}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=generator)
    return tensors


def write_adapter(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("name", ["dream", "llada"])
def test_merge_is_exact(name: str, rslora: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """W + s x B @ A in float64, rounded once."""
    weights = base_of(name, dtype)
    targets = ["q_proj", "v_proj", "up_proj"]
    tensors = adapter_for(weights, targets)
    adapter = load_adapter(write_adapter(tmp_path / "adapter", tensors, use_rslora=rslora))
    assert len(adapter.pairs) == 6
    model = load_model(write(tmp_path / "base", KINDS[name], weights, shards=3), dtype, CPU, adapter)
    scale = 12 / (math.sqrt(RANK) if rslora else RANK)
    merged = 0
    for ours, found in model.state_dict().items():
        theirs = checkpoint_name(model.config.family, ours)
        key = "base_model.model." + theirs.removesuffix(".weight")
        if f"{key}.lora_A.weight" not in tensors:
            assert torch.equal(found, weights[theirs])
            continue
        merged += 1
        delta = tensors[f"{key}.lora_B.weight"].double() @ tensors[f"{key}.lora_A.weight"].double()
        exact = weights[theirs].double() + scale * delta
        assert delta.abs().max() > 1  # else merging nothing would pass
        # half a unit in the last place of the one rounding; fp32 arithmetic before it is 2^-16 finer
        step = 2.0 ** -(8 if dtype == torch.bfloat16 else 21)
        assert ((found.double() - exact).abs() <= exact.abs() * step * (1 + 2**-10) + 1e-5).all()
    assert merged == 6


def test_rounding_twice_would_be_seen(tmp_path: Path) -> None:
    """Rounding the product before adding it gives other weights; one rounding gives the nearest ones."""
    weights = base_of("dream", torch.bfloat16)
    tensors = adapter_for(weights, ["q_proj"])
    adapter = load_adapter(write_adapter(tmp_path / "adapter", tensors, target_modules=["q_proj"]))
    name = "model.layers.0.self_attn.q_proj"
    a, b = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    base = weights[f"{name}.weight"]
    found = adapter.merge(f"{name}.weight", base).bfloat16()
    once = (base.double() + 4 * b.double() @ a.double()).bfloat16()
    twice = base + (4 * b @ a).bfloat16()
    assert (found != once).float().mean() < 0.001  # ties of the rounding
    assert (twice != once).float().mean() > 0.05


def test_saved_modules_replace_the_base(tmp_path: Path) -> None:
    weights = base_of("dream", torch.float32)
    tensors = adapter_for(weights, ["q_proj"])
    head = torch.randn(weights["lm_head.weight"].shape)
    tensors["base_model.model.lm_head.weight"] = head
    adapter = load_adapter(
        write_adapter(tmp_path / "adapter", tensors, target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    model = load_model(write(tmp_path / "base", KINDS["dream"], weights), torch.float32, CPU, adapter)
    assert torch.equal(model.head_weight, head)


@pytest.mark.parametrize("adapted", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_a_head_of_the_base_is_compared_with_it(tmp_path: Path, same: bool, adapted: bool) -> None:
    """PEFT saves it with an adapter that changes the head, or with `save_embedding_layers`."""
    weights = base_of("dream", torch.bfloat16)
    targets = ["q_proj", "lm_head"] if adapted else ["q_proj"]
    tensors = adapter_for(weights, targets)
    head = weights["lm_head.weight"].float()
    tensors[f"base_model.model.lm_head.{'base_layer.' * adapted}weight"] = head if same else head + 1
    adapter = load_adapter(write_adapter(tmp_path / "adapter", tensors, target_modules=targets))
    base = write(tmp_path / "base", KINDS["dream"], weights)
    if same:
        model = load_model(base, torch.float32, CPU, adapter)
        halves = [tensors.get(f"base_model.model.lm_head.lora_{half}.weight") for half in "BA"]
        delta = halves[0] @ halves[1] if halves[0] is not None and halves[1] is not None else 0.0
        assert (model.head_weight - head - 12 / RANK * delta).abs().max() < 1e-3
        return
    with pytest.raises(CheckpointError, match=r"its lm_head\.weight is not the base model's"):
        load_model(base, torch.float32, CPU, adapter)


def test_saved_modules_must_be_there(tmp_path: Path) -> None:
    tensors = adapter_for(base_of("dream", torch.float32), ["q_proj"])
    folder = write_adapter(tmp_path / "adapter", tensors, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(CheckpointError, match="modules_to_save names lm_head, which is not in it"):
        load_adapter(folder)


@pytest.mark.parametrize("whole", [True, False])
def test_modules_that_a_pattern_names_must_be_there(tmp_path: Path, whole: bool) -> None:
    weights = base_of("dream", torch.float32)
    tensors = adapter_for(weights, ["q_proj", "k_proj"])
    if not whole:
        tensors = {key: tensor for key, tensor in tensors.items() if "layers.1.self_attn.k_proj" not in key}
    adapter = load_adapter(write_adapter(tmp_path / "adapter", tensors, target_modules=r".*\.(q|k)_proj"))
    base = write(tmp_path / "base", KINDS["dream"], weights)
    if whole:
        load_model(base, torch.float32, CPU, adapter)
        return
    with pytest.raises(CheckpointError, match=r"absent: model\.layers\.1\.self_attn\.k_proj"):
        load_model(base, torch.float32, CPU, adapter)


def test_saved_modules_need_an_untied_head(tmp_path: Path) -> None:
    weights = base_of("illada", torch.float32)
    tensors = adapter_for(weights, ["q_proj"])
    tensors["base_model.model.model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    changes = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}
    adapter = load_adapter(write_adapter(tmp_path / "adapter", tensors, **changes))
    with pytest.raises(CheckpointError, match="untied head"):
        load_model(write(tmp_path / "base", KINDS["illada"], weights), torch.float32, CPU, adapter)


KEY = "base_model.model.model.layers.1.self_attn.v_proj"


def another_model(tensors: dict[str, Tensor]) -> str:
    for key in list(tensors):
        tensors[key.replace("self_attn", "attention")] = tensors.pop(key)
    return r"of 6 adapted modules, 2 are in the base model; not in it: model\.layers\.0\.attention\.q_proj\.weight"


def another_shape(tensors: dict[str, Tensor]) -> str:
    tensors[f"{KEY}.lora_B.weight"] = torch.zeros(25, RANK)
    return r"1 modules of another shape: model\.layers\.1\.self_attn\.v_proj\.weight \[25, 48\], base \[24, 48\]"


def absent(tensors: dict[str, Tensor]) -> str:
    del tensors[f"{KEY}.lora_A.weight"], tensors[f"{KEY}.lora_B.weight"]
    return r"names 6 modules of the base model, the adapter has 5; absent: model\.layers\.1\.self_attn\.v_proj"


@pytest.mark.parametrize("spoil", [another_model, another_shape, absent])
def test_adapters_that_do_not_fit(spoil: Callable[[dict[str, Tensor]], str], tmp_path: Path) -> None:
    weights = base_of("dream", torch.float32)
    tensors = adapter_for(weights, CONFIG["target_modules"])
    message = spoil(tensors)
    adapter = load_adapter(write_adapter(tmp_path / "adapter", tensors))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(write(tmp_path / "base", KINDS["dream"], weights), torch.float32, CPU, adapter)
    assert str(tmp_path / "adapter") in str(caught.value)


def half(tensors: dict[str, Tensor]) -> str:
    del tensors[f"{KEY}.lora_A.weight"]
    return r"not half of a LoRA pair: model\.layers\.1\.self_attn\.v_proj\.weight"


def magnitude(tensors: dict[str, Tensor]) -> str:
    tensors[f"{KEY}.lora_magnitude_vector"] = torch.ones(24)
    return "not half of a LoRA pair: .*lora_magnitude_vector"


def unannounced(tensors: dict[str, Tensor]) -> str:
    tensors["base_model.model.model.norm.weight"] = torch.ones(48)
    return r"not half of a LoRA pair: base_model\.model\.model\.norm\.weight"


def another_rank(tensors: dict[str, Tensor]) -> str:
    tensors[f"{KEY}.lora_A.weight"] = torch.zeros(RANK + 1, 48)
    tensors[f"{KEY}.lora_B.weight"] = torch.zeros(24, RANK + 1)
    return r"v_proj\.weight: A \[4, 48\] and B \[24, 4\] are not of rank r=3"


def nothing(tensors: dict[str, Tensor]) -> str:
    tensors.clear()
    return "no LoRA weights"


@pytest.mark.parametrize("spoil", [half, magnitude, unannounced, another_rank, nothing])
def test_files_that_are_no_plain_adapter(spoil: Callable[[dict[str, Tensor]], str], tmp_path: Path) -> None:
    tensors = adapter_for(base_of("dream", torch.float32), CONFIG["target_modules"])
    message = spoil(tensors)
    with pytest.raises(CheckpointError, match=message):
        load_adapter(write_adapter(tmp_path / "adapter", tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"bias": "lora_only"}, "bias='lora_only' is not supported"),
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"lora_alpha": None}, "r=3 and lora_alpha=None must be numbers"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa"}, "'pissa': such an adapter belongs to changed base weights"),
    ],
)
def test_kinds_that_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    tensors = adapter_for(base_of("dream", torch.float32), CONFIG["target_modules"])
    with pytest.raises(CheckpointError, match=message):
        load_adapter(write_adapter(tmp_path / "adapter", tensors, **change))


def test_pickled_adapters_are_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", {"x": torch.ones(1)})
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"no adapter_model\.safetensors \(pickles are refused"):
        load_adapter(folder)


@pytest.mark.parametrize(
    ("path", "same"),
    [
        ("Dream-org/Dream-v0-Base-7B", True),
        ("/models/dream-v0-base-7b/", True),
        ("Dream-org/Dream-v0-Instruct-7B", False),
    ],
)
def test_another_base_model_is_reported(path: str, same: bool, tmp_path: Path) -> None:
    tensors = adapter_for(base_of("dream", torch.float32), CONFIG["target_modules"])
    message = load_adapter(write_adapter(tmp_path / "adapter", tensors)).mismatch(path)
    if same:
        assert message is None
    else:
        assert message is not None
        assert "trained on Dream-org/Dream-v0-Base-7B, but model.path is Dream-org/Dream-v0-Instruct-7B" in message
