"""The page of a run is one file that says what its report says, whatever its texts hold."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from lopa_dist.config import TaskConfig
from lopa_dist.jobs.commands.trace import verdict_of
from lopa_dist.jobs.folder.results import results
from lopa_dist.jobs.run.job import run
from lopa_dist.jobs.show import run_page
from lopa_dist.jobs.show.compare import compare
from lopa_dist.jobs.show.metrics import wilson
from lopa_dist.jobs.show.report import UNCONFINED, accuracy_interval, duration, figures, read_report
from lopa_dist.jobs.show.run_page import LONGEST, headline, questions_again, questions_of, short, write_run_page
from lopa_dist.parallel.launcher import World
from lopa_dist.tasks.task import Item
from tests.jobs.run.test_job import config
from tests.pages import Page

HOSTILE = '</pre><script>alert("x")</script><img src=http://nowhere.test/a.png> & "'


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with drafts; as a job leaves it."""
    folder = tmp_path_factory.mktemp("judged")
    run(config(TaskConfig(limit=4), branches=0, verify="agreement", drafts=6), folder, World("python"))
    return folder


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without drafts over own prompts, whose texts want to be markup."""
    folder = tmp_path_factory.mktemp("hostile")
    prompts = folder / "prompts.jsonl"
    good = {"custom_id": HOSTILE, "prompt": f"Tom has 3 apples . {HOSTILE}", "max_tokens": 8}
    prompts.write_text(json.dumps(good) + "\n" + json.dumps({"custom_id": "bad", "prompt": ""}) + "\n")
    report = run(config(TaskConfig("batch", None, str(prompts))), folder, World("python"))
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    lines[0]["text"] = HOSTILE
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_run_page(folder, report, questions_again(report))
    return folder


def test_a_job_leaves_a_page_with_its_figures(judged: Path) -> None:
    page, report = Page(judged / "report.html"), read_report(judged / "report.json")
    assert page.needs_nothing()
    assert page.count("script") == 0
    assert page.titles[0] == "arithmetic with embedded"
    for name, value in figures(report):
        assert name in page.text
        assert value in page.text
    assert "4 requests, decoded with verified lookahead (6 drafts per branch)" in page.text
    assert f"{report['accuracy']:.1%} of the answers are right" in page.text
    lines = [json.loads(line) for line in (judged / "results.jsonl").read_text().splitlines()]
    shown = [line for verdict in (True, False) for line in lines if line["correct"] is verdict][:3]
    assert all(line["custom_id"] in page.text and line["text"] in page.text for line in shown)
    assert "How many" in page.text, "the questions"


def test_a_page_says_that_a_rule_of_one_s_own_decoded(judged: Path) -> None:
    report = read_report(judged / "report.json")
    own = report | {"decode": report["decode"] | {"rule": "rules.py:LOPA"}}
    assert "decoded with your own rule (rules.py:LOPA): " in headline(own)
    assert "lookahead" not in headline(own)


def test_few_answers_that_are_all_right_prove_little() -> None:
    low, high = accuracy_interval({"accuracy": 1.0, "requests": 12, "errors": 2})
    assert (low, high) == (pytest.approx(0.722, abs=1e-3), 1.0)
    assert all(
        low <= right / n <= high for n in range(1, 300) for right in (0, 1, n) for low, high in [wilson(right / n, n)]
    )
    low, high = accuracy_interval({"accuracy": 0.5, "requests": 10_000, "errors": 0})
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.5098, abs=1e-4))


def test_acceptance_is_shown_where_drafts_were_verified(judged: Path, hostile: Path) -> None:
    page, report = Page(judged / "report.html"), read_report(judged / "report.json")
    assert [attributes["id"] for tag, attributes in page.tags if tag == "section"] == ["drafts"]
    assert f"{report['drafts']['accepted_per_forward']:.2f} accepted per forward" in page.text
    for depth, share in enumerate(report["drafts"]["acceptance"], 1):
        assert f"{depth}: {share:.0%}" in page.titles
    assert Page(hostile / "report.html").count("section") == 0


def test_texts_stay_texts(hostile: Path) -> None:
    page = Page(hostile / "report.html")
    assert page.needs_nothing()
    assert page.count("script") == 0
    assert page.text.count(HOSTILE) == 3, "as custom_id, question and answer"
    assert "prompt is empty" in page.text


def test_settings_that_differ_come_first_and_all_are_there(judged: Path) -> None:
    page = Page(judged / "report.html")
    changed, others = page.text.split("All settings")
    assert "decode.drafts=6 (default: 10)" in changed
    assert "decode.tau_conf=0.9" not in changed
    assert "decode.drafts=6 (default: 10)" in others
    assert "decode.tau_conf=0.9" in others


def test_the_command_is_what_was_typed(judged: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(judged, folder)
    assert "How to repeat it" not in Page(folder / "report.html").text, "Hydra did not start it"
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "overrides.yaml").write_text("- task.limit=4\n- task.input='my prompts.jsonl'\n")
    report = read_report(folder / "report.json")
    report["world"] |= {"launcher": "mpirun", "size": 3}
    write_run_page(folder, report, {})
    text = Page(folder / "report.html").text
    assert """mpirun -n 3 lopa-dist task.limit=4 'task.input='"'"'my prompts.jsonl'"'"''""" in text


def test_the_report_command_makes_the_same_page_again(judged: Path, hostile: Path, tmp_path: Path) -> None:
    for made in (judged, hostile):
        folder = tmp_path / made.name
        shutil.copytree(made, folder)
        before = (folder / "report.html").read_text()
        (folder / "report.html").unlink()
        compare(folder)
        assert (folder / "report.html").read_text() == before


def test_an_input_that_is_gone_leaves_the_answers(hostile: Path, tmp_path: Path) -> None:
    report = read_report(hostile / "report.json")
    for source in ("-", str(tmp_path / "gone.jsonl")):
        assert questions_again(report | {"task": report["task"] | {"input": source}}) == {}
    folder = tmp_path / "run"
    shutil.copytree(hostile, folder)
    write_run_page(folder, report, {})
    assert Page(folder / "report.html").text.count(HOSTILE) == 2


def test_programs_that_ran_unconfined_are_mentioned(judged: Path, tmp_path: Path) -> None:
    report = read_report(judged / "report.json")
    assert UNCONFINED not in Page(judged / "report.html").text
    report["task"] |= {"name": "humaneval", "allow_code_execution": "unconfined"}
    assert UNCONFINED in Page(write_run_page(tmp_path, report, {})).text


def test_a_report_alone_makes_a_page_of_its_figures(judged: Path, tmp_path: Path) -> None:
    shutil.copy(judged / "report.json", tmp_path)
    compare(tmp_path)
    page = Page(tmp_path / "report.html")
    assert "4 requests" in page.text
    assert page.count("article") == 0


def test_questions_go_without_what_all_prompts_share_and_are_cut() -> None:
    items = [
        Item("a", prompt="Shared. Mine", prefix="Shared. "),
        Item("b", messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]),
        Item("c", error="no prompt"),
    ]
    assert questions_of(items) == {"a": "Mine", "b": "Why?", "c": ""}
    assert short("x" * (LONGEST + 5)) == "x" * LONGEST + " [5 more characters]"


def test_half_a_surrogate_pair_does_no_harm(judged: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(judged, folder)
    line = json.loads((folder / "results.jsonl").read_text().splitlines()[0])
    (folder / "results.jsonl").write_text(json.dumps(line | {"text": "a \ud800 b"}) + "\n")
    write_run_page(folder, read_report(folder / "report.json"), {})
    assert "a \ufffd b" in Page(folder / "report.html").text


def test_a_stopped_batch_says_so_first(hostile: Path, tmp_path: Path) -> None:
    """How much is done of how many, failures by reason, and the time of all attempts."""
    report = read_report(hostile / "report.json")
    assert report["failures"] == {"prompt is empty; give it a text, or leave the line out": 1}
    assert {"date", "host", "device", "load", "code"} == report["made"].keys()
    assert "STOPPED" not in Page(hostile / "report.html").text
    report |= {"requests": 226, "errors": 34, "expected": 3000, "attempts": 5, "decode_s": 691.2, "wall_s": 3.6}
    report["failures"] = {"prompt must be a non-empty string": 30, "too long": 4}
    write_run_page(tmp_path, report, {})
    page = Page(tmp_path / "report.html")
    assert "STOPPED: 226 of 3,000 requests are done." in page.text
    assert page.text.index("STOPPED") < page.text.index("226 requests (34 with errors)")
    tiles = dict(run_page.tiles(report))
    assert (tiles["done"], tiles["failed"]) == ("192 of 3,000", "34")
    assert (tiles["requests per hour"], tiles["time of 5 attempts"]) == ("1,000", "12 min")
    assert "3.6 s of wall time" not in page.text
    for words in ("prompt must be a non-empty string", "too long", report["made"]["host"], report["made"]["date"][:10]):
        assert words in page.text


def test_what_makes_answers_worse_is_told_before_the_figures(hostile: Path, tmp_path: Path) -> None:
    """What the job warned of when it began, and answers that have not their format."""
    report = read_report(hostile / "report.json")
    assert any("does not know" in warning for warning in report["warnings"])
    report |= {"tries": {"answers": 9, "invalid": 5, "tries": 15, "failed_tokens": 80}}
    page = Page(write_run_page(tmp_path, report, {})).text
    assert page.index("Note: Prompts with words that model=embedded does not know") < page.index("completion tokens")
    assert "(1 with errors, 5 in the wrong format)" in page


def test_answers_that_were_cut_are_counted(hostile: Path, tmp_path: Path) -> None:
    """They look finished, and most of a job's may be cut."""
    report = read_report(hostile / "report.json")
    reasons = [json.loads(line)["finish_reason"] for line in (hostile / "results.jsonl").read_text().splitlines()]
    assert report["cut"] == reasons.count("length") > 0
    wanted = ("answers cut at their limit", f"{report['cut']} of {len(reasons) - 1} (decode.max_new_tokens, or")
    assert any((name, words[: len(wanted[1])]) == wanted for name, words in figures(report))


def test_a_wrong_answer_stands_beside_the_right_one() -> None:
    line = {
        "custom_id": "a",
        "text": "49",
        "finish_reason": "stop",
        "correct": False,
        "extracted": "49",
        "expected": "54",
    }
    assert run_page.answer(line, "wrong", "")["details"] == "read as 49, expected 54"
    assert run_page.answer(line | {"correct": True}, "right", "")["details"] == "read as 49"
    assert verdict_of(line) == "wrong, read as '49'; expected '54'"
    assert verdict_of({"text": "x"}) == ""


def test_a_long_prompt_begins_in_three_lines(judged: Path, tmp_path: Path) -> None:
    questions = {line["custom_id"]: "long " * 300 for line in results(judged)}
    assert run_page.begins("short") == ""
    (tmp_path / "results.jsonl").write_text((judged / "results.jsonl").read_text())
    page = write_run_page(tmp_path, read_report(judged / "report.json"), questions).read_text()
    summaries = re.findall(r"<summary>(long .*?)</summary>", page, re.DOTALL)
    assert summaries
    assert all(len(summary) < 300 for summary in summaries)


def test_a_time_as_people_write_it() -> None:
    assert [duration(s) for s in (3.61, 59.96, 90, 3599, 7260)] == [
        "3.6 s",
        "60.0 s",
        "2 min",
        "1 h 00 min",
        "2 h 01 min",
    ]
