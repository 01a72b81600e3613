"""Options set to auto: a job goes by the profile that was made for its model and device, or says that there is none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lopa_dist.cli import main
from lopa_dist.config import Config, DecodeOptions, LoggingConfig, ParallelConfig, TaskConfig, WandbConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.profile import Profile
from lopa_dist.jobs import profiles
from lopa_dist.jobs.run import run
from lopa_dist.kernels import attention
from lopa_dist.models.checkpoint import read_config
from lopa_dist.models.families import native
from lopa_dist.models.files import EMBEDDED
from lopa_dist.parallel.launcher import World
from lopa_dist.parallel.mesh import Mesh

DECODE = ["decode.block_size=16", "decode.verify=confidence", "decode.drafts=0"]  # what `job` below has


def test_the_attention_that_was_fastest_for_the_jobs_steps() -> None:
    profile = Profile({32: 1.0, 1024: 1.0, 2048: 9.0}, 32, {32: "meta", 256: "torch", 1024: "varlen"})
    config = Config(decode=DecodeOptions(branches=7), engine=EngineConfig(max_sequences=16))
    options = native(read_config(EMBEDDED))
    one, many, ranks = Mesh(1, 1), Mesh(4, 1), Mesh(1, 4)
    assert [profiles.followed(profile, config, options, *job)[2] for job in [
        (one, 1), (one, 1000), (many, 4), (ranks, 1), (ranks, 16),
    ]] == ["torch", "varlen", "torch", "meta", "varlen"]  # fmt: skip
    config.engine.max_rows = 300
    assert profiles.followed(profile, config, options, one, 1000)[2] == "torch"
    config.decode.branches = "auto"
    assert profiles.followed(profile, config, options, one, 1) == (15, 1024, "torch")


def test_on_a_gpu_auto_never_means_what_the_model_does_not_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TRITON", True)
    monkeypatch.setattr(attention, "has_varlen", lambda: True)
    gpu, bf16 = torch.device("cuda"), torch.bfloat16
    assert attention.candidates(gpu, 128, bf16) == ["meta", "torch", "varlen"]
    assert attention.candidates(gpu, 128, torch.float32) == ["meta", "torch"]
    assert attention.candidates(gpu, 192, bf16) == ["torch", "varlen"]
    assert attention.candidates(gpu, 100, bf16) == ["meta", "torch"]
    assert attention.candidates(gpu, 512, bf16) == ["torch"]
    group, shape = SimpleNamespace(), replace(read_config(EMBEDDED), head_dim=512)
    settled = profiles.settled(Config(decode=DecodeOptions(branches=1)), shape, gpu, group, 4)
    assert settled.engine.attention == "torch"


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
    monkeypatch.setattr("sys.argv", ["lopa-dist", "profile", *DECODE, "parallel.threads=1"])
    main()
    assert "decode.branches=auto with 4 in flight on one rank: " in capsys.readouterr().out
    [file] = cache.iterdir()
    made = json.loads(file.read_text())
    assert made["window"] == 33  # two blocks, and the row before them
    # a device on which four windows cost what one costs, and more of them in proportion
    made["seconds"] = {str(rows): max(4 * 33, rows) / 1e4 for rows in range(33, 514, 32)}
    file.write_text(json.dumps(made))
    report = run(job(), tmp_path / "run", World("python"))
    assert report["branch"]["k"] == report["decode"]["branches"] == 1  # two sequences in flight
    assert report["requests"] == 4
    alone = job()
    alone.task.limit = 1
    assert run(alone, tmp_path / "alone", World("python"))["decode"]["branches"] == 3  # there is but one to run


def test_a_profile_of_another_precision_does_not_count(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "BUDGET_S", 0.0)
    profiles.make_profile(["model.dtype=bf16", *DECODE, "parallel.threads=1"])
    assert len(list(cache.iterdir())) == 1
    with pytest.raises(ValueError, match="run lopa-dist profile once"):
        run(job(), tmp_path, World("python"))


def test_a_profile_of_another_window_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "BUDGET_S", 0.0)
    profiles.make_profile([*DECODE, "decode.max_active_blocks=1", "parallel.threads=1"])
    with pytest.raises(ValueError, match=r"windows of \d+ rows on .* run lopa-dist profile once"):
        run(job(), tmp_path, World("python"))
    config = job()
    config.decode.max_active_blocks = 1
    assert run(config, tmp_path, World("python"))["requests"] == 4
