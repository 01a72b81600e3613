"""A job neither replaces its prompts nor reads its own answers, whatever links lead to them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lopa_dist.checks import UserError
from lopa_dist.config import TaskConfig
from lopa_dist.jobs.folder.apart import check_apart
from lopa_dist.jobs.run.job import run
from lopa_dist.parallel.launcher import World
from tests.jobs.run.test_job import config


def write(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"prompt": "Ann has 2 books .", "max_tokens": 4}) + "\n")
    return file


@pytest.mark.parametrize("source", ["in", "in/*.jsonl", "in/link.jsonl"])
@pytest.mark.parametrize("out", ["real-00000.jsonl", "real-*.jsonl", "again/real-00000.jsonl"])
def test_prompts_behind_links_are_not_replaced(tmp_path: Path, source: str, out: str) -> None:
    prompts = write(tmp_path / "real-00000.jsonl")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link.jsonl").symlink_to("../real-00000.jsonl")
    (tmp_path / "again").symlink_to(".")
    before = prompts.read_bytes()
    task = TaskConfig("batch", None, f"{tmp_path}/{source}", output=f"{tmp_path}/{out}")
    with pytest.raises(UserError, match=r"the results would replace (the )?prompts"):
        run(config(task), tmp_path / "run", World("python"))
    assert prompts.read_bytes() == before
    check_apart(TaskConfig("batch", None, task.input, output=f"{tmp_path}/other-*.jsonl"), tmp_path / "run")


@pytest.mark.parametrize("source", ["run", "run/*.jsonl", "**/*.jsonl", "run/results.jsonl", "link/results.jsonl"])
def test_a_job_does_not_read_its_own_answers(tmp_path: Path, source: str) -> None:
    write(tmp_path / "run" / "results.jsonl")
    (tmp_path / "link").symlink_to("run")
    task = TaskConfig("batch", None, f"{tmp_path}/{source}")
    with pytest.raises(UserError, match=r"names a file that the job writes itself, .*Give another hydra\.run\.dir"):
        check_apart(task, tmp_path / "run")
    if source in ("run/results.jsonl", "link/results.jsonl"):
        check_apart(task, tmp_path / "another")


def test_prompts_may_lie_in_the_run_folder(tmp_path: Path) -> None:
    file = write(tmp_path / "prompts.jsonl")
    for _ in range(2):
        assert run(config(TaskConfig("batch", None, str(file))), tmp_path, World("python"))["requests"] == 1


@pytest.mark.parametrize("name", ["errors.jsonl", "results.jsonl"])
def test_an_output_is_no_file_of_the_run(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / "prompts.jsonl")
    task = TaskConfig("batch", None, str(file), output=str(tmp_path / "run" / name))
    with pytest.raises(UserError, match="is a file that the job itself writes into its run folder"):
        run(config(task), tmp_path / "run", World("python"))


def test_an_empty_input_leaves_earlier_results(tmp_path: Path) -> None:
    file, out = write(tmp_path / "prompts.jsonl"), tmp_path / "answers.jsonl"
    task = TaskConfig("batch", None, str(file), output=str(out))
    run(config(task), tmp_path / "run", World("python"))
    before = out.read_bytes()
    assert before
    file.write_text("\n")
    for folder in ("run", "another"):
        with pytest.raises(UserError, match=r"^nothing to run: task\.input=.*prompts\.jsonl has no lines$"):
            run(config(task), tmp_path / folder, World("python"))
    assert out.read_bytes() == (tmp_path / "run" / "results.jsonl").read_bytes() == before
