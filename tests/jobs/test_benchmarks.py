"""Benchmark tasks through a whole job with the embedded model, which solves none of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lopa_dist.config import TaskConfig
from lopa_dist.jobs.run.job import run
from lopa_dist.jobs.run.prompts import Encoder
from lopa_dist.parallel.launcher import World
from lopa_dist.tasks.task import Item
from tests.jobs.run.test_job import config, lines

PROBLEM = "Tom has 3 apples . Tom buys 4 more . How many apples does Tom have now ?"


def test_gsm8k_reports_both_accuracies(tmp_path: Path) -> None:
    rows = [{"question": PROBLEM, "answer": f"3+4\n#### {n}"} for n in (7, 8)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TaskConfig("gsm8k", None, str(tmp_path / "test.jsonl"), fewshot=0)
    report = run(config(task), tmp_path, World("python"))
    found = lines(tmp_path)
    assert report["accuracy"] == sum(line["correct"] for line in found) / 2
    assert report["accuracy_flexible"] == sum(line["correct_flexible"] for line in found) / 2
    assert found[0]["text"] == found[1]["text"]
    assert sum(line["correct_flexible"] for line in found) <= 1
    assert "accuracy, flexible" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("sandbox_to_itself")
def test_humaneval_without_running_code_is_not_judged(tmp_path: Path) -> None:
    row = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": "def check(f): 1 / 0"}
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    task = TaskConfig("humaneval", None, str(tmp_path / "test.jsonl"))
    with pytest.raises(ValueError, match=r"task\.allow_code_execution=true"):
        run(config(task), tmp_path, World("python"))
    task.allow_code_execution = False
    report = run(config(task, max_new_tokens=16), tmp_path, World("python"))
    assert "accuracy" not in report
    assert "correct" not in lines(tmp_path)[0]
    task.allow_code_execution = True
    with pytest.raises(ValueError, match="allow_code_execution was False, is True"):  # its results have no verdicts
        run(config(task, max_new_tokens=16), tmp_path, World("python"))
    report = run(config(task, max_new_tokens=16), tmp_path / "judged", World("python"))
    assert report["accuracy"] == 0
    assert "Error" in lines(tmp_path / "judged")[0]["reason"]


def test_the_job_keeps_the_form_that_fits(embedded_model: Any, embedded_tokenizer: Any) -> None:
    both = Item("a", "plain", [{"role": "user", "content": "chat"}], answer_prefix="So")
    for mode, expected in (("always", (None, both.messages, "So")), ("never", ("plain", None, ""))):
        job = config(TaskConfig())
        job.model.chat_template = mode
        item = Encoder(job, embedded_model.config, embedded_tokenizer).choose(both)
        assert (item.prompt, item.messages, item.answer_prefix) == expected


def test_the_answer_prefix_follows_the_template(embedded_model: Any, embedded_tokenizer: Any) -> None:
    encoder = Encoder(config(TaskConfig()), embedded_model.config, embedded_tokenizer)
    item = Item("a", messages=[{"role": "user", "content": PROBLEM}])
    begun = Item("a", messages=item.messages, answer_prefix="Finally Tom has")
    ids, more = encoder.encode(0, item).prompt, encoder.encode(0, begun).prompt
    assert more[: len(ids)] == ids
    assert embedded_tokenizer.decode(more[len(ids) :]).split() == ["Finally", "Tom", "has"]
