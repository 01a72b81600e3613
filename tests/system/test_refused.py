"""A job that is refused changes nothing of what a run folder says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from lopa_dist.commands import perform
from tests.system import forked

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


def test_the_command_of_a_run_is_that_of_its_job(tmp_path: Path) -> None:
    folder, small = tmp_path / "run", ("task.limit=2", "decode.max_new_tokens=8")
    assert forked.job(folder, 1, *small).wait() == [0]
    refused = forked.job(folder, 1, *small, "decode.temperature=0.7")
    assert refused.wait() != [0]
    assert "has results of other settings" in refused.printed()
    perform("report", [str(folder)])
    page = (folder / "report.html").read_text()
    assert "<pre>torchrun --nproc-per-node 1 -m lopa_dist logging.wandb.mode=disabled parallel.threads=1" in page
    assert "decode.temperature=0.7" not in page
