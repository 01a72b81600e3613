"""What a job makes of the model options: adapters, patterns, and decode options that follow the model."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lopa_dist.config import Config, DecodeOptions, LoggingConfig, ModelOptions, ParallelConfig, TaskConfig
from lopa_dist.jobs.run.job import run
from lopa_dist.models.files import EMBEDDED, CheckpointError
from lopa_dist.parallel.launcher import World

AUTO: dict[str, Any] = {
    "context": "auto", "block_size": "auto", "max_active_blocks": "auto",
}  # fmt: skip


def adapter(folder: Path, size: float) -> Path:
    """A LoRA of the embedded model's value projections; with size 0 it changes nothing."""
    with safe_open(EMBEDDED / "model.safetensors", "pt") as tensors:
        names = [n for n in tensors.keys() if n.endswith("v_proj.weight")]  # noqa: SIM118
        shapes = {n.removesuffix(".weight"): tensors.get_slice(n).get_shape() for n in names}
    weights = {}
    for name, (rows, columns) in shapes.items():
        weights[f"base_model.model.{name}.lora_A.weight"] = torch.ones(2, columns)
        weights[f"base_model.model.{name}.lora_B.weight"] = torch.full((rows, 2), size)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["v_proj"], "bias": "none"}
    config |= {"base_model_name_or_path": "someone/another-model"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def job(folder: Path, model: ModelOptions, **decode: Any) -> tuple[list[Any], dict[str, Any]]:
    """Texts and report of four problems."""
    config = Config(
        model=model,
        task=TaskConfig(limit=4),
        decode=DecodeOptions(**{"verify": "confidence", "branches": 2, "drafts": 0, "max_new_tokens": 48} | decode),
        parallel=ParallelConfig(threads=1),
        logging=LoggingConfig(progress="never"),
    )
    config.logging.wandb.mode = "disabled"
    folder.mkdir(exist_ok=True)
    report = run(config, folder, World("python"))
    return [json.loads(line)["text"] for line in (folder / "results.jsonl").read_text().splitlines()], report


def test_adapters_reach_the_weights_and_another_base_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = job(tmp_path / "plain", ModelOptions(), block_size=16)
    with caplog.at_level(logging.WARNING, "lopa_dist"):
        idle = ModelOptions(lora=str(adapter(tmp_path / "idle", 0.0)))
        assert job(tmp_path / "a", idle, block_size=16)[0] == plain
    assert "WARNING: model.lora=" in caplog.text
    assert "was trained on someone/another-model, but model.path is embedded" in caplog.text
    strong = replace(idle, lora=str(adapter(tmp_path / "strong", 0.05)))
    assert job(tmp_path / "b", strong, block_size=16)[0] != plain


def test_a_missing_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.lora=/no/such/adapter: no such folder"):
        job(tmp_path, ModelOptions(lora="/no/such/adapter"))


def test_auto_becomes_what_the_model_was_trained_for(tmp_path: Path) -> None:
    _, report = job(tmp_path / "vanilla", ModelOptions(), **AUTO)
    vanilla = {key: report["decode"][key] for key in AUTO}
    assert vanilla == {
        "context": "dual", "block_size": 32, "max_active_blocks": None,
    }  # fmt: skip
    found, report = job(tmp_path / "d2f", ModelOptions(pattern="d2f"), **AUTO)
    assert {key: report["decode"][key] for key in AUTO} == vanilla | {"context": "d2f"}
    said, _ = job(tmp_path / "said", ModelOptions(), context="d2f", block_size=32)
    assert found == said
