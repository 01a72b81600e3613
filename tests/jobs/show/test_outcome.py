"""What a job says when it is done: its figures, its first errors, and why nothing came out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lopa_dist.checks import UserError
from lopa_dist.jobs.folder.results import write_errors
from lopa_dist.jobs.show.outcome import tell_outcome


def test_a_share_of_an_input_that_is_smaller_than_its_array_is_done(caplog: pytest.LogCaptureFixture) -> None:
    task = {"input": "x", "shard": 2, "shards": 3}
    report = {"requests": 0, "errors": 0, "tpf": 0.0, "tokens_per_s": {"job": 0.0}, "task": task}
    with caplog.at_level("INFO", "lopa_dist"):
        assert tell_outcome(report, Path("run")) == 0
    assert caplog.messages[-1] == "the input has nothing for task.shard=2 of 3: it is done"


def write_results(folder: Path, lines: list[dict[str, Any]]) -> None:
    """Write results as a job does, with their errors apart."""
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_errors(folder, sum(line["finish_reason"] == "error" for line in lines))


def test_the_first_error_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    every = {"custom_id": "a", "index": 0, "finish_reason": "error"}
    lines = [every | {"finish_reason": "stop"}, *(every | {"error": f"line {i}: bad"} for i in (2, 3))]
    write_results(tmp_path, lines)
    report = {"requests": 3, "errors": 2, "tpf": 1.0, "tokens_per_s": {"job": 0.0}}
    with caplog.at_level("INFO", "lopa_dist"):
        assert tell_outcome(report, tmp_path) == 1.0
    assert "2 with errors (see errors.jsonl)" in caplog.messages[0]
    assert caplog.messages[0].endswith(f"; results.jsonl is in {tmp_path}"), "the page could not be written"
    assert caplog.messages[1] == "the first error: line 2: bad"
    lines.append(every | {"finish_reason": "stop", "unjudged": "KeyError: 'answer'"})
    write_results(tmp_path, lines)
    with caplog.at_level("INFO", "lopa_dist"):
        tell_outcome(report | {"requests": 4, "unjudged": 1}, tmp_path)
    assert caplog.messages[-1] == "the first that was not judged: KeyError: 'answer'"
    with pytest.raises(UserError, match="no answer could be judged; the first: KeyError: 'answer'"):
        tell_outcome(report | {"unjudged": 1}, tmp_path)
    lines[1:1] = [every | {"finish_reason": "invalid", "error": "the text is no JSON: it was cut"}]
    write_results(tmp_path, lines)
    caplog.clear()
    with caplog.at_level("INFO", "lopa_dist"):
        tell_outcome(report | {"requests": 4, "tries": {"invalid": 1}}, tmp_path)
    assert caplog.messages[1:] == [
        "the first error: line 2: bad", "the first answer without its format: the text is no JSON: it was cut"
    ]  # fmt: skip
    with pytest.raises(UserError, match="no answer has its format; the first: the text is no JSON: it was cut"):
        tell_outcome(report | {"tries": {"invalid": 1}}, tmp_path)
    write_results(tmp_path, [every | {"error": "x" * kind} for kind in range(1, 9)])
    with caplog.at_level("INFO", "lopa_dist"):
        tell_outcome(report | {"requests": 9, "errors": 8}, tmp_path)
    assert caplog.messages[-1] == "errors of 3 more kinds are in errors.jsonl"
    lines += [every | {"error": f"line 4 (b.csv, line {i}): {what} is null"} for i, what in enumerate("aab")]
    write_results(tmp_path, lines)
    caplog.clear()
    with caplog.at_level("INFO", "lopa_dist"):
        tell_outcome(report, tmp_path)
    assert caplog.messages[1:] == [
        "2 errors such as: line 4 (b.csv, line 0): a is null",
        "2 errors such as: line 2: bad",
        "1 error such as: line 4 (b.csv, line 2): b is null",
    ]
    exact = {"accuracy": 0.0, "accuracy_interval": [0.0, 0.5], "judged": 3, "task": {"score": "exact"}}
    with caplog.at_level("INFO", "lopa_dist"):
        tell_outcome(report | exact, tmp_path)
    assert caplog.messages[-1].startswith("no whole answer equals its reference; task.score=FILE.py:FUNCTION")
    with pytest.raises(UserError, match=r"^no request could run; the first error: line 2: bad$"):
        tell_outcome(report | {"requests": 2}, tmp_path)
