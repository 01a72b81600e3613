"""Result files grow row by row and are dropped with the weights; tables show what is there. Every setting is legal."""

from __future__ import annotations

import multiprocessing.dummy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import cluster_jobs, embedded, in_flight, large_job, lists, lossless, results
from benchmarks.answers import PUBLISHED
from lopa_dist.composing import composed
from lopa_dist.decode import DecodeConfig
from lopa_dist.tasks.list_problems import FAMILIES


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    return tmp_path


def test_rows_take_the_place_of_older_ones_of_the_same_setting() -> None:
    results.replace_rows("some", [{"way": "a", "n": 1, "x": 1}, {"way": "b", "n": 1, "x": 2}], ["way", "n"])
    rows = results.replace_rows("some", [{"way": "a", "n": 1, "x": 3}, {"way": "a", "n": 2, "x": 4}], ["way", "n"])
    assert [(row["way"], row["n"], row["x"]) for row in rows] == [("b", 1, 2), ("a", 1, 3), ("a", 2, 4)]
    assert results.read("some") == results.machine() | {"rows": rows}


def test_only_what_is_missing_is_measured_until_the_weights_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = SimpleNamespace(get_context=lambda kind: multiprocessing.dummy)
    monkeypatch.setattr(results, "multiprocessing", threads)
    asked: list[int] = []

    def work(number: int) -> results.Result:
        asked.append(number)
        return {"twice": 2 * number}

    weights = folder / "model.safetensors"
    weights.write_text("one")
    found = results.measured("some", folder, {"3": 3}, work, 1)
    assert found == {"3": {"twice": 6}}
    found = results.measured("some", folder, {"3": 3, "5": 5}, work, 1)
    assert found == {"3": {"twice": 6}, "5": {"twice": 10}} == results.read("some")["results"]
    assert asked == [3, 5]
    weights.write_text("another")
    assert results.measured("some", folder, {"5": 5}, work, 1) == {"5": {"twice": 10}}
    assert asked == [3, 5, 5]


def test_a_table_leaves_empty_what_a_row_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "a", "speed": 2.345, "equal": 7, "ratio": 0.5}, {"name": "b", "speed": 10.0}]
    results.show(
        "title", rows, {"name": "{name}", "tokens/s": "{speed:.1f}", "equal": "{equal}", "ratio": "{ratio:.2f}"}
    )
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert [row for row in cells if row] == [["a", "2.3", "7", "0.50"], ["b", "10.0", "", ""]]


def test_every_setting_is_legal(folder: Path) -> None:
    of_embedded = [setting for part in embedded.PARTS.values() for _, setting in part]
    for base, settings in (
        (embedded.BASE, of_embedded),
        (lists.BASE, [*lists.SETTINGS.values(), *lists.LOSSLESS.values()]),
    ):
        for setting in settings:
            decode = {key: value for key, value in setting.items() if key != "quantization"}
            DecodeConfig(**{**PUBLISHED, **base, **decode})
    for config, ways in (
        (in_flight.BASE, in_flight.SETTINGS),
        (lossless.CAUSAL, lossless.LOOKAHEADS),
        (lossless.MASKED, lossless.MASKED_SETTINGS),
    ):
        for setting in ways.values():
            replace(config, **setting)
    for name in cluster_jobs.SETTINGS:
        cluster_jobs.config_of(name)
    assert composed(large_job.options(folder, 3)).decode.tau_conf == 0


@pytest.mark.parametrize("items", [0, 10])
def test_lists_are_answered_by_family(items: int) -> None:
    job = lists.Job("lists", "plain", 16, 1, 16, items)
    families = lists.work(job)["families"]
    assert set(families) == set(FAMILIES) if not items else "latin" not in families
    assert all({"accuracy", "tpf", "rows_per_token"} <= found.keys() for found in families.values())


def test_lossless_answers_are_compared_with_those_of_one_token_at_a_time() -> None:
    """The table's own comparison finds an answer that differs."""
    found = {
        name: lists.work(lists.Job("causal_lists", name, 16, 1, 16, 0))["families"]
        for name in (lists.ONE, "8 drafts of masks")
    }
    one, ahead = lists.lossless(found)
    assert (one["equal"], ahead["equal"]) == ("16 of 16", "16 of 16")
    assert ahead["accuracy"] == one["accuracy"]
    assert ahead["tpf"] > 1.5 > 1 > one["tpf"]
    found["8 drafts of masks"]["sort"]["answers"][0] += 1
    assert lists.lossless(found)[1]["equal"] == "15 of 16"
