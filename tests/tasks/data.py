"""The real benchmark files: in $LOPA_DATA, or beside the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("LOPA_DATA") or Path(__file__).parents[2].parent / "shared" / "data")


def real(name: str) -> str:
    """The path of a real file; skips the test where it is not there."""
    if not (FOLDER / name).exists():
        pytest.skip(f"no {name} in {FOLDER}; set LOPA_DATA to a folder that has it")
    return str(FOLDER / name)
