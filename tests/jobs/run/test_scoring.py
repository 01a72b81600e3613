"""Jobs whose task has texts scored: what they have no use for."""

from __future__ import annotations

from typing import Any, cast

import pytest

from lopa_dist.jobs.run.scoring import idle_in_scoring


def test_ways_of_generating_are_told_where_texts_are_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    task = cast(Any, None)
    given = ["task", "decode", "decode.drafts", "decode.context", "model.path"]
    assert idle_in_scoring(task, given) == []
    monkeypatch.setattr("lopa_dist.jobs.run.scoring.scored_masks", lambda task: 8)
    [warning] = idle_in_scoring(task, given)
    assert warning.startswith("decode.drafts, decode=: no effect: this task scores texts")
    assert idle_in_scoring(task, ["decode.context", "seed"]) == []
