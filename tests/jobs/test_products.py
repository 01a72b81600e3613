"""What `lopa-dist profile` finds of products is kept, and jobs multiply so; without it they run as ever."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lopa_dist.config import (
    Config,
    DecodeOptions,
    LoggingConfig,
    ModelOptions,
    ParallelConfig,
    TaskConfig,
    WandbConfig,
)
from lopa_dist.engine.buckets import ladder
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.products import ProductTimes
from lopa_dist.jobs import profiles
from lopa_dist.jobs.lm_eval_adapter import LopaDist
from lopa_dist.jobs.products import keep_times, products_of
from lopa_dist.jobs.run import run
from lopa_dist.jobs.trace import trace
from lopa_dist.kernels.products import PRODUCTS, Choices
from lopa_dist.models.checkpoint import read_config
from lopa_dist.models.files import EMBEDDED
from lopa_dist.models.fused import projections
from lopa_dist.parallel.launcher import World

CPU = torch.device("cpu")
SHAPE = read_config(EMBEDDED)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOPA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every product of real rows only."""
    rows_of: list[int] = []

    def spy(x: Tensor, weight: Tensor, rows: Tensor, bias: Tensor | None, real: Callable = PRODUCTS["vgemm"]) -> Tensor:
        rows_of.append(len(x))
        return real(x, weight, rows, bias)

    monkeypatch.setitem(PRODUCTS, "vgemm", spy)
    return rows_of


def job(attention: str = "meta", graphs: str = "always") -> Config:
    return Config(
        task=TaskConfig(limit=4),
        decode=DecodeOptions(branches=1, block_size=8, max_new_tokens=32),
        engine=EngineConfig(max_sequences=2, attention=attention, graphs=graphs),
        parallel=ParallelConfig(threads=1),
        logging=LoggingConfig(progress="never", plots=False, wandb=WandbConfig(mode="disabled")),
    )


def keep_vgemm(sizes: list[int]) -> Choices:
    """A device on which the Triton product is always fastest, grouped products next."""
    us = {"library": 3.0, "grouped": 2.0, "vgemm": 1.0}
    shapes = set(projections(SHAPE).values())
    keep_times(job().model, SHAPE, CPU, [ProductTimes(size, *shape, us) for size in sizes for shape in shapes])
    return {(size, *shape): "vgemm" for size in sizes for shape in shapes}


def texts(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (folder / "results.jsonl").read_text().splitlines()]


def test_a_job_without_a_profile_takes_the_librarys_and_hashes_nothing(
    tmp_path: Path, called: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "revision", lambda _: pytest.fail("weights were hashed"))
    assert run(job(), tmp_path, World("python"))["requests"] == 4
    assert not called
    assert products_of(job().model, SHAPE, CPU) == {}


def test_jobs_and_traces_multiply_by_the_profile(tmp_path: Path, called: list[int]) -> None:
    run(job("torch", "never"), tmp_path / "eager", World("python"))
    chosen = keep_vgemm(ladder())
    run(job("torch", "never"), tmp_path / "eager_still", World("python"))
    assert not called
    run(job(), tmp_path / "static", World("python"))
    count = len(called)
    assert count
    assert set(called) <= set(ladder())
    assert texts(tmp_path / "static") == texts(tmp_path / "eager") == texts(tmp_path / "eager_still")
    assert trace(tmp_path / "static", "0").same
    assert len(called) > count
    assert products_of(job().model, SHAPE, CPU) == chosen


def test_the_harness_multiplies_by_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, told = keep_vgemm([32, 64]), []

    class Stop(Exception): ...

    def engine(*_: object, products: Choices, **__: object) -> None:
        told.append(products)
        raise Stop

    monkeypatch.setattr("lopa_dist.jobs.build.Engine", engine)
    with pytest.raises(Stop):
        LopaDist().generate_until(
            [SimpleNamespace(task_name="t", args=("1 + 1", {"max_gen_toks": 16}))], disable_tqdm=True
        )
    assert told == [chosen]


def test_all_ranks_go_by_the_first_ones(tmp_path: Path) -> None:
    board: dict[str, str] = {}
    chosen = keep_vgemm([32])
    assert products_of(job().model, SHAPE, CPU, lambda name, own: board.setdefault(name, own)) == chosen
    keep_vgemm([64])
    assert products_of(job().model, SHAPE, CPU, lambda name, own: board[name]) == chosen


def test_the_command_measures_where_the_static_runner_serves(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profiles, "BUDGET_S", 0.0)
    monkeypatch.setattr(profiles, "PRODUCTS_BUDGET_S", 0.0)
    options = ["parallel.threads=1", "engine.attention=meta", "engine.max_rows=auto"]
    profiles.make_profile(options)
    profiles.make_profile([*options, "engine.graphs=always", "model.quantization=int8"])
    assert not list(cache.glob("products-*"))
    assert "products" not in capsys.readouterr().out
    used: list[Choices] = []
    monkeypatch.setattr(profiles, "measure", lambda *of, real=profiles.measure: (used.append(of[-1]), real(*of))[1])
    profiles.make_profile([*options, "engine.graphs=always"])
    shown = capsys.readouterr().out
    [file] = cache.glob("products-*")
    found = json.loads(file.read_text())
    assert {(one["rows"], one["outputs"], one["inputs"]) for one in found["times"]} == {
        (32, *shape) for shape in projections(SHAPE).values()
    }
    assert all(one["us"]["library"] > 0 for one in found["times"])
    assert f"fastest for {len(found['times'])} products of 32 to 32 rows: library " in shown
    assert used == [products_of(job().model, SHAPE, CPU)], "forwards are timed as jobs run them"


def test_times_of_another_precision_or_shape_do_not_count() -> None:
    keep_vgemm([32])
    assert products_of(job().model, SHAPE, CPU)
    assert not products_of(ModelOptions(dtype="bf16"), SHAPE, CPU)
    assert not products_of(job().model, replace(SHAPE, intermediate_size=96), CPU)
