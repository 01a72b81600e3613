"""The points of a sweep are checked before the first of them starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from lopa_dist.checks import UserError
from lopa_dist.cli import hint
from lopa_dist.sweep import check_points


def test_points_that_can_run_are_let_through(tmp_path: Path) -> None:
    folder = f"hydra.sweep.dir={tmp_path}"
    check_points(["-m", "launcher=local", folder, "decode.drafts=0,4", "decode=embedded,verified", "seed=1,2"])
    check_points(["-m", "hydra/sweeper=other", "decode.drafts=x,y"])


def test_points_that_cannot_are_named_with_the_reason() -> None:
    with pytest.raises(UserError) as refusal:
        check_points(["--multirun", "task.limit=3", "decode.drafts=0,4", "decode.branches=0,3"])
    first, point, advice = str(refusal.value).splitlines()
    assert first == "1 of 4 points cannot run, so none has started:"
    assert point.startswith("  decode.drafts=0 decode.branches=3: decode.branches=3 with decode.verify=agreement needs")
    assert "hydra.sweep.dir" in advice


@pytest.mark.parametrize(
    ("given", "said"), [("task.input=nothing.jsonl", "no such file"), ("task.input=x.xlsx", "a .xlsx file is not read")]
)
def test_what_is_wrong_with_all_is_said_once(given: str, said: str) -> None:
    with pytest.raises(UserError, match=f"^{given}: {said}"):
        check_points(["-m", "task=batch", given, "decode.drafts=3,4"])


def test_only_slurm_gets_the_hint_to_do_without_it() -> None:
    assert "launcher=local" in hint(["-m", "launcher=slurm"])
    assert hint(["-m", "hydra/launcher=submitit_local"]) == ""
