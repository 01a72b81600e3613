"""A report after interruptions has the figures of the undisturbed run, but for times."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lopa_dist.config import Config, TaskConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.jobs.folder import attempt_record
from lopa_dist.jobs.folder.journal import Writer
from lopa_dist.jobs.run.job import run
from lopa_dist.parallel.launcher import World
from tests.jobs.run.test_job import config, lines

OF_THE_ATTEMPT = {"steps", "step_ms", "comm_bytes_per_step", "attempts"}  # the report says so
TIMES = {"tokens_per_s", "latency_s", "decode_s", "wall_s", "made"}


class Killed(BaseException):
    """Ends a run wherever it is."""


def killed_after(entries: int) -> Callable[..., None]:
    """`Writer.write` that is never called again once so many entries are written."""
    write, written = Writer.write, 0

    def limited(self: Writer, *some: dict[str, Any]) -> None:
        nonlocal written
        fit = some[: entries - written]
        write(self, *fit)
        written += len(fit)
        if written >= entries:
            raise Killed

    return limited


def figures(report: dict[str, Any]) -> dict[str, Any]:
    """What must be equal; what another request has computed of a prompt depends on which ran beside it."""
    kept = {key: value for key, value in report.items() if key not in OF_THE_ATTEMPT | TIMES}
    kept["reference_counting"] = {k: v for k, v in kept["reference_counting"].items() if k != "tokens_per_s"}
    kept["prompt_tokens"] = kept["prompt_tokens"]["total"]
    kept["warnings"] = [text for text in report.get("warnings", []) if not text.startswith("other programs kept")]
    return kept


def job(decode: dict[str, Any]) -> Config:
    made = config(TaskConfig(limit=7), **decode)
    return replace(made, engine=EngineConfig(max_sequences=3))


@pytest.mark.parametrize(
    "decode",
    [{"branches": 3}, {"verify": "agreement", "drafts": 2, "branches": 2, "tau_conf": 0.9}, {"context": "vanilla"}],
    ids=["branches", "drafts", "without cache"],
)
def test_figures_are_the_undisturbed_run_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decode: dict[str, Any]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    undisturbed = run(job(decode), whole, World("python"))
    at = random.Random(str(decode))
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(Writer, "write", killed_after(at.randint(1, 3)))
            with pytest.raises(Killed):
                run(job(decode), parts, World("python"))
    report = run(job(decode), parts, World("python"))
    assert report["attempts"] == 3
    assert figures(report) == figures(undisturbed)
    assert report["rows_per_token"] > 1
    usage = [line["usage"]["prompt_tokens"] for line in lines(whole)]
    assert report["prompt_tokens"]["total"] == sum(usage)
    for folder in (whole, parts):
        for name in ("text", "finish_reason", "usage", "correct"):
            assert [line[name] for line in lines(parts)] == [line[name] for line in lines(folder)]
    said = (parts / "report.html").read_text()
    assert "Attempts: 3. What is counted, and tokens per second, is of all of them; times of steps, bytes and" in said
    assert "in the last of 3 attempts; decoding took" in said
    assert json.loads((parts / "report.json").read_text()) == report


def test_results_of_other_code_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rule may have changed since: the texts of one run would then be of two rules."""
    asked = job({})
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", killed_after(6))
        with pytest.raises(Killed):
            run(asked, tmp_path, World("python"))
    with monkeypatch.context() as patch:
        patch.setattr(attempt_record, "code_hash", lambda: "cafe")  # that of the second attempt
        patch.setattr(Writer, "write", killed_after(2))
        with pytest.raises(Killed):
            run(asked, tmp_path, World("python"))
    assert "other code of lopa_dist" not in caplog.text
    run(asked, tmp_path, World("python"))
    assert "WARNING: other code of lopa_dist (cafe; now " in caplog.text
