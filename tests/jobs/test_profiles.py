"""Options set to auto: a job goes by the profile that was made for its model and device, or says that there is none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lopa_dist.cli import main
from lopa_dist.config import Config, DecodeOptions, LoggingConfig, ParallelConfig, TaskConfig, WandbConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.profile import Profile
from lopa_dist.jobs import make_profile as command
from lopa_dist.jobs.profiles import cache_folder, keep, kept
from lopa_dist.jobs.resolve import resolve
from lopa_dist.jobs.run import run
from lopa_dist.kernels import attention
from lopa_dist.models.checkpoint import read_config
from lopa_dist.models.files import EMBEDDED
from lopa_dist.parallel.group import Group
from lopa_dist.parallel.launcher import World
from lopa_dist.parallel.mesh import Mesh
from lopa_dist.parallel.stop import Stop

DECODE = ["decode.block_size=16", "decode.verify=confidence", "decode.drafts=0"]  # what `job` below has


def test_on_a_gpu_auto_never_means_what_the_model_does_not_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TRITON", True)
    gpu = torch.device("cuda")
    assert [attention.suited(gpu, dim) for dim in (100, 128, 192)] == ["meta", "meta", "torch"]
    assert attention.suited(torch.device("cpu"), 128) == "torch"
    group = Group(World("python"), Mesh(1, 1), "auto", 5, gpu, Stop(5))
    shape = replace(read_config(EMBEDDED), head_dim=512)
    assert resolve(Config(decode=DecodeOptions(branches=1)), shape, gpu, group, 4).engine.attention == "torch"


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


def test_without_a_profile_the_remedy_is_given(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run lopa-dist profile once"):
        run(job(), tmp_path, World("python"))


def test_made_read_and_followed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "BUDGET_S", 0.5)
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
    crowded = job()
    crowded.decode.one_block_from = "auto"
    assert run(crowded, tmp_path / "crowded", World("python"))["decode"]["one_block_from"] == 2
    alone = job()
    alone.task.limit = 1
    assert run(alone, tmp_path / "alone", World("python"))["decode"]["branches"] == 3  # there is but one to run


def test_a_profile_of_another_precision_does_not_count(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "BUDGET_S", 0.0)
    command.make_profile(["model.dtype=bf16", *DECODE, "parallel.threads=1"])
    assert "Sizes measured in 0 s: 1, too few" in capsys.readouterr().out
    assert len(list(cache.iterdir())) == 1
    with pytest.raises(ValueError, match="run lopa-dist profile once"):
        run(job(), tmp_path, World("python"))


def test_a_profile_of_another_window_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "BUDGET_S", 0.0)
    command.make_profile([*DECODE, "decode.max_active_blocks=1", "parallel.threads=1"])
    with pytest.raises(ValueError, match=r"windows of \d+ rows on .* run lopa-dist profile once"):
        run(job(), tmp_path, World("python"))
    config = job()
    config.decode.max_active_blocks = 1
    assert run(config, tmp_path, World("python"))["requests"] == 4


def test_a_reader_never_finds_half_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, old, new = {"device": "one"}, Profile({33: 0.1}, 33), Profile({33: 0.2}, 33)
    file = keep(subject, old)
    seen = []
    write = Path.write_text

    def slow(path: Path, text: str) -> None:
        write(path, text[: len(text) // 2])
        seen.append(kept(subject))
        write(path, text)

    monkeypatch.setattr(Path, "write_text", slow)
    assert keep(subject, new) == file
    assert (seen, kept(subject)) == ([old], new)
    assert list(cache_folder().iterdir()) == [file]
