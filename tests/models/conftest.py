"""A good checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.one_checkpoint import config_of, weights_of, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint."""
    return write(tmp_path, config_of(), weights_of(config_of()))
