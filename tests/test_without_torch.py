"""Looking at runs, help and mistakes do not wait for torch, which takes seconds to import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lopa_dist.config import composed
from lopa_dist.jobs.run.job import run
from lopa_dist.parallel.launcher import World

PROGRAM = """
import sys
from lopa_dist.cli import main
try:
    main()
finally:
    print("imported:", *sorted({"torch", "transformers", "triton"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    made = tmp_path_factory.mktemp("run")
    settings = ["task.limit=4", "logging.wandb.mode=disabled", "logging.progress=never"]
    run(composed(settings), made, World("python"))
    return made


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("--version", 0), ("--help", 0), ("report --help", 0), ("models", 0), ("status RUN", 0), ("report RUN", 0),
        ("table RUN", 0), ("decode.draft=8", 1), ("decode.drafts=x", 1), ("task.input=x.odt", 1), ("repot RUN", 1),
        ("-m decode.drafts=4,x", 1),
    ],
)  # fmt: skip
def test_no_command_that_only_looks_imports_it(folder: Path, arguments: str, status: int, tmp_path: Path) -> None:
    typed = [str(folder) if word == "RUN" else word for word in arguments.split()]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *typed], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ended.returncode == status, ended.stderr
    assert "imported:\n" in ended.stderr
