"""`lopa-dist models`: one table, which knows every family and every preset."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatch

import pytest

from lopa_dist.commands import perform
from lopa_dist.jobs.commands.models import compared, presets
from lopa_dist.models.families import FAMILIES
from lopa_dist.setting_keys import CONF

NAMES = sorted({file.stem for file in (CONF / "model").glob("*.yaml")} - {"local"})


def test_every_family_and_every_preset_once() -> None:
    assert {*compared()} == {*FAMILIES}
    assert Counter(name for family in compared() for name in presets(family)) == Counter(NAMES)
    patterns = [pattern for row in compared().values() for pattern in row.get("presets", [])]
    assert not [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in NAMES)]


def test_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    perform("models", [])
    said = capsys.readouterr().out
    assert all(f"\n{family}\n" in f"\n{said}" for family in FAMILIES)
    assert all(name in said for name in NAMES)
    assert "the authors' `generate`: 160 of 160" in said
