"""A data set that cannot be had is told before a job begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from lopa_dist.composing import composed
from lopa_dist.sweep import main
from lopa_dist.tasks.hub_data import data_sets, why_not_there


def sources(*overrides: str) -> list[str]:
    return data_sets(composed(list(overrides)).task)


def test_what_a_task_reads_of_the_hub() -> None:
    assert sources("task=gsm8k") == ["hf://openai/gsm8k:main:test", "hf://openai/gsm8k:main:train"]
    assert sources("task=gsm8k", "task.fewshot=0") == ["hf://openai/gsm8k:main:test"]
    assert sources("task=gsm8k", "task.input=x.jsonl") == ["hf://openai/gsm8k:main:train"], "the examples"
    assert sources("task=mbpp", "task.input=x.jsonl") == [], "the file has the examples"
    assert len(sources("task=mbpp_plus", "task.input=x.jsonl")) == 1, "they are MBPP's"
    assert sources("task=humaneval") == ["hf://openai/openai_humaneval:test"]
    assert sources("task=batch", "task.input=hf://a/b:train") == ["hf://a/b:train"]
    assert sources() == sources("task=batch", "task.input=x.csv") == []


def test_an_offline_node_without_the_data_set_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = why_not_there("hf://openai/gsm8k:main:test")
    assert said.startswith("the data set openai/gsm8k is not in the cache, and HF_HUB_OFFLINE is set; where there is")
    assert "hf download --repo-type dataset openai/gsm8k --local-dir DIR" in said
    assert said.endswith("task.input=hf://DIR:main:test here")
    with pytest.raises(SystemExit, match="the job would be refused: the data set openai/gsm8k is not in the cache"):
        main(2, ["task=gsm8k"])
    assert why_not_there(f"hf://{tmp_path}:train") == "", "a folder"
    (tmp_path / "openai___gsm8k").mkdir()
    assert why_not_there("hf://openai/gsm8k:main:test") == ""


def test_a_hub_that_cannot_be_reached_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def info(self: object, name: str, timeout: float) -> None:
        raise ConnectionError(f"no way to {name}")

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    said = why_not_there("hf://a/b:train")
    assert "cannot be had from the hub (ConnectionError: no way to a/b); where" in said
