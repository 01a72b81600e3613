"""A job that asks for likelihoods: the same from two ranks as from one process."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'lopa_dist[eval]'")

from tests.system import forked
from tests.system.conftest import alone, results
from tests.tasks.test_harness import CHOICES, task_file

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


def test_replicas_share_out_documents(tmp_path: Path) -> None:
    asked = ["task=harness", f"task.harness={task_file(tmp_path, **CHOICES)}", "task.masks=6", "engine.max_sequences=1"]
    wanted = alone(tmp_path / "alone", *asked)
    ranks = forked.job(tmp_path / "two", 2, *asked)
    assert ranks.wait() == [0, 0], ranks.printed()[-3000:]
    found = results(tmp_path / "two")
    assert [line["custom_id"] for line in found] == [f"tiny-{n}" for n in range(4)]
    for one, other in zip(wanted, found, strict=True):
        for a, b in zip(one["likelihoods"], other["likelihoods"], strict=True):
            assert a["loglikelihood"] == pytest.approx(b["loglikelihood"], abs=1e-4)
        assert one["correct"] == other["correct"]
