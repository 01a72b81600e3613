"""Every benchmark says what it does when it is asked, instead of measuring for minutes and writing over its results."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import benchmarks

FOLDER = Path(str(benchmarks.__file__)).parent
RANK = "first_ranks"  # which `gpu_first` starts
COMMANDS = sorted(
    file.stem for file in FOLDER.glob("*.py") if '__name__ == "__main__"' in file.read_text() and file.stem != RANK
)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("name", COMMANDS)
def test_it_answers_a_question_for_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert not left.value.code
    assert "usage:" in capsys.readouterr().out
