"""Where a package cannot be imported, what is said is what is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lopa_dist.config import check_output
from lopa_dist.optional import lacking, why_lacking


def test_a_package_that_is_not_there_is_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "absent_one", None)
    for name in ("absent_one", "absent_one_too"):
        assert why_lacking(name, "json", "the one") == "needs the one: pip install 'lopa_dist[json]'"
    assert why_lacking("json") == ""
    error = ModuleNotFoundError("No module named 'absent_one.part'", name="absent_one.part")
    assert lacking("absent_one", error) == "needs absent_one: pip install 'lopa_dist[eval]'"


@pytest.mark.parametrize("raised", ["ImportError('requires NumPy 2.0\\nor newer')", "RuntimeError('too old')"])
def test_one_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: str) -> None:
    """Such as for another package that is too old: installing it once more would not help."""
    (tmp_path / "broken_one.py").write_text(f"raise {raised}")
    (tmp_path / "in_need.py").write_text("import absent_two")
    monkeypatch.syspath_prepend(tmp_path)
    said = why_lacking("broken_one")
    assert said.startswith("needs broken_one, which is installed but cannot be imported (")
    assert "requires NumPy 2.0 or newer" in said or "too old" in said
    assert "cannot be imported (No module named 'absent_two')" in why_lacking("in_need")


def test_an_output_that_could_not_be_written_is_refused_before_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyarrow.py").write_text("raise ImportError('pyarrow requires NumPy 2.0 or newer')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pyarrow", raising=False)
    with pytest.raises(ValueError, match=r"x\.parquet: needs pyarrow, which is installed but cannot .*NumPy 2\.0"):
        check_output(str(tmp_path / "x.parquet"))
    check_output(str(tmp_path / "x.csv"))
