"""Runs that differ only in seeds are one point, and points are compared on the same problems."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from rich.console import Console

from lopa_dist.checks import UserError
from lopa_dist.jobs.show.compare import compare
from lopa_dist.jobs.show.equal_texts import equal_texts
from lopa_dist.jobs.show.metrics import wilson
from lopa_dist.jobs.show.paired import verdicts
from lopa_dist.jobs.show.report import accuracy_interval
from lopa_dist.jobs.show.seed_groups import grouped, load_reports
from tests.jobs.show.sweeps import make, make_stream, table_of
from tests.pages import Page


def test_merged_shards_are_one_run(tmp_path: Path, report: dict[str, Any]) -> None:
    for name in ("array", "array/0", "array/1", "alone"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps(report))
    assert [name for name, _ in load_reports(tmp_path)] == ["alone", "array"]
    assert [name for name, _ in load_reports(tmp_path / "array")] == ["."]


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


def test_a_greedy_run_is_compared_with_samples_of_the_same_prompts(tmp_path: Path, report: dict[str, Any]) -> None:
    """Their inputs differ in what is generated, not in what is asked."""
    make(tmp_path, "greedy", report | {"whole_input": "a", "whole_prompts": "c"}, "+-+-+-+-")
    make(tmp_path, "samples", report | {"whole_input": "b", "whole_prompts": "c", "draws": True}, "+" * 8)
    [greedy, samples] = sorted(table_of(tmp_path, baseline="greedy")[1], key=lambda row: row["run"])
    assert (greedy["difference"], float(samples["difference"])) == ("", 0.5)
