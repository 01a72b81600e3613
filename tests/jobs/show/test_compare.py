"""The page of several runs has a point and a row for each, with its settings."""

from __future__ import annotations

import csv
import itertools
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from lopa_dist.checks import UserError
from lopa_dist.commands import perform
from lopa_dist.config import TaskConfig
from lopa_dist.jobs.folder.attempt_record import AttemptRecord
from lopa_dist.jobs.run.job import run
from lopa_dist.jobs.show.compare import compare
from lopa_dist.jobs.show.comparison import Comparison
from lopa_dist.jobs.show.equal_texts import equal_texts
from lopa_dist.jobs.show.metrics import wilson
from lopa_dist.jobs.show.page import Point, Scatter
from lopa_dist.jobs.show.paired import verdicts
from lopa_dist.jobs.show.pareto import FRONT, draw_pareto, in_order
from lopa_dist.jobs.show.point_names import curves_of, words_of
from lopa_dist.jobs.show.report import accuracy_interval
from lopa_dist.jobs.show.seed_groups import SeedGroup, grouped, load_reports
from lopa_dist.parallel.launcher import World
from tests.jobs.run.test_job import config
from tests.pages import Page

RUNS = [(0, 0.9, 2.0, 0.98, 20.0), (3, 0.9, 3.0, 0.96, 40.0), (7, 0.9, 4.0, 0.90, 80.0), (7, 0.7, 3.5, 0.88, 85.0)]


@pytest.fixture(autouse=True)
def _blank_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make figures for papers empty files, except in tests that look into them: each takes a second to draw."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("lopa_dist.jobs.show.pareto.draw_pareto", lambda file, *_: file.touch())


@pytest.fixture
def drawn() -> None:
    """Draw the figures in the test that asks for this."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run's report as of an idle machine: of a busy one, every table says so."""
    report = run(config(TaskConfig(limit=2)), tmp_path_factory.mktemp("run"), World("python"))
    report["made"]["load"] = 0.0
    report["made"].pop("others", None)
    del report["problems"]  # tests change the numbers that it follows from
    return report


def sweep(folder: Path, report: dict[str, Any], **more: Any) -> Page:
    """A page of four runs that differ in two settings."""
    for branches, tau, tpf, accuracy, rows in RUNS:
        name = folder / f"decode.branches={branches},decode.tau_conf={tau}"
        (name / ".hydra").mkdir(parents=True)
        (name / ".hydra" / "overrides.yaml").write_text(f"- decode.branches={branches}\n- decode.tau_conf={tau}\n")
        decode = report["decode"] | {"branches": branches, "tau_conf": tau}
        figures = {"tpf": tpf, "accuracy": accuracy, "rows_per_token": rows, "requests": 100}
        (name / "report.json").write_text(json.dumps(report | figures | {"decode": decode} | more))
    compare(folder)
    return Page(folder / "comparison.html")


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


def fronts(page: Page) -> list[bool]:
    """For each point, whether it is on the front."""
    return ["best" in str(attributes.get("class")).split() for tag, attributes in page.tags if tag == "g"]


NONE = Path("no/such/folder")


def named(report: dict[str, Any], *settings: dict[str, Any]) -> list[SeedGroup]:
    """Runs of a sweep with these decode settings."""
    return [
        SeedGroup(
            ",".join(f"decode.{k}={v}" for k, v in of.items()), report | {"decode": report["decode"] | of}, [NONE]
        )
        for of in settings
    ]


def test_along_a_curve_one_number_grows(report: dict[str, Any]) -> None:
    """What leaves the fewest curves; of equals the branches, else what has the most values. A word makes no curve."""

    def labels(*settings: dict[str, Any]) -> dict[str, list[str]]:
        return {curve: [label for label, _ in runs] for curve, runs in curves_of(named(report, *settings)).items()}

    assert labels(*({"branches": k, "tau_conf": 0.9 - k / 8} for k in (3, 0))) == {
        "tau_conf=0.9": ["branches=0"],
        "tau_conf=0.525": ["branches=3"],
    }
    beside = [
        *({"branches": 0, "drafts": 9, "tau_conf": tau} for tau in (0.9, 0.8, 0.6)),
        {"branches": 3, "drafts": 0, "tau_conf": 0.9},
    ]
    assert labels(*beside) == {
        "branches=0, drafts=9": ["tau_conf=0.6", "tau_conf=0.8", "tau_conf=0.9"],
        "branches=3, drafts=0": ["tau_conf=0.9"],
    }
    swept = [{"drafts": m, "tau_conf": tau} for m in (16, 4, 8) for tau in (0.9, 0.8)]
    assert labels(*swept) == {f"tau_conf={tau}": ["drafts=4", "drafts=8", "drafts=16"] for tau in (0.8, 0.9)}
    assert labels(*({"max_active_blocks": n} for n in (None, 4, 1))) == {
        "": ["max_active_blocks=1", "max_active_blocks=4", "max_active_blocks=null"]
    }
    assert labels({"force": "block"}, {"force": "leftmost"}) == {"force=block": [""], "force=leftmost": [""]}


def test_merged_shards_are_one_run(tmp_path: Path, report: dict[str, Any]) -> None:
    for name in ("array", "array/0", "array/1", "alone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps(report))
    assert [name for name, _ in load_reports(tmp_path)] == ["alone", "array"]
    assert [name for name, _ in load_reports(tmp_path / "array")] == ["."]


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


def test_settings_of_all_sections_tell_runs_apart(tmp_path: Path, report: dict[str, Any]) -> None:
    for name, limit in (("<b>a", 10), ("b", 20)):
        (tmp_path / name).mkdir()
        changed = report | {"task": report["task"] | {"limit": limit}}
        (tmp_path / name / "report.json").write_text(json.dumps(changed))
    compare(tmp_path)
    page = Page(tmp_path / "comparison.html")
    assert "task.limit" in page.text
    assert "<b>a" in page.text
    assert any("run b (task.limit=20), accuracy" in title for title in page.titles)


def make(folder: Path, name: str, report: dict[str, Any], right: str, **decode: Any) -> None:
    """A run whose answers are right (+) or wrong (-)."""
    (folder / name).mkdir(parents=True)
    figures = {"accuracy": right.count("+") / len(right), "judged": len(right), "requests": len(right)}
    seed = int(name.split("seed=")[1]) if "seed=" in name else 0
    made = report | figures | {"decode": report["decode"] | decode, "seed": seed}
    (folder / name / "report.json").write_text(json.dumps(made))
    lines = [
        {"custom_id": str(i), "index": i, "finish_reason": "stop", "correct": verdict == "+"}
        for i, verdict in enumerate(right)
    ]
    (folder / name / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_seeds_are_one_point_and_a_baseline_is_compared_on_the_same_problems(
    tmp_path: Path, report: dict[str, Any]
) -> None:
    for drafts, first, second in ((0, "++++--", "++++--"), (4, "+-----", "------")):
        for seed, right in ((1, first), (2, second)):
            make(tmp_path, f"decode.drafts={drafts},seed={seed}", report, right, drafts=drafts)
    console = Console(width=140, record=True)
    compare(tmp_path, console, baseline="decode.drafts=0")
    shown = console.export_text()
    assert "6 requests each" in shown
    with (tmp_path / "comparison.csv").open(newline="") as file:
        plain, drafted = csv.DictReader(file)
    assert (plain["drafts"], plain["seeds"], float(plain["accuracy"])) == ("0", "2", 4 / 6)
    assert float(plain["accuracy_low"]) < 0.4 < 0.9 < float(plain["accuracy_high"])  # of 6 problems, not 12
    assert plain["difference"] == plain["p"] == ""
    assert (drafted["better"], drafted["worse"], float(drafted["p"])) == ("0", "4", 0.125)
    assert float(drafted["difference"]) == pytest.approx(1 / 12 - 4 / 6)
    assert f"{100 * (1 / 12 - 4 / 6):+.1f} (" in shown
    assert "0.12" in shown
    page = Page(tmp_path / "comparison.html")
    assert page.count("circle") == 3 * 2
    assert "McNemar" in page.text
    for asked, message in (("decode.drafts=7", "no run is called so"), ("branches=2", "2 runs have these settings")):
        with pytest.raises(UserError, match=message):
            compare(tmp_path, Console(quiet=True), baseline=asked)
    alone = next(file.parent for file in tmp_path.glob("*/report.json"))
    with pytest.raises(UserError, match="there is only one run to compare"):
        compare(alone, Console(quiet=True), baseline="nope")


def make_stream(folder: Path, report: dict[str, Any], stream: int, seed: int, right: str) -> None:
    """A run at temperature 0.7 on a stream of problems."""
    of_stream = report | {"task": report["task"] | {"problem_seed": stream}, "whole_input": str(stream)}
    make(folder, f"{stream}/seed={seed}", of_stream, right, temperature=0.7)


def table_of(folder: Path, **options: Any) -> tuple[str, list[dict[str, str]]]:
    """What a comparison prints, in one line, and the rows of its file."""
    console = Console(width=250, record=True)
    compare(folder, console, **options)
    with (folder / "comparison.csv").open(newline="") as file:
        return " ".join(console.export_text().split()), list(csv.DictReader(file))


def test_the_spread_of_seeds_is_that_of_their_accuracies_over_all_problems(
    tmp_path: Path, report: dict[str, Any]
) -> None:
    verdicts = {(3, 0): "++++", (3, 1): "++--", (4, 0): "+-", (4, 1): "++"}
    for (stream, seed), right in verdicts.items():
        make_stream(tmp_path, report, stream, seed, right)
    shown, [row] = table_of(tmp_path)
    assert float(row["accuracy_sd"]) == pytest.approx(stdev([5 / 6, 4 / 6]))  # not that of single streams
    assert (row["seeds"], row["streams"], float(row["accuracy"])) == ("2", "2", pytest.approx(4.5 / 6))
    assert "sd 11.8%, 2 of problems" in shown
    assert "(sd: their standard deviation)" in shown
    make_stream(tmp_path, report, 3, 2, "+---")
    shown, [row] = table_of(tmp_path)
    assert "accuracy_sd" not in row
    assert "2-3, 2 of problems" in shown
    assert (
        "does not have every seed on every stream of problems, and so no sd (seeds by task.problem_seed: 3: 3, 4: 2)"
        in shown
    )


def test_a_run_that_repeats_another_counts_once(
    tmp_path: Path, report: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    for stream, right in ((3, "++--"), (4, "+++-")):
        make_stream(tmp_path, report, stream, 0, right)
    make_stream(tmp_path / "x", report, 4, 0, "+++-")
    _, [row] = table_of(tmp_path)
    assert (row["streams"], row["judged"]) == ("2", "8")
    assert "x/4/seed=0 is left out: it repeats 4/seed=0" in caplog.text
    make_stream(tmp_path / "y", report, 3, 0, "+---")
    _, rows = table_of(tmp_path)
    assert len(rows) == 4
    assert "have the same settings and seeds, but other results" in caplog.text


def test_links_to_runs_elsewhere_are_followed(tmp_path: Path, report: dict[str, Any]) -> None:
    for name in ("one", "two"):
        make(tmp_path / "runs" / name, "run", report, "++--", drafts=len(name))
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "one").symlink_to(tmp_path / "runs" / "one")
    (tmp_path / "both" / "two").symlink_to(tmp_path / "runs" / "two" / "run")
    (tmp_path / "both" / "itself").symlink_to(tmp_path / "both")
    assert [name for name, _ in load_reports(tmp_path / "both")] == ["one/run", "two"]


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
    with pytest.raises(UserError, match="the folder that has them all, not in /"):
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


def test_rows_of_two_sweeps_name_what_the_other_sweep_varies(tmp_path: Path, report: dict[str, Any]) -> None:
    typed = {"a/1": {"tau_conf": 0.5}, "a/2": {"tau_conf": 0.9}, "b/1": {"drafts": 0, "tau_conf": 0.7}, "b/2": {}}
    for name, settings in typed.items():
        make(tmp_path, name, report, "++--", **{"drafts": 10, "tau_conf": 0.8} | settings)
        (tmp_path / name / ".hydra").mkdir()
        words = "".join(f"- decode.{key}={value}\n" for key, value in settings.items())
        (tmp_path / name / ".hydra" / "overrides.yaml").write_text(words or "[]")
    [part] = [Comparison(tmp_path, grouped(tmp_path, load_reports(tmp_path)), None, [])]
    assert {group.name: words for group, words in zip(part.groups, words_of(part.groups), strict=True)} == {
        "a/1": {"tau_conf": "0.5", "drafts": "10"}, "a/2": {"tau_conf": "0.9", "drafts": "10"},
        "b/1": {"drafts": "0", "tau_conf": "0.7"}, "b/2": {},
    }  # fmt: skip


def test_a_single_setting_is_called_as_it_was_typed(tmp_path: Path, report: dict[str, Any]) -> None:
    for seed in (0, 1):
        make(tmp_path, f"seed={seed}", report, "++--", temperature=0.7)
        (tmp_path / f"seed={seed}" / ".hydra").mkdir()
        words = ["decode=embedded_plain", "decode.tau_conf=0.6", f"seed={seed}", "hydra.run.dir=x"]
        (tmp_path / f"seed={seed}" / ".hydra" / "overrides.yaml").write_text("".join(f"- {word}\n" for word in words))
    shown, [_] = table_of(tmp_path)
    assert "decode=embedded_plain, tau_conf=0.6" in shown
    assert "One setting, 2 runs." in Page(tmp_path / "comparison.html").text


def test_notes_of_the_same_kind_are_one(tmp_path: Path, report: dict[str, Any]) -> None:
    for drafts in (0, 2, 4):
        busy = f"other programs kept 1.{drafts} of 2 cores busy while this job generated"
        make(tmp_path, f"decode.drafts={drafts}", report | {"warnings": [busy]}, "++--", drafts=drafts)
    shown, _ = table_of(tmp_path)
    assert shown.count("other programs kept") == 1
    assert "All runs: other programs kept 1." in shown


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


def test_streams_of_problems_are_pooled(tmp_path: Path, report: dict[str, Any]) -> None:
    """Their interval is of all problems, and a baseline is compared on each stream's own."""
    verdicts = {0: ("+++-", "++--++", "+-+"), 4: ("++--", "++----", "+--")}
    for drafts, streams in verdicts.items():
        for stream, right in enumerate(streams, 3):
            name = f"decode.drafts={drafts},task.problem_seed={stream}"
            of_stream = report | {"task": report["task"] | {"problem_seed": stream}, "whole_input": str(stream)}
            make(tmp_path, name, of_stream, right, drafts=drafts)
    compare(tmp_path, Console(quiet=True), baseline="drafts=0")
    with (tmp_path / "comparison.csv").open(newline="") as file:
        plain, drafted = csv.DictReader(file)
    assert (plain["drafts"], plain["judged"], plain["streams"], plain["requests"]) == ("0", "13", "3", "13")
    assert float(plain["accuracy"]) == pytest.approx(9 / 13)
    low, high = wilson(9 / 13, 13)
    assert float(plain["accuracy_low"]) == pytest.approx(low)
    assert float(plain["accuracy_high"]) == pytest.approx(high)
    assert (drafted["better"], drafted["worse"]) == ("0", "4")
    assert "accuracy_sd" not in plain
    for width, wanted, gone in ((80, "drafts=4 ", "rows/token, seeds"), (120, " 3 of problems ", "")):
        console = Console(width=width, record=True)
        compare(tmp_path, console, baseline="drafts=0")
        shown = console.export_text()
        assert all(len(line) <= width for line in shown.splitlines()[:6])
        assert wanted in shown
        assert re.search(r"38\.5 \(\d\d\.\d-\d\d\.\d\) .*-\d\d\.\d \(-\d\d\.\d,-\d\.\d\)", shown)
        assert ("left out for lack of room; they are in comparison.csv: " in shown) == bool(gone)
        assert gone in shown
        assert re.search(r"\S *\n *\nIn ", shown), "an empty line ends the notes"


def test_samples_of_a_prompt_are_one_problem(tmp_path: Path, report: dict[str, Any]) -> None:
    for name, right in (("a", [1, 1, 0, 0]), ("b", [0, 0, 0, 0])):
        (tmp_path / name).mkdir()
        of = {"task": report["task"] | {"samples": 2}, "judged": 4, "requests": 4, "accuracy": sum(right) / 4}
        (tmp_path / name / "report.json").write_text(json.dumps(report | of))
        made = [
            {
                "custom_id": f"p{i // 2}#{i % 2}",
                "sample": i % 2,
                "index": i,
                "finish_reason": "stop",
                "correct": bool(x),
                "text": "",
                "tpf": 1.0,
            }
            for i, x in enumerate(right)
        ]
        (tmp_path / name / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    assert verdicts([tmp_path / "a"]) == {"p0": 1.0, "p1": 0.0}
    assert accuracy_interval(json.loads((tmp_path / "a" / "report.json").read_text())) == wilson(0.5, 2)
    console = Console(record=True, width=200)
    compare(tmp_path, console)
    assert "samples of a prompt count as one problem" in " ".join(console.export_text().split())


def test_seeds_alone_have_a_page_of_their_own(tmp_path: Path, report: dict[str, Any]) -> None:
    """The first run's page stays: figures of all seeds would stand beside its tokens and times there."""
    for seed in range(3):
        folder = tmp_path / f"seed={seed}"
        folder.mkdir()
        (folder / "report.json").write_text(json.dumps(report | {"seed": seed, "accuracy": 0.9 + 0.05 * (seed % 2)}))
        (folder / "report.html").write_text("its own page")
    compare(tmp_path)
    assert (tmp_path / "seed=0" / "report.html").read_text() == "its own page"
    assert "91.7" in Page(tmp_path / "comparison.html").text


@pytest.mark.parametrize(
    ("changed", "points", "note"),
    [
        ({}, 1, ""),
        ({"own_code": {"the source of decode.fill": "other"}}, 2, "same code: the source of decode.fill changed"),
        ({"own_code": {"the source of task": "other"}}, 2, "judged by the same rule"),
        ({"engine": {"max_sequences": 64}}, 2, ""),
        ({"parallel": {"threads": 2}}, 2, ""),
        ({"world": {"size": 4}}, 2, ""),
        ({"own_code": {"the source of task.score": "other"}}, 2, "judged by the same rule"),
        ({"weights": {"revision": "other"}}, 2, ""),
        ({"whole_input": "other", "whole_prompts": "other"}, 2, "had the same input"),
        ({"whole_input": "other"}, 2, ""),  # the same prompts, asked in another way
    ],
)
def test_seeds_are_not_one_point_where_files_have_changed_under_their_names(
    tmp_path: Path, report: dict[str, Any], changed: dict[str, Any], points: int, note: str
) -> None:
    """Nor are runs that differ in what their speed depends on."""
    sources = ("the source of decode.fill", "the source of task", "the source of task.score")
    own = {"own_code": dict.fromkeys(sources, "a")}
    if "own_code" in changed:
        changed = {"own_code": own["own_code"] | changed["own_code"]}
    for seed, more in enumerate(({}, changed)):
        (tmp_path / f"seed={seed}").mkdir()
        (tmp_path / f"seed={seed}" / "report.json").write_text(json.dumps(report | own | {"seed": seed} | more))
    console = Console(record=True, width=200)
    compare(tmp_path, console)
    told = console.export_text()
    assert len(list(csv.DictReader((tmp_path / "comparison.csv").open()))) == points
    assert note in told
    assert ("Not all runs" in told) == bool(note)


def test_a_report_of_an_older_version_is_not_said_to_have_another_input_or_judge(
    tmp_path: Path, report: dict[str, Any]
) -> None:
    """It lacks hashes that later ones have."""
    new = report | {"whole_input": "a", "whole_prompts": "b", "own_code": {"the source of task.score": "a"}}
    old = {key: value for key, value in new.items() if key not in ("whole_prompts", "own_code")}
    old["decode"] = {key: value for key, value in new["decode"].items() if key != "rule"}
    for name, one in (("new", new), ("old", old)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps(one))
    console = Console(record=True, width=200)
    compare(tmp_path, console)
    told = console.export_text()
    assert "Not all runs" not in told
    assert "rule" not in told


def test_equal_texts_are_counted_seed_by_seed(tmp_path: Path, report: dict[str, Any]) -> None:
    """Also where nothing is judged: that is what a comparison of lossless decoding asks."""
    for name, texts in (
        ("base,seed=0", "abc"),
        ("base,seed=1", "def"),
        ("other,seed=0", "abx"),
        ("other,seed=1", "def"),
    ):
        make(tmp_path, name, report, "+++", **({"drafts": 8} if "other" in name else {}))
        file = tmp_path / name / "results.jsonl"
        lines = [
            json.loads(line) | {"text": text} for line, text in zip(file.read_text().splitlines(), texts, strict=True)
        ]
        file.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "correct"}) + "\n" for line in lines))
        (tmp_path / name / "report.json").write_text(
            json.dumps(
                {k: v for k, v in json.loads((tmp_path / name / "report.json").read_text()).items() if k != "accuracy"}
            )
        )
    for name in ("base,seed=1", "other,seed=1"):  # a request that failed in both has no text
        with (tmp_path / name / "results.jsonl").open("a") as file:
            file.write(
                json.dumps({"custom_id": "bad", "index": 3, "finish_reason": "error", "error": "x", "text": ""}) + "\n"
            )
    console = Console(record=True, width=200)
    compare(tmp_path, console, baseline="base")
    assert "equal texts" in (said := console.export_text())
    assert "5 of 6" in said
    rows = list(csv.DictReader((tmp_path / "comparison.csv").read_text().splitlines()))
    assert [row["equal"] for row in rows] == ["", "5"]


@pytest.mark.parametrize(
    ("temperature", "task", "draws", "wanted"),
    [
        (0.0, "embedded", False, "3 of 3"),
        (0.7, "embedded", True, ""),
        (0.0, "batch", False, "3 of 3"),
        (0.0, "batch", True, ""),  # prompts have temperatures of their own
        (0.0, "batch", None, ""),  # perhaps: a report of an earlier version does not say
        (0.0, "embedded", None, "3 of 3"),
    ],
)
def test_greedy_texts_are_compared_whatever_their_seeds(
    tmp_path: Path,
    report: dict[str, Any],
    temperature: float,
    task: str,
    draws: bool | None,
    wanted: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is drawn by them; where something is, what is not compared is named."""
    report = {key: value for key, value in report.items() if key != "draws"}
    for name, seed in (("base", 0), ("other", 1)):
        more = {"decode": report["decode"] | {"temperature": temperature, "drafts": seed}, "seed": seed}
        more |= {} if draws is None else {"draws": draws}
        make(tmp_path, name, report | {"task": report["task"] | {"name": task}}, "+++")
        file = tmp_path / name / "report.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | more))
        lines = (tmp_path / name / "results.jsonl").read_text().splitlines()
        texts = (json.dumps(json.loads(line) | {"text": "same"}) + "\n" for line in lines)
        (tmp_path / name / "results.jsonl").write_text("".join(texts))
    console = Console(record=True, width=200)
    compare(tmp_path, console, baseline="base")
    said = console.export_text()
    assert (wanted in said) if wanted else (" of 3" not in said)
    assert ("texts of other and base are not compared: they have no seed in common" in caplog.text) == (not wanted)


def test_a_greedy_run_is_compared_with_every_seed_of_a_sampled_one(tmp_path: Path, report: dict[str, Any]) -> None:
    for name, temperature, texts in (("a", 0.0, "xyz"), ("b0", 0.9, "xyz"), ("b1", 0.9, "xqq")):
        make(tmp_path, name, report, "+++")
        file = tmp_path / name / "report.json"
        more = {"decode": report["decode"] | {"temperature": temperature}, "draws": temperature > 0}
        more |= {"seed": int(name == "b1")}
        file.write_text(json.dumps(json.loads(file.read_text()) | more))
        lines = (tmp_path / name / "results.jsonl").read_text().splitlines()
        pairs = zip(lines, texts, strict=True)
        made = "".join(json.dumps(json.loads(line) | {"text": text}) + "\n" for line, text in pairs)
        (tmp_path / name / "results.jsonl").write_text(made)
    sampled = [tmp_path / "b0", tmp_path / "b1"]
    assert equal_texts([tmp_path / "a"], sampled) == equal_texts(sampled, [tmp_path / "a"]) == (4, 6)


def test_a_machine_that_was_busy_is_told(tmp_path: Path, report: dict[str, Any]) -> None:
    busy = report["made"] | {"load": 9.5, "device": "some CPU, 2 cores"}
    make(tmp_path, "calm", report | {"made": busy | {"load": 2.0}}, "+++")
    make(tmp_path, "busy", report | {"made": busy}, "+++", drafts=4)
    make(tmp_path, "measured", report | {"made": busy | {"load": 7.0, "others": 0.1}}, "+++", drafts=8)
    console = Console(record=True, width=200)
    compare(tmp_path, console)
    said = console.export_text()
    assert re.search(r"so their times are not reliable: \d \(load 9\.5, 2 cores\)\.", said)
    assert "load 7" not in said, "that run has measured it"
    assert "load 2" not in said
    assert "same device" not in said


def test_other_devices_are_told(tmp_path: Path, report: dict[str, Any]) -> None:
    """Also those of single seeds of a row."""
    fast = {"made": report["made"] | {"device": "fast CPU, 64 cores", "host": "node7"}}
    for name, more, drafts in (("a,seed=1", {}, 0), ("a,seed=2", fast, 0), ("b,seed=1", fast, 4), ("c,seed=1", {}, 8)):
        make(tmp_path, name, report | more, "+++", drafts=drafts)
    console = Console(record=True, width=400)
    compare(tmp_path, console)
    own = report["made"]["device"]
    devices = f"run 1: {own}, fast CPU, 64 cores; run 2: fast CPU, 64 cores; run 3: {own}"
    assert f"so their times are not comparable ({devices})." in console.export_text()


@pytest.mark.parametrize(("fills", "told"), [(("a.py:f", "b.py:f"), False), (("a.py:f", "a.py:g"), True)])
def test_code_that_changed_is_the_same_file_s(
    tmp_path: Path, report: dict[str, Any], fills: tuple[str, str], told: bool
) -> None:
    for name, fill in zip(("one", "two"), fills, strict=True):
        make(tmp_path, name, report | {"own_code": {"the source of decode.fill": name}}, "+++", fill=fill)
    console = Console(record=True, width=200)
    compare(tmp_path, console)
    assert ("the source of decode.fill changed" in console.export_text()) == told


def test_settings_are_told_of_all_runs_or_below_the_table(tmp_path: Path, report: dict[str, Any]) -> None:
    """Where one name has no room for them, none has them: a row without would seem to have the usual ones."""
    for name, words in (("one", ["decode.drafts=0"]), ("two", [f"decode.drafts={'1' * 60}"]), ("three", [])):
        make(tmp_path, name, report, "+++", tau_conf=len(name) / 10)
        (tmp_path / name / ".hydra").mkdir()
        (tmp_path / name / ".hydra" / "overrides.yaml").write_text(json.dumps(words))
    console = Console(record=True, width=400)
    compare(tmp_path, console)
    said = console.export_text()
    assert "drafts=" not in said.partition("Settings")[0]
    assert re.search(rf"Settings in which the runs differ: run 1: .*drafts={'1' * 60}", said)
    assert re.search(r"run \d: drafts=0[;.]", said)
    assert re.search(r"run \d: as configured[;.]", said)


def test_a_sweep_s_backslashes_are_not_shown(tmp_path: Path, report: dict[str, Any]) -> None:
    for name, word in (("one", "decode.fill=own/a.py\\:f"), ("two", "decode.fill=own/a.py\\:g")):
        make(tmp_path, name, report, "+++", fill=name)
        (tmp_path / name / ".hydra").mkdir()
        (tmp_path / name / ".hydra" / "overrides.yaml").write_text(json.dumps([word]))
    console = Console(record=True, width=200)
    compare(tmp_path, console)
    assert "one (fill=own/a.py:f)" in console.export_text()


def test_labels_side_by_side_stand_as_their_points() -> None:
    assert in_order([(1, 0), (2, 0)], [(5, 9), (3, 9)]) == [(3, 9), (5, 9)]
    assert in_order([(1, 0), (2, 0)], [(5, 9), (3, 0)]) == [(5, 9), (3, 0)]


def test_more_problems_of_one_setting_do_not_part_it_from_another(tmp_path: Path, report: dict[str, Any]) -> None:
    """They are compared on the problems that both were asked; a baseline is called as one of its runs is."""
    for stream, right in ((0, "++--"), (1, "++++")):
        asked = report | {"task": report["task"] | {"problem_seed": stream}, "whole_input": str(stream)}
        make(tmp_path, f"plain{stream}", asked, right, temperature=0.0)
    of_first = report | {"task": report["task"] | {"problem_seed": 0}, "whole_input": "0"}
    make(tmp_path, "sampled", of_first, "+---", temperature=0.7)
    make(tmp_path, "again", of_first, "++--", temperature=0.7, branches=1)
    with pytest.raises(UserError, match=r"--baseline temperature=0\.7: 2 runs have these settings"):
        compare(tmp_path, Console(quiet=True), baseline="temperature=0.7")
    shutil.rmtree(tmp_path / "again")
    for baseline in ("plain1", "plain0 + plain1", "decode.temperature=0", "temperature=0.0"):
        console = Console(width=200, record=True)
        compare(tmp_path, console, baseline=baseline)
        told = "Not all runs were asked the same problems, by their task.problem_seed (1: 0, 1, 2: 0)."
        assert told in " ".join(console.export_text().split())
        with (tmp_path / "comparison.csv").open(newline="") as file:
            rows = {row["temperature"]: row for row in csv.DictReader(file)}
        assert (rows["0.0"]["difference"], rows["0.7"]["difference"]) == ("", "-0.25")
    with pytest.raises(UserError, match=r"--baseline temperature=1: no run"):
        compare(tmp_path, Console(quiet=True), baseline="temperature=1")


def test_tokens_per_forward_of_several_runs_are_those_of_all(tmp_path: Path, report: dict[str, Any]) -> None:
    for seed, (tokens, forwards, rows) in enumerate(((100, 10, 300), (300, 100, 500))):
        figures = {"completion_tokens": tokens, "forwards": forwards, "rows": rows, "decode_s": 1.0}
        made = report | figures | {"tpf": tokens / forwards, "tokens_per_s": {"job": tokens + 50.0}}
        make(tmp_path, f"seed={seed}", made, "++--")
    [pooled] = grouped(tmp_path, load_reports(tmp_path))
    assert (pooled.report["tpf"], pooled.report["rows_per_token"]) == (400 / 110, 2.0)
    assert pooled.report["tokens_per_s"]["job"] == 250, "answers that were replaced took time, too"


def test_samples_are_told_from_prompts_and_what_auto_does_is_said(tmp_path: Path, report: dict[str, Any]) -> None:
    (tmp_path / "pareto-old.pdf").touch()
    several = report | {"task": report["task"] | {"samples": 2}}
    for drafts in (2, "auto"):
        make(tmp_path, f"decode.drafts={drafts}", several, "++--", drafts=drafts)
        file = tmp_path / f"decode.drafts={drafts}" / "results.jsonl"
        file.write_text(re.sub(r'"custom_id": "(\d)"', r'"custom_id": "a#\1"', file.read_text()))
    console = Console(width=200, record=True)
    compare(tmp_path, console, baseline="drafts=2")
    shown = " ".join(console.export_text().split())
    assert "4 requests (2 prompts) each" in shown
    assert "With decode.drafts=auto (run 2), tokens per forward" in shown
    assert "Left from an earlier report of this folder: pareto-old.pdf" in shown
    [part] = [Comparison(tmp_path, grouped(tmp_path, load_reports(tmp_path)), "drafts=2", [])]
    assert "p is that of the sign test of the problems' means over samples." in part.methods()
    assert any("(run drafts=auto)" in note for note in part.named_notes), "a paper's table has no numbers"


def test_why_there_is_no_figure_is_said(tmp_path: Path, report: dict[str, Any]) -> None:
    make(tmp_path, "decode.drafts=0", report, "++--", drafts=0)
    unjudged = {key: value for key, value in report.items() if not key.startswith("accuracy")}
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "report.json").write_text(json.dumps(unjudged))
    console = Console(width=200, record=True)
    compare(tmp_path, console)
    assert not list(tmp_path.glob("*.pdf"))
    assert "No figure of arithmetic with embedded, because these runs were not judged: plain" in console.export_text()


def test_equal_runs_are_no_spread(tmp_path: Path, report: dict[str, Any]) -> None:
    for seed in (0, 1, 2):
        make(tmp_path, f"seed={seed}", report, "++--")
    make(tmp_path, "other", report, "+---", drafts=3)
    console = Console(width=140, record=True)
    compare(tmp_path, console)
    assert "3, equal at temperature 0" in console.export_text()
    assert "accuracy_sd" not in (tmp_path / "comparison.csv").read_text()


def test_what_a_reader_must_know_of_some_runs_stands_below_the_table(tmp_path: Path, report: dict[str, Any]) -> None:
    """Failed requests, pairs, warnings, speeds that differ, and what the figures of several seeds are."""
    fast, slow = ({"completion_tokens": 100, "decode_s": s, "tokens_per_s": {"job": 100 / s}} for s in (1.0, 3.0))
    make(tmp_path, "decode.drafts=0", report, "++--", drafts=0)
    make(tmp_path, "decode.drafts=16", report | {"warnings": ["no chat template"]}, "+++", drafts=16)
    file = tmp_path / "decode.drafts=16" / "report.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"requests": 4, "errors": 1, "expected": 9, "cut": 2}))
    for seed, speed in ((1, fast), (2, slow)):
        make(tmp_path, f"decode.drafts=2,seed={seed}", report | speed, "++--", drafts=2)
    console = Console(width=200, record=True)
    compare(tmp_path, console, baseline="drafts=0")
    shown = console.export_text()
    page = Page(tmp_path / "comparison.html").text
    with (tmp_path / "comparison.csv").open(newline="") as table:
        rows = {row["drafts"]: (number, row) for number, row in enumerate(csv.DictReader(table), 1)}
    failed, several = rows["16"][0], rows["2"][0]
    assert "4 (3 judged)" in shown
    assert float(rows["2"][1]["tokens_per_s"]) == 200 / 4, "all tokens by all seconds"
    for note in (
        f"Answers that are cut at their limit of tokens: run {failed}: 66.7%.",
        f"The accuracy of run {failed} leaves out 1 of its 4 requests (1 ended with an error).",
        f"Differences are over the problems that both have judged (run {min(failed, several)}",
        f"Tokens per second differ between runs of one row, probably because of other work: run {several} (33 to 100).",
        f"Run {failed}: no chat template.",
        f"Run {failed} was stopped: 4 of 9 requests are done.",
        ", and an interval as wide as one seed's. p is that of the sign test",
    ):
        assert note in " ".join(shown.split())
        assert note in " ".join(page.split())
    assert "They have judged different numbers of answers" in page


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


def test_curves_stand_in_the_order_of_their_numbers(report: dict[str, Any]) -> None:
    runs = named(report, *({"drafts": n, "tau_conf": tau} for n in (16, 4, 2) for tau in (0.9, 0.8, 0.7, 0.6)))
    assert list(curves_of(runs)) == ["drafts=2", "drafts=4", "drafts=16"]


def made_sweep(folder: Path, report: dict[str, Any], count: int) -> list[str]:
    """`count` runs of presets and thresholds, as people type them; returns what they are called."""
    presets = ["decode=verified", "decode=verified_tree", "decode=d2f", "decode=vanilla", "decode=lopa"]
    typed = [[presets[i % 5]] + ([f"decode.tau_conf=0.{90 - 5 * (i // 5)}"] if count > 5 else []) for i in range(count)]
    for i, words in enumerate(typed):
        run_folder = folder / ",".join(words)
        (run_folder / ".hydra").mkdir(parents=True)
        (run_folder / ".hydra" / "overrides.yaml").write_text("".join(f"- {word}\n" for word in [*words, "seed=0"]))
        decode = report["decode"] | {"drafts": i % 5, "tau_conf": 0.9 - 0.05 * (i // 5), "tau_act": 0.5 + i % 5}
        figures = {
            "tpf": 1 + (i * 7 % 11) / 3,
            "accuracy": 0.98 - (i * 5 % 13) / 90,
            "rows_per_token": 5.0 + i * 3 % 17,
        }
        made = report | figures | {"requests": 300, "judged": 300, "decode": decode}
        (run_folder / "report.json").write_text(json.dumps(made))
    return [", ".join(word.replace("decode.", "") for word in words) for words in typed]


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("count", [4, 18, 40])
def test_runs_are_called_as_they_were_typed_and_the_table_has_no_broken_figures(
    tmp_path: Path, report: dict[str, Any], count: int
) -> None:
    names = made_sweep(tmp_path, report, count)
    console = Console(width=80, record=True)
    compare(tmp_path, console)
    shown = console.export_text()
    page = Page(tmp_path / "comparison.html")
    for name in names:
        assert name in page.text
    assert len(re.findall(r"\d\d\.\d \(\d\d\.\d-\d\d\.\d\) ", shown)) == count
    with (tmp_path / "comparison.csv").open(newline="") as file:
        assert {row["name"] for row in csv.DictReader(file)} == {*names}
    for name, width in (("pareto", 7.0), ("pareto-column", 3.3)):
        data = (tmp_path / f"{name}.pdf").read_bytes()
        assert b"/Subtype /Type3" not in data
        assert b"/Subtype /Type0" in data, "a font of Type 42"
        [box] = re.findall(rb"/MediaBox \[ 0 0 ([\d.]+) ", data)
        assert float(box) == pytest.approx(72 * width)


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("names", [("a$^$x", "b$5_^$"), ("_one", "_two"), ("caf\udce9", "\u4e00 b\tc")])
def test_figures_have_runs_of_any_name(
    tmp_path: Path, report: dict[str, Any], names: Sequence[str], recwarn: pytest.WarningsRecorder
) -> None:
    for drafts, name in enumerate(names):
        make(tmp_path, name, report, "++--", drafts=drafts)
    compare(tmp_path, Console(quiet=True))
    assert (tmp_path / "pareto.pdf").stat().st_size > 1000
    assert (tmp_path / "comparison.html").exists()
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_a_legend_has_every_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """matplotlib leaves out labels that begin with an underscore."""
    shown = []
    legend = Figure.legend
    monkeypatch.setattr(Figure, "legend", lambda *of, **more: shown.append(legend(*of, **more)) or shown[-1])
    points = [Point(str(i), "", 1.0 + i, 50.0, 40.0, 60.0, "", i) for i in range(2)]
    draw_pareto(tmp_path / "x.pdf", [Scatter("Tokens per forward", points)], ["_one", "$\\frac"], 3.3)
    assert [text.get_text() for text in shown[0].get_texts()] == ["_one", "$\\frac", FRONT]
    many = [Point(str(i), "", 1.0 + i % 30, 90.0 - i % 30 - i // 30, 40.0, 95.0, "", i) for i in range(200)]
    names = [f"run {i}" for i in range(200)]
    draw_pareto(tmp_path / "x.pdf", [Scatter("Tokens per forward", many[:-170] + many[30:])], names, 3.3)
    assert [text.get_text() for text in shown[1].get_texts()] == [*names[:30], FRONT, "170 others"]


def test_a_greedy_run_is_compared_with_samples_of_the_same_prompts(tmp_path: Path, report: dict[str, Any]) -> None:
    """Their inputs differ in what is generated, not in what is asked."""
    make(tmp_path, "greedy", report | {"whole_input": "a", "whole_prompts": "c"}, "+-+-+-+-")
    make(tmp_path, "samples", report | {"whole_input": "b", "whole_prompts": "c", "draws": True}, "+" * 8)
    [greedy, samples] = sorted(table_of(tmp_path, baseline="greedy")[1], key=lambda row: row["run"])
    assert (greedy["difference"], float(samples["difference"])) == ("", 0.5)


def test_a_single_run_is_called_by_its_folder(
    tmp_path: Path, report: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lopa_dist.jobs.show.compare.write_run_page", lambda *_: "its page")
    make(tmp_path, "mine", report, "++--")
    compare(tmp_path / "mine", form="latex")
    assert "\nmine & 50.0" in capsys.readouterr().out


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


def test_what_was_swept_names_a_baseline(tmp_path: Path, report: dict[str, Any]) -> None:
    made_sweep(tmp_path, report, 4)
    for name in tmp_path.glob("*/report.json"):
        lines = [{"custom_id": str(i), "index": i, "finish_reason": "stop", "correct": True} for i in range(3)]
        (name.parent / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    compare(tmp_path, Console(quiet=True), baseline="decode=d2f")
    with (tmp_path / "comparison.csv").open(newline="") as file:
        assert {row["name"]: row["difference"] for row in csv.DictReader(file)} == {
            "decode=d2f": "", "decode=verified": "0.0", "decode=verified_tree": "0.0", "decode=vanilla": "0.0"
        }  # fmt: skip


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
