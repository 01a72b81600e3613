"""Looking at runs, help and mistakes do not wait for torch, which takes seconds to import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lopa_dist.composing import composed
from lopa_dist.jobs.run.job import run
from lopa_dist.parallel.launcher import World

PROGRAM = """
import sys
from lopa_dist.cli import main

for line in sys.stdin:
    sys.argv[1:] = line.split()
    try:
        main()
        status = 0
    except SystemExit as ended:
        status = 0 if ended.code in (None, 0) else 1
    print("then:", status, *sorted({"torch", "transformers", "triton"} & set(sys.modules)), file=sys.stderr)
"""
STATUS = {
    "--version": 0, "--help": 0, "report --help": 0, "models": 0, "status RUN": 0, "report RUN": 0, "table RUN": 0,
    "decode.draft=8": 1, "decode.drafts=x": 1, "task.input=x.odt": 1, "repot RUN": 1, "merge RUN": 1,
    "-m decode.drafts=4,x": 1,
}  # fmt: skip
"""Command lines, and the exit status of each."""


def test_no_command_that_only_looks_imports_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run(composed(["task.limit=4", "logging.wandb.mode=disabled", "logging.progress=never"]), folder, World("python"))
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], input="\n".join(STATUS).replace("RUN", str(folder)), capture_output=True,
        text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    found = [line.split()[1:] for line in ended.stderr.splitlines() if line.startswith("then:")]
    assert dict(zip(STATUS, found, strict=True)) == {line: [str(status)] for line, status in STATUS.items()}
