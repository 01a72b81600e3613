"""A run's report, and figures that are drawn only for tests that look at them."""

from __future__ import annotations

from typing import Any

import pytest

from lopa_dist.config import TaskConfig
from lopa_dist.jobs.run.job import run
from lopa_dist.parallel.launcher import World
from tests.jobs.run.test_job import config


@pytest.fixture(autouse=True)
def _blank_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make figures for papers empty files, except in tests that look into them: each takes a second to draw."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("lopa_dist.jobs.show.pareto.draw_pareto", lambda file, *_: file.touch())


@pytest.fixture
def drawn() -> None:
    """Draw the figures in the test that asks for this."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run's report as of an idle machine: of a busy one, every table says so."""
    report = run(config(TaskConfig(limit=2)), tmp_path_factory.mktemp("run"), World("python"))
    report["made"]["load"] = 0.0
    report["made"].pop("others", None)
    del report["problems"]  # tests change the numbers that it follows from
    return report
