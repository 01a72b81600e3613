"""Options set to auto: a job goes by the profile that was made for its model and device, or says that there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lopa_dist.cli import main
from lopa_dist.config import Config, DecodeOptions, EngineConfig, LoggingConfig, ParallelConfig, TaskConfig, WandbConfig
from lopa_dist.jobs import profiles
from lopa_dist.jobs.run import run
from lopa_dist.parallel.launcher import World


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOPA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def job() -> Config:
    return Config(
        task=TaskConfig(limit=4),
        decode=DecodeOptions(branches="auto", block_size=16, max_new_tokens=32),
        engine=EngineConfig(max_sequences=2, max_rows="auto"),
        parallel=ParallelConfig(threads=1),
        logging=LoggingConfig(progress="never", plots=False, wandb=WandbConfig(mode="disabled")),
    )


def test_without_a_profile_the_remedy_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run lopa-dist profile once"):
        run(job(), tmp_path, World("python"))


def test_made_read_and_followed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profiles, "BUDGET_S", 0.5)
    monkeypatch.setattr("sys.argv", ["lopa-dist", "profile", "decode.block_size=16", "parallel.threads=1"])
    main()
    assert "decode.branches=auto with 4 in flight on one rank: " in capsys.readouterr().out
    [file] = cache.iterdir()
    made = json.loads(file.read_text())
    assert made["window"] == 32
    # a device on which four windows cost what one costs, and more of them in proportion
    made["seconds"] = {str(rows): max(128, rows) / 1e4 for rows in range(32, 513, 32)}
    file.write_text(json.dumps(made))
    report = run(job(), tmp_path / "run", World("python"))
    assert report["branch"]["k"] == report["decode"]["branches"] == 1  # two sequences in flight
    assert report["requests"] == 4


def test_a_profile_of_another_precision_does_not_count(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "BUDGET_S", 0.0)
    profiles.make_profile(["model.dtype=bf16", "decode.block_size=16", "parallel.threads=1"])
    assert len(list(cache.iterdir())) == 1
    with pytest.raises(ValueError, match="run lopa-dist profile once"):
        run(job(), tmp_path, World("python"))


def test_a_profile_of_another_window_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "BUDGET_S", 0.0)
    profiles.make_profile(["decode.block_size=16", "decode.max_active_blocks=1", "parallel.threads=1"])
    with pytest.raises(ValueError, match=r"windows of 32 rows on .* run lopa-dist profile once"):
        run(job(), tmp_path, World("python"))
    config = job()
    config.decode.max_active_blocks = 1
    assert run(config, tmp_path, World("python"))["requests"] == 4
