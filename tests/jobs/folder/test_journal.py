"""The journal: what is done stays done, once, in today's order."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopa_dist.jobs.folder.journal import Journal, Writer, difference
from lopa_dist.jobs.folder.merged import merge
from lopa_dist.parallel.launcher import Start
from tests.jobs.folder.test_packed import ids_of

SETTINGS: dict[str, Any] = {"decode": {"branches": 3}, "seed": 0}


def entry(name: str, text: str = "x") -> dict[str, Any]:
    return {"id": name, "at": 1.0, "figures": {"tokens": 1}, "work": {}, "line": {"custom_id": name, "text": text}}


def started(folder: Path) -> Journal:
    journal = Journal(folder)
    journal.open(SETTINGS, "auto", Start())
    return journal


def append(folder: Path, attempt: int, replica: int, *entries: dict[str, Any]) -> Path:
    writer = Writer(folder, attempt, replica)
    for one in entries:
        writer.write(one)
    writer.close()
    return folder / "journal" / f"{attempt:03d}-{replica}.jsonl"


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().split("\n") if line]


@given(cut=st.integers(0, 200))
def test_a_torn_line_is_no_line(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("torn")
    journal = started(folder)
    part = append(folder, 1, 0, entry("a", "ä\u2028b"), entry("b"))
    whole = part.read_bytes()
    kept = whole[: max(0, len(whole) - cut)]
    part.write_bytes(kept)
    assert journal.done(ids_of("a", "b", None))[0] == bytearray([kept.count(b"\n") >= 1, kept.count(b"\n") == 2, 0])
    assert journal.next_attempt() == 2
    append(
        folder,
        2,
        0,
        *(entry(n, "new") for n, d in zip("ab", journal.done(ids_of("a", "b"))[0], strict=True) if not d),
    )
    merge(journal, folder, ids_of("a", "b"), lambda i: {}, range(2))
    assert [r["custom_id"] for r in results(folder)] == ["a", "b"]


def test_without_a_result_a_folder_holds_nobody_to_its_settings(tmp_path: Path) -> None:
    """As where the first try ended for want of memory; what it left is set aside."""
    started(tmp_path)
    append(tmp_path, 1, 0, {"statistics": {}, "replica": 0, "at": 0.5})
    changed = {"decode": {"branches": 7}, "seed": 0}
    journal = Journal(tmp_path)
    assert journal.open(changed, "auto", Start()) == []
    assert (json.loads((journal.folder / "settings.json").read_text()), journal.next_attempt()) == (changed, 1)
    assert (tmp_path / "journal.old" / "001-0.jsonl").exists()
    append(tmp_path, 1, 0, entry("a"))
    with pytest.raises(ValueError, match=r"decode\.branches was 7, is 3"):
        Journal(tmp_path).open(SETTINGS, "auto", Start())


def test_files_that_no_job_wrote_are_not_replaced(tmp_path: Path) -> None:
    """A user's own, or those of merged shards; a folder with other files is as good as an empty one."""
    (tmp_path / "input.jsonl").touch()
    (tmp_path / "results.jsonl").write_text("mine\n")
    for resume in ("auto", "new"):
        with pytest.raises(ValueError, match=r"has results\.jsonl, but no journal .* move them away"):
            Journal(tmp_path).open(SETTINGS, resume, Start())
    assert (tmp_path / "results.jsonl").read_text() == "mine\n"
    (tmp_path / "results.jsonl").rename(tmp_path / "mine.jsonl")
    assert Journal(tmp_path).open(SETTINGS, "auto", Start()) == []


def test_settings_that_are_gone_are_not_asked_back(tmp_path: Path) -> None:
    Journal(tmp_path).open({"decode": {"branches": 3, "force": "block", "groups": 2}}, "auto", Start())
    append(tmp_path, 1, 0, entry("a"))
    with pytest.raises(ValueError, match=r"that had the settings decode\.force, decode\.groups\. Finish it with that"):
        started(tmp_path)


def test_other_settings_are_refused_with_the_difference(tmp_path: Path) -> None:
    started(tmp_path)
    append(tmp_path, 1, 0, entry("a"))
    changed = {"decode": {"branches": 7}, "seed": 0}
    with pytest.raises(ValueError, match=r"decode\.branches was 3, is 7.*job\.resume=new"):
        Journal(tmp_path).open(changed, "auto", Start())
    started(tmp_path)  # the same ones go on
    fresh = Journal(tmp_path)
    fresh.open(changed, "new", Start())
    assert fresh.done(ids_of("a"))[0] == bytearray([0])
    assert (tmp_path / "journal.old" / "001-0.jsonl").exists()
    fresh.open(SETTINGS, "new", Start())
    assert (tmp_path / "journal.old.2").exists()


@pytest.mark.parametrize(
    ("first", "second", "again"),
    [
        (Start("host 1 2"), Start("host 1 2"), True),  # torchrun --max-restarts
        (Start("host 1 2"), Start("host 1 3"), False),
        (Start("", "7-0"), Start("", "7-0", 1), True),  # requeued
        (Start("host 1 2", "7-0", 1), Start("host 5 9", "7-0", 2), True),
        (Start("", "7-0", 1), Start("", "7-0", 1), False),  # twice in an allocation
        (Start("", "7-0"), Start("", "8-0", 1), False),
        (Start(), Start(), False),
    ],
)
def test_a_restart_goes_on_whatever_its_command_line_says(
    tmp_path: Path, first: Start, second: Start, again: bool
) -> None:
    started(tmp_path)
    journal = Journal(tmp_path)
    journal.open(SETTINGS, "new", first)
    append(tmp_path, 1, 0, entry("a"))
    journal.open(SETTINGS, "new", second)
    assert journal.done(ids_of("a"))[0] == bytearray([again])
    assert len(list(tmp_path.glob("journal.old*"))) == (1 if again else 2)


def test_difference_names_nested_keys() -> None:
    assert difference({"a": {"b": 1}, "c": 2}, {"a": {"b": 1}, "c": 3, "d": 4}) == ["c was 2, is 3", "d was None, is 4"]


@pytest.mark.parametrize("renamed", [False, True])
def test_a_run_folder_that_is_gone_is_noticed_at_once(tmp_path: Path, renamed: bool) -> None:
    """Not at the end, when all is generated and nothing is kept, or what is written goes into a new folder."""
    (tmp_path / "journal").mkdir()
    writer = Writer(tmp_path, 1, 0)
    writer.write({"id": "a"})
    if renamed:
        (tmp_path / "journal").rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(tmp_path / "journal")
    with pytest.raises(FileNotFoundError, match="the run folder was removed or renamed while the job ran"):
        writer.write({"id": "b"})


def test_two_jobs_at_once_in_one_folder(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    Writer(tmp_path, 1, 0).close()
    with pytest.raises(ValueError, match="another job has begun in it at the same moment"):
        Writer(tmp_path, 1, 0)
