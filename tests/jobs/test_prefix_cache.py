"""Prompts that begin alike, from the input file to the report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lopa_dist.config import TaskConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.jobs.run.job import run
from lopa_dist.parallel.launcher import World
from tests.jobs.run.test_job import config, lines

SHOWN = [
    {"role": "user", "content": "Ann has 3 books . Ann gets 4 more . How many books does Ann have ?"},
    {"role": "assistant", "content": "Now Ann has 3 + 4 = 7 books . #### 7"},
]


def job(folder: Path, prefix_cache: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The report and the texts of a job of questions behind one example, two samples each."""
    folder.mkdir(exist_ok=True)
    prompts = folder / "prompts.jsonl"
    asked = [f"Ben has {n} pens . Ben gives 5 away . How many pens does Ben have now ?" for n in range(10, 16)]
    questions = [{"messages": [*SHOWN, {"role": "user", "content": text}], "n": 2} for text in asked]
    prompts.write_text("".join(json.dumps(question) + "\n" for question in questions))
    options = replace(config(TaskConfig("batch", None, str(prompts))), engine=EngineConfig(prefix_cache=prefix_cache))
    report = run(options, folder, World("python"))
    return report, {line["custom_id"]: line["text"] for line in lines(folder)}


def test_an_exact_cache_computes_samples_once_and_changes_nothing(tmp_path: Path) -> None:
    own, texts = job(tmp_path / "none", "none")
    assert own["prompt_tokens"]["reused"] == 0
    report, found = job(tmp_path / "exact", "exact")
    assert found == texts
    assert report["prompt_tokens"] == {
        "total": own["prompt_tokens"]["total"],
        "reused": own["prompt_tokens"]["total"] // 2,
    }
    assert str(report["prompt_tokens"]["reused"]) in (tmp_path / "exact" / "report.html").read_text()
