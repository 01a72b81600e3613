"""Branch ranks wait for nobody's judging."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.system import forked

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("sandbox_to_itself")]
if not sys.platform.startswith("linux"):
    pytest.skip("the sandbox needs Linux", allow_module_level=True)


def test_hanging_programs_outlast_a_collective_s_timeout(tmp_path: Path) -> None:
    row = {"prompt": "while True: pass\n#", "entry_point": "f", "test": "", "canonical_solution": ""}
    file = tmp_path / "programs.jsonl"
    file.write_text("".join(json.dumps({"task_id": f"HE/{n}"} | row) + "\n" for n in range(3)))
    overrides = [
        "task=humaneval", f"task.input={file}", "task.allow_code_execution=true", "task.code_timeout_s=4",
        "model.chat_template=never", "decode.max_new_tokens=16", "engine.max_sequences=2", "parallel.branch=2",
        "parallel.timeout_s=6",
    ]  # fmt: skip
    ranks = forked.job(tmp_path / "run", 2, *overrides)
    assert ranks.wait(200) == [0, 0], ranks.printed()[-3000:]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["requests"], report["accuracy"], report["world"]["branch"]) == (3, 0.0, 2)
    assert report["wall_s"] > 12 > 2 * report["decode_s"]
