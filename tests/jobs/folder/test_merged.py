"""All entries of a journal together: each request once, its best entry, in today's order."""

from __future__ import annotations

from pathlib import Path

from lopa_dist.jobs.folder.journal import TRIED
from lopa_dist.jobs.folder.merged import merge
from tests.jobs.folder.test_journal import append, entry, results, started
from tests.jobs.folder.test_packed import ids_of


def test_lines_come_in_input_order_with_rejected_ones_between(tmp_path: Path) -> None:
    journal = started(tmp_path)
    failed = {name: content for name, content in entry("d").items() if name != "figures"}
    append(tmp_path, 1, 0, entry("c"), failed, entry("a"))
    append(tmp_path, 1, 1, entry("b"), {"statistics": {}, "replica": 1, "at": 2.0})
    bad = {1: {"custom_id": "bad"}}
    merged = merge(journal, tmp_path, ids_of("a", None, "b", "c", "d"), bad.get, range(4, 14, 2))
    assert [(r["custom_id"], r["index"]) for r in results(tmp_path)] == [
        ("a", 4), ("bad", 6), ("b", 8), ("c", 10), ("d", 12),
    ]  # fmt: skip
    assert list(results(tmp_path)[0]) == ["custom_id", "index", "text"]
    assert (len(merged.figures), merged.failed) == (3, 1)
    assert [replica["replica"] for replica in merged.replicas] == [1]
    assert not (tmp_path / "results.partial").exists()


def test_what_was_written_twice_counts_once(tmp_path: Path) -> None:
    journal = started(tmp_path)
    append(tmp_path, 1, 0, entry("a", "first"))
    append(tmp_path, 10, 0, entry("a", "later"))
    append(tmp_path, 2, 0, entry("a", "second"))
    merge(journal, tmp_path, ids_of("a"), lambda i: {}, range(1))
    assert [r["text"] for r in results(tmp_path)] == ["first"]
    assert journal.next_attempt() == 11


def test_an_answer_of_its_format_counts_more_than_one_that_is_not(tmp_path: Path) -> None:
    """Which is done as long as there may be no more tries than it had, and of which the one with most tries counts."""
    journal = started(tmp_path)
    invalid = {"figures": {"tokens": 1, "tries": {"invalid": 1}}}
    append(tmp_path, 1, 0, *(entry(name, "first") | invalid | {TRIED: 2} for name in "ab"), entry("c") | invalid)
    names = ids_of("a", "b", "c")
    assert [*journal.done(names, tries=lambda index: 2).flags] == [1, 1, 1]
    assert journal.done(names).invalid == 3
    assert [*journal.done(names, tries=lambda index: 3).flags] == [0, 0, 1]
    append(tmp_path, 2, 0, entry("a", "second"), entry("b", "second") | invalid | {TRIED: 3})
    assert journal.done(names, tries=lambda index: 3) == (bytearray([1, 1, 1]), 0, 2, 0)
    append(tmp_path, 3, 0, entry("b", "third") | invalid | {TRIED: 3})
    merged = merge(journal, tmp_path, names, lambda i: {}, range(3))
    assert (merged.failed, merged.unjudged) == (0, 0)
    assert [r["text"] for r in results(tmp_path)] == ["second", "second", "x"]


def test_an_answer_with_a_verdict_counts_more_than_one_without(tmp_path: Path) -> None:
    """And one without is not done."""
    journal = started(tmp_path)
    without = {"unjudged": True}
    append(tmp_path, 1, 0, entry("a", "first") | without, entry("b", "first") | without, entry("c", "first"))
    append(tmp_path, 2, 0, entry("a", "second"), entry("b", "second") | without)
    assert [*journal.done(ids_of("a", "b", "c"))[0]] == [1, 0, 1]
    assert journal.done(ids_of("a", "b", "c")).strangers == 0
    assert journal.done(ids_of("b")).strangers == 2, "answers of other requests"
    merged = merge(journal, tmp_path, ids_of("a", "b", "c"), lambda i: {}, range(3))
    assert (merged.unjudged, [r["text"] for r in results(tmp_path)]) == (1, ["second", "first", "first"])
