"""Files of a run that are damaged, or of another version, end in a line that names them and the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lopa_dist.commands import perform
from lopa_dist.config import TaskConfig
from lopa_dist.jobs.commands.shards import merge_shards
from lopa_dist.jobs.commands.trace import trace
from lopa_dist.jobs.run.job import run
from lopa_dist.jobs.show.compare import compare
from lopa_dist.parallel.launcher import World
from tests.jobs.run.test_job import config


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run(config(TaskConfig(limit=2), max_new_tokens=16), folder, World("python"))
    return folder


def report(folder: Path) -> None:
    compare(folder, Console(quiet=True))


def traced(folder: Path) -> None:
    trace(folder, "1")


def merged(folder: Path) -> None:
    merge_shards(folder.parent)


def tabulated(folder: Path) -> None:
    perform("table", [str(folder), "--out", str(folder / "table.csv")])


def resumed(folder: Path) -> None:
    run(config(TaskConfig(limit=2), max_new_tokens=16), folder, World("python"))


def of_another_version(text: str) -> str:
    found: dict[str, Any] = json.loads(text)
    found["task"]["an_unknown_option"] = 1
    return json.dumps(found)


def cut(text: str) -> str:
    return text[: 2 * len(text) // 5]


@pytest.mark.parametrize(
    ("name", "damage", "use", "message"),
    [
        ("report.json", of_another_version, report, r"report\.json: .*an_unknown_option.* made with lopa_dist 0"),
        ("report.json", of_another_version, traced, r"report\.json: .*an_unknown_option.*run the job again"),
        ("report.json", lambda _: "[1]", report, r"report\.json is not the report of a job"),
        ("report.json", lambda _: "{}", tabulated, r"report\.json is not the report of a job"),
        ("report.json", lambda _: "{}", traced, r"report\.json is not the report of a job"),
        ("report.json", cut, merged, r"report\.json is incomplete"),
        ("results.jsonl", cut, traced, r"results\.jsonl, line \d: damaged"),
        ("results.jsonl", lambda text: "\ud800".encode("utf-8", "surrogatepass").decode("latin1") + text, report,
         r"results\.jsonl, line 1: damaged .*start its job again"),
        ("results.jsonl", lambda _: "[]\n", traced, r"results\.jsonl, line 1: no result of a job"),
        ("journal/settings.json", cut, resumed, r"settings\.json: damaged .*job\.resume=new"),
        ("journal/settings.json", lambda _: "[]", resumed, r"settings\.json: damaged .*job\.resume=new"),
    ],
)  # fmt: skip
def test_one_line_says_which_file_and_what_to_do(
    finished: Path, tmp_path: Path, name: str, damage: Callable[[str], str], use: Callable[[Path], None], message: str
) -> None:
    folder = tmp_path / "0"
    shutil.copytree(finished, folder)
    (folder / name).write_text(damage((folder / name).read_text()))
    with pytest.raises(ValueError, match=message) as error:
        use(folder)
    assert "\n" not in str(error.value)


def test_answers_without_settings_are_not_continued(finished: Path, tmp_path: Path) -> None:
    """They might be another model's."""
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "journal" / "settings.json").unlink()
    with pytest.raises(ValueError, match=r"journal has answers, but no settings\.json.*job\.resume=new"):
        resumed(tmp_path / "run")
