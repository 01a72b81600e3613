"""The parts of an output by their names."""

from __future__ import annotations

from pathlib import Path

from lopa_dist.jobs.folder.part_names import parts_there


def test_a_name_is_no_pattern_but_for_its_star(tmp_path: Path) -> None:
    for name in ("r[1]-00000.jsonl", "r[1]-00012.jsonl", "r1-00003.jsonl", "r[1]-x.jsonl"):
        (tmp_path / name).touch()
    assert parts_there(f"{tmp_path}/r[1]-*.jsonl", "task.output") == {0: "r[1]-00000.jsonl", 12: "r[1]-00012.jsonl"}
