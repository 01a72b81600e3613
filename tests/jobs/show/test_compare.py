"""The page of several runs has a point and a row for each, with its settings."""

from __future__ import annotations

import csv
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lopa_dist.checks import UserError
from lopa_dist.commands import perform
from lopa_dist.jobs.folder.attempt_record import AttemptRecord
from lopa_dist.jobs.show.compare import compare
from tests.jobs.show.sweeps import RUNS, fronts, made_sweep, make, sweep
from tests.pages import Page


def test_scored_runs_have_no_rows_per_token(tmp_path: Path, report: dict[str, Any]) -> None:
    sweep(tmp_path, report, rows_per_token=0.0)
    assert "rows_per_token" not in (tmp_path / "comparison.csv").read_text()


def test_a_run_s_name_is_no_markup(tmp_path: Path, report: dict[str, Any]) -> None:
    for name in ("a [", "b"):
        (tmp_path / name / "x]").mkdir(parents=True)
        (tmp_path / name / "x]" / "report.json").write_text(json.dumps(report))
    console = Console(record=True, width=200)
    compare(tmp_path, console)
    assert "a [/x]" in console.export_text()


def test_a_folder_that_cannot_be_written_has_its_table_all_the_same(
    tmp_path: Path, report: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a colleague's, which can only be read."""
    make(tmp_path, "one", report, "+")
    (tmp_path / "comparison.csv").mkdir()
    with pytest.raises(
        UserError, match=r"the table is above, but .* cannot be written \(.*\): no comparison.csv, figure"
    ):
        compare(tmp_path)
    assert "100.0 " in capsys.readouterr().out
    (tmp_path / "one" / ".results.csv.partial").mkdir()
    with pytest.raises(UserError, match=r"one cannot be written \(.*\): name another file with --out"):
        perform("table", [str(tmp_path / "one")])


def test_runs_that_have_not_ended_are_called_that(tmp_path: Path) -> None:
    (tmp_path / "a" / "journal").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"not finished; `lopa-dist status .*` says how it goes on"):
        compare(tmp_path)


def test_each_run_is_a_point_and_a_row_with_its_settings(tmp_path: Path, report: dict[str, Any]) -> None:
    page = sweep(tmp_path, report)
    assert page.needs_nothing()
    assert page.count("script") == 0
    assert page.count("svg") == 3
    assert page.count("circle") == 3 * len(RUNS)
    for branches, tau, tpf, accuracy, rows in RUNS:
        tooltip = f"run branches={branches}, tau_conf={tau}, accuracy % {100 * accuracy:.1f} ("
        figures = f"), TPF {tpf:.2f}, rows/token {rows:.1f}"
        assert sum(tooltip in title and figures in title for title in page.titles) == 3
        assert f"lopa-dist decode.branches={branches} decode.tau_conf={tau}" in page.text
    assert page.count("tr") == 1 + len(RUNS)
    assert "Number 1 is the most accurate: 98.0% at 2.00 tokens per forward pass." in page.text
    assert "Number 4 has the most tokens per forward pass: 90.0% at 4.00." in page.text
    # on the front of tokens per forward all but the last, of rows per token the first alone
    on_front = [title.split(".")[0] for title, best in zip(page.titles[1:], fronts(page), strict=True) if best]
    assert on_front[:4] == ["1", "2", "4", "1"]


def test_runs_without_a_verdict_have_a_table_alone(tmp_path: Path, report: dict[str, Any]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        unjudged = {key: value for key, value in report.items() if key != "accuracy"}
        (tmp_path / name / "report.json").write_text(json.dumps(unjudged | {"seed": len(name)}))
    compare(tmp_path)
    page = Page(tmp_path / "comparison.html")
    assert page.count("svg") == 0
    assert page.count("tr") == 3
    assert "accuracy" not in page.text
    assert "accuracy" not in (tmp_path / "comparison.csv").read_text()
    assert not (tmp_path / "pareto.pdf").exists()


def test_several_folders_are_compared_in_the_one_that_has_them(
    tmp_path: Path, report: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for drafts, name in enumerate(("one", "two", "three"), 2):
        make(tmp_path / "sweeps", f"{name}/run", report, "++--", drafts=drafts)
        (tmp_path / "sweeps" / name / "failed" / ".hydra").mkdir(parents=True)
        (tmp_path / "sweeps" / name / "failed" / ".hydra" / "overrides.yaml").write_text("[]")
    monkeypatch.chdir(tmp_path)
    perform("report", ["sweeps/one", "sweeps/two/run"])
    with (tmp_path / "sweeps" / "comparison.csv").open(encoding="utf-8") as file:
        assert {row["run"] for row in csv.DictReader(file)} == {"one/run", "two/run", "one/failed"}
    assert "To pass on: sweeps/comparison.html" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"nothing: no report\.json in it or below it"):
        perform("report", ["sweeps/one", "nothing"])
    with pytest.raises(UserError, match="the folder that contains them all, not /"):
        perform("report", ["sweeps", "/dev"])


def test_a_run_that_was_started_again_is_named(
    tmp_path: Path, report: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its report is of less than its input."""
    for name, tau in (("one", 0.5), ("two", 0.9)):
        make(tmp_path, name, report, "++--", tau_conf=tau)
        (tmp_path / name / "journal").mkdir()
    for name, number, expected in (("one", 1, 4), ("two", 2, 50)):
        record = AttemptRecord(number, expected, 0, 4, 0, "python", 1, str(tmp_path), None)
        record.write(tmp_path / name / "journal")
    compare(tmp_path)
    said = capsys.readouterr().out
    assert f"STOPPED: 4 of 50 requests of {tmp_path / 'two'} are done; its figures here" in said
    assert said.count("STOPPED") == 1


def test_runs_without_a_report_are_in_the_table(tmp_path: Path, report: dict[str, Any]) -> None:
    for drafts in (0, 4):
        make(tmp_path, f"decode.drafts={drafts}", report, "++--", drafts=drafts)
    (tmp_path / "decode.drafts=9" / ".hydra").mkdir(parents=True)
    (tmp_path / "decode.drafts=9" / ".hydra" / "overrides.yaml").write_text("- decode.drafts=9\n- task.limit=4\n")
    (tmp_path / "decode.drafts=4" / "shard-0" / ".hydra").mkdir(parents=True)
    (tmp_path / "decode.drafts=4" / "shard-0" / ".hydra" / "overrides.yaml").write_text("[]")
    console = Console(width=100, record=True)
    compare(tmp_path, console)
    [row] = [line.split() for line in console.export_text().splitlines() if line.strip().startswith("drafts=9 ")]
    assert row[:3] == ["drafts=9", "not", "finished"]
    assert (tmp_path / "comparison.csv").read_text().splitlines()[3].startswith("decode.drafts=9,9,")
    assert "Not finished, so not above: decode.drafts=9" in Page(tmp_path / "comparison.html").text


def test_why_there_is_no_figure_is_said(tmp_path: Path, report: dict[str, Any]) -> None:
    make(tmp_path, "decode.drafts=0", report, "++--", drafts=0)
    unjudged = {key: value for key, value in report.items() if not key.startswith("accuracy")}
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "report.json").write_text(json.dumps(unjudged))
    console = Console(width=200, record=True)
    compare(tmp_path, console)
    assert not list(tmp_path.glob("*.pdf"))
    assert "No figure of arithmetic with embedded, because these runs were not judged: plain" in console.export_text()


def test_equal_accuracies_have_no_first(tmp_path: Path, report: dict[str, Any]) -> None:
    for drafts in (0, 2, 16):
        make(tmp_path, f"decode.drafts={drafts},seed=1", report, "++--", drafts=drafts)
    compare(tmp_path, Console(quiet=True))
    assert "All have the same accuracy, 50.0%." in Page(tmp_path / "comparison.html").text


def test_a_page_speaks_of_lines_where_there_are_some(tmp_path: Path, report: dict[str, Any]) -> None:
    """Folders that a person named are curves of one point each."""
    for name, drawn in (("decode.drafts={},decode.tau_conf={}", True), ("mine-{}-{}", False)):
        for drafts, tau in itertools.product((0, 4), (0.9, 0.8)):
            folder = tmp_path / str(drawn)
            make(folder, name.format(drafts, tau), report, "++--", drafts=drafts, tau_conf=tau)
        compare(folder, Console(quiet=True))
        page = (folder / "comparison.html").read_text()
        assert ("Along a thin line" in page) == drawn
        legend = re.findall(r'<span class="legend c(\d)">(.*?)</span>', page)
        assert legend == ([("0", "tau_conf=0.8"), ("1", "tau_conf=0.9")] if drawn else [])


def test_each_task_and_model_has_a_section(tmp_path: Path, report: dict[str, Any]) -> None:
    for task in ("arithmetic", "lists"):
        for drafts in (0, 4):
            of_task = report | {"task": report["task"] | {"name": task}}
            make(tmp_path, f"decode.drafts={drafts},task={task}", of_task, "++-" + "+" * drafts, drafts=drafts)
    console = Console(width=100, record=True)
    compare(tmp_path, console, baseline="drafts=0")
    shown = console.export_text()
    assert shown.index("arithmetic with embedded") < shown.index("lists with embedded")
    page = Page(tmp_path / "comparison.html")
    assert page.count("svg") == 2 * 3
    assert page.text.count("They have judged different numbers of answers") == 2
    figures = {
        f"pareto-{task}-with-embedded{column}.pdf" for task in ("arithmetic", "lists") for column in ("", "-column")
    }
    assert {file.name for file in tmp_path.glob("*.pdf")} == figures
    told = re.sub(r"\s+", " ", shown.partition("comparison.csv")[2])
    assert all(name in told for name in figures), told
    assert len((tmp_path / "comparison.csv").read_text().splitlines()) == 5


def test_tables_for_a_paper_and_a_readme(
    tmp_path: Path, report: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    made_sweep(tmp_path, report, 4)
    compare(tmp_path, form="latex")
    table = capsys.readouterr().out
    assert table.startswith("% \\usepackage{booktabs}\n\\begin{table}\n")
    assert "\\toprule\n" in table
    assert "with embedded, 300 requests each. Accuracies have Wilson's 95\\,\\% confidence intervals.}" in table
    assert "\ndecode=verified\\_tree & 9" in table
    assert re.search(r"& \d\d\.\d \(\d\d\.\d--\d\d\.\d\) &", table)
    assert len({line.count("&") for line in table.splitlines() if line.endswith("\\\\")}) == 1
    compare(tmp_path, form="markdown")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "**arithmetic with embedded, 300 requests each**"
    assert "requests" not in lines[2]
    assert [line.count("|") for line in lines[2:-3]] == [lines[2].count("|")] * 6
    assert lines[-2] == "Accuracies have Wilson's 95 % confidence intervals."
    compare(tmp_path, form="markdown", baseline="decode=verified")
    assert "differences" not in capsys.readouterr().out, "no results, no differences"
    for name in tmp_path.glob("*/report.json"):
        line = {"custom_id": "0", "index": 0, "finish_reason": "stop", "correct": True}
        (name.parent / "results.jsonl").write_text(json.dumps(line) + "\n")
    compare(tmp_path, form="markdown", baseline="decode=verified")
    assert "differences are from decode=verified on the same problems, with" in capsys.readouterr().out
    assert (tmp_path / "comparison.html").exists(), "whatever form is printed, all is written"
    (tmp_path / "stopped" / ".hydra").mkdir(parents=True)
    (tmp_path / "stopped" / ".hydra" / "overrides.yaml").write_text("- decode=lopa\n")
    (tmp_path / "stopped" / "cli.log").write_text("starting\ndecode.tau=2: must be at most 1\n")
    for form, line in (
        ("latex", "% Not finished, so not above: stopped"),
        ("markdown", "Not finished, so not above: s"),
    ):
        compare(tmp_path, form=form)
        said = capsys.readouterr()
        assert line in said.out
        assert "stopped; its log ends with: decode.tau=2: must be at most 1\n" in said.err
