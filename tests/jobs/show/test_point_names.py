"""Points are called by what tells them apart, and curves are of one setting that grows."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lopa_dist.jobs.show.compare import compare
from lopa_dist.jobs.show.comparison import Comparison
from lopa_dist.jobs.show.point_names import curves_of, words_of
from lopa_dist.jobs.show.seed_groups import grouped, load_reports
from tests.jobs.show.sweeps import made_sweep, make, named, table_of
from tests.pages import Page


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


def test_a_sweep_s_backslashes_are_not_shown(tmp_path: Path, report: dict[str, Any]) -> None:
    for name, word in (("one", "decode.fill=own/a.py\\:f"), ("two", "decode.fill=own/a.py\\:g")):
        make(tmp_path, name, report, "+++", fill=name)
        (tmp_path / name / ".hydra").mkdir()
        (tmp_path / name / ".hydra" / "overrides.yaml").write_text(json.dumps([word]))
    console = Console(record=True, width=200)
    compare(tmp_path, console)
    assert "one (fill=own/a.py:f)" in console.export_text()


def test_curves_stand_in_the_order_of_their_numbers(report: dict[str, Any]) -> None:
    runs = named(report, *({"drafts": n, "tau_conf": tau} for n in (16, 4, 2) for tau in (0.9, 0.8, 0.7, 0.6)))
    assert list(curves_of(runs)) == ["drafts=2", "drafts=4", "drafts=16"]


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


def test_a_single_run_is_called_by_its_folder(
    tmp_path: Path, report: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lopa_dist.jobs.show.compare.write_run_page", lambda *_: "its page")
    make(tmp_path, "mine", report, "++--")
    compare(tmp_path / "mine", form="latex")
    assert "\nmine & 50.0" in capsys.readouterr().out


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
