"""The attacks of `attacks.py` do no harm, as root and as an ordinary user, and nothing runs that cannot be confined."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("sandbox_to_itself")

ROOT = Path(__file__).parents[2]
USER = 61000


def open_python() -> str | None:
    """A Python that every user can read."""
    for path in (sys.executable, "/usr/bin/python3"):
        words = [
            *as_user(),
            path,
            "-c",
            "import os, sys; open(os.path.realpath(sys.executable)); assert sys.version_info >= (3, 10)",
        ]
        if os.path.exists(path) and subprocess.run(words, capture_output=True, check=False).returncode == 0:
            return path
    return None


def as_user() -> list[str]:
    """What makes a command an ordinary user's."""
    if os.getuid():
        return []
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]


def attacked(folder: Path, *before: str, python: str = sys.executable) -> dict[str, Any]:
    """What the attacks come to, under a command."""
    command: Sequence[str] = [*before, python, "-B", "-m", "tests.tasks.attacks", str(folder)]
    found = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd="/", env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert found.returncode == 0, found.stderr
    return dict(json.loads(found.stdout))


@pytest.fixture
def user_s_folder() -> Iterator[Path]:
    """A folder that an ordinary user owns; pytest's own are shut to others."""
    with tempfile.TemporaryDirectory() as name:
        if os.getuid() == 0:
            os.chown(name, USER, USER)
        yield Path(name)


def reachable() -> str:
    """A Python that an ordinary user can run the tests with, or a skip."""
    python = open_python()
    if python is None or (os.getuid() == 0 and not shutil.which("setpriv")):
        pytest.skip("needs setpriv, and a Python of at least 3.10 that every user can read")
    readable = subprocess.run([*as_user(), "ls", str(ROOT / "tests" / "tasks")], capture_output=True, check=False)
    if readable.returncode:
        pytest.skip("other users cannot read this checkout")
    return python


def test_as_the_user_who_runs_the_tests(tmp_path: Path) -> None:
    assert attacked(tmp_path) == {"attacks": 25, "harm": {}}


def test_as_an_ordinary_user(user_s_folder: Path) -> None:
    if os.getuid():
        pytest.skip("the tests run as one")
    assert attacked(user_s_folder, *as_user(), python=reachable()) == {"attacks": 25, "harm": {}}


def test_without_user_namespaces_an_ordinary_user_is_refused(user_s_folder: Path) -> None:
    python = reachable()
    forbid = [*as_user(), "bwrap", "--unshare-user", "--disable-userns", "--dev-bind", "/", "/"]
    if subprocess.run([*forbid, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this bwrap cannot forbid user namespaces")
    refused = attacked(user_s_folder, *forbid, python=python)["refused"]
    assert "task.allow_code_execution=true: programs cannot be run confined here: bwrap: " in refused
    assert "task.allow_code_execution=unconfined" in refused


@pytest.mark.parametrize("confined", [True, False])
def test_what_could_not_be_run_for_want_of_processes_is_not_judged(confined: bool) -> None:
    program = (
        "import resource\nfrom lopa_dist.tasks.sandbox import *\nwhole = []\nfor most in (2, 3, 4, 40):\n"
        "    resource.setrlimit(resource.RLIMIT_NPROC, (most, 40))\n"
        f"    try: whole.append(run_tests('def f(): return 2', 'assert f() == 2', Limits(), {confined}).reason)\n"
        "    except NotRun: whole.append('not run')\nprint(*whole, sep=',')"
    )
    found = subprocess.run(
        [*as_user(), reachable(), "-c", program], capture_output=True, text=True, check=True, cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    outcomes = found.stdout.strip().split(",")
    assert {*outcomes} <= {"not run", ""}, outcomes
    assert outcomes[0] == "not run"
    assert os.getuid() or outcomes[-1] == ""
