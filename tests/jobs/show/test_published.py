"""Published scores: of presets that are there, as the page says, and beside our figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from lopa_dist.config import CONF, composed
from lopa_dist.jobs.show.published import PUBLISHED, published
from lopa_dist.jobs.show.report import figures

PAGE = (Path(__file__).parents[3] / "docs" / "models.md").read_text()


@pytest.mark.parametrize("path", PUBLISHED)
def test_the_page_and_the_presets_agree(path: str) -> None:
    known = PUBLISHED[path]
    assert (CONF / "model" / f"{known.preset}.yaml").exists()
    assert composed([f"model={known.preset}", *known.command.split()]).model.path == path
    scores = ", ".join(f"{task} {score:.1f}" for task, score in known.scores.items())
    row = (
        f"| `{known.preset}` | {scores} | {known.settings} | {known.source} | `model={known.preset} {known.command}` |"
    )
    assert row in PAGE


def test_a_run_has_the_figure_beside_its_own() -> None:
    def told(task: str, harness: str | None = None, lora: str | None = None) -> str | None:
        model = {"path": "GSAI-ML/LLaDA-8B-Base", "lora": lora}
        report = {
            "task": {"name": task, "harness": harness},
            "model": model,
            "accuracy": 0.5,
            "requests": 8,
            "errors": 0,
        }
        report |= {"tokens_per_s": {"job": 1.0}, "wall_s": 1.0, "decode_s": 1.0, "completion_tokens": 8, "forwards": 8}
        return dict(figures(report | {"tpf": 1.0})).get("the authors report")

    assert told("gsm8k", None, None).startswith("70.3%")
    assert told("harness", "piqa").startswith("73.6%")
    assert told("harness", "boolq") is None
    assert told("gsm8k", None, "my/adapter") is None
    assert published({"task": {"name": "gsm8k"}, "model": {"path": "embedded"}}) is None
