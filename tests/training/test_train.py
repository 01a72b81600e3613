"""The trainer runs, resumes and writes a checkpoint that loads, for every kind of data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.tokenizer import load_tokenizer
from training import own_answers
from training.train import Shape, TrainConfig, tokenizer_of, train


@pytest.mark.parametrize(
    ("data", "objective", "copying"),
    [
        ("word_problems", "masked", False),
        ("word_problems", "causal", False),
        ("lists", "masked", False),
        ("lists", "masked", True),
        ("lists", "causal", True),
    ],
)
def test_training_runs_and_resumes(
    data: str, objective: str, copying: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_answers, "EVERY", 2)
    monkeypatch.setattr(own_answers, "COUNT", 4)
    config = TrainConfig(
        data, objective, copying, str(tmp_path), steps=3, tokens=256, report_every=1, device="cpu", compile=False,
        threads=1, shape=Shape(32, 3, 2, 2, 32),
    )  # fmt: skip
    train(config)
    folder = train(replace(config, steps=5))
    log = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == [1, 2, 3, 4, 5]
    assert all(0 < entry["loss"] < 20 for entry in log)
    report = json.loads((tmp_path / "training.json").read_text())
    assert (report["steps"], report["config"]["data"]) == (5, data)
    model = load_model(folder, torch.float32, torch.device("cpu"))
    assert (model.config.hidden_size, model.config.layers) == (32, 3)
    assert model.config.family == ("lopa_causal" if objective == "causal" else "Dream")
    assert load_tokenizer(folder).get_vocab() == tokenizer_of(config).get_vocab()
