"""The GPU's benchmark without a GPU: it runs to its end and claims nothing; its floors, bars and deadline by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_step
from benchmarks.gpu_bench import Bench, Row
from benchmarks.roofline import BF16, DREAM, FP8, LLADA, Bar, Case, Deadline, Machine, step_bar, work

H200 = Machine(bandwidth=4.3e12, rate=7e14, fp8_rate=1.4e15)


def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("a toy run wrote a file")


def test_a_run_without_gpu_claims_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_step, "RESULTS", tmp_path)
    monkeypatch.setattr(Path, "write_text", forbidden)
    gpu_step.main(["--toy"])
    shown = capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert "bars met: 0, missed: 0, not measured: " in shown
    lines = [line.split("│") for line in shown.splitlines() if line.startswith("│")]
    assert {cells[1].strip() for cells in lines} == {*gpu_step.PARTS, ""}
    figures = [cell.strip() for cells in lines for cell in cells[3:12]]
    assert set(figures) == {"", "not measured"}
    assert figures.count("not measured") >= 9 * len(gpu_step.STEPS)
    besides = [cells[12].strip() for cells in lines if cells[12].strip()]
    assert besides
    assert all(cell.endswith("not measured") for cell in besides)
    assert not any("failed" in cells[15] or "deadline" in cells[15] for cells in lines)


def test_a_part_alone_and_no_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_step.main(["--toy", "--part", "step", "--minutes", "0"])
    shown = capsys.readouterr().out
    assert len(re.findall("deadline", shown)) == len(gpu_step.STEPS)
    assert "gemm" not in shown


def test_what_a_gpu_would_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a clock that always says 5 ms: every figure is there, and is kept."""

    def clock(bench: Bench, function: Callable[[], object], repeats: int = 0) -> float:
        function()
        return 5.0

    for name in ("replays", "graph", "wall"):
        monkeypatch.setattr(Bench, name, clock)
    kept: list[list[Row]] = []
    monkeypatch.setattr(gpu_step, "show", lambda rows, bench: kept.append(rows))
    gpu_step.main(["--toy"])
    (rows,) = kept
    for row in rows:
        small = row.part != "gemm" or int(row.case.split()[1]) <= 64
        if row.case != "fp8 product" and small:
            assert None not in row.figures.values(), row
    step = next(row for row in rows if row.part == "step")
    assert step.figures["rest"] == -10.0
    assert step.figures["TB/s"] == pytest.approx(14.16 / 5, rel=0.01)
    attention = next(row for row in rows if row.part == "attention")
    assert attention.figures["x padded SDPA"] == attention.figures["x best stock"] == 1.0
    eager = next(row for row in rows if row.part == "eager")
    assert gpu_step.verdict(eager) == ("x eager >= 4", "MISSED")

    monkeypatch.setattr(gpu_step, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    file = gpu_step.keep(Bench(torch.device("cpu"), Deadline(1)), rows, [], 8, 1.23)
    assert file.name == "gpu_step-NVIDIA-H200.json"
    found = json.loads(file.read_text())
    assert {"device", "driver", "torch", "triton", "rows", "products"} <= set(found)
    assert len(found["rows"]) == len(rows)
    assert found["rows"][4]["bars"][0]["figure"] == "x floor"
    capsys.readouterr()


def test_dreams_floor_by_hand() -> None:
    case = Case(prefix=1024, window=32, branches=1)
    layers = 28 * (3584 * 4608 + 3584 * 3584 + 3 * 3584 * 18944)
    head = 152064 * 3584
    found = work(DREAM, BF16, case)
    assert layers + head == 7_070_285_824
    assert found.bytes == pytest.approx(14.14e9 + 57_344 * (1024 + 32), rel=1e-3)
    assert found.floor(H200, BF16) == pytest.approx(3.3e-3, rel=0.01)
    assert found.flops == 2 * 32 * layers + 2 * 16 * head + 4 * 28 * 3584 * 32 * 1056
    half = work(DREAM, FP8, case)
    assert half.flops == found.flops
    assert half.bytes == pytest.approx(layers + 2 * head + 57_344 * 1056, rel=1e-3)


def test_the_floor_of_many_rows_is_their_operations() -> None:
    many = work(DREAM, BF16, Case(1024, 96, 8))
    assert many.floor(replace(H200, bandwidth=1e20), BF16) == pytest.approx(many.flops / 7e14)
    assert many.floor(replace(H200, bandwidth=1e20), FP8) == pytest.approx(many.linears / 1.4e15 + many.others / 7e14)
    assert many.bytes == work(DREAM, BF16, Case(1024, 768, 1)).bytes, "branches share their prefix"
    assert work(LLADA, BF16, Case(0, 32, 1)).bytes == pytest.approx(2 * (8.0e9 - 126464 * 4096), rel=0.01)


@pytest.mark.parametrize(
    ("precision", "case", "limit"),
    [
        (BF16, Case(256, 96, 1), 1.25), (BF16, Case(256, 128, 1), None), (BF16, Case(2048, 64, 8), 1.35),
        (BF16, Case(256, 64, 4), None), (FP8, Case(256, 32, 1), 1.5), (FP8, Case(256, 96, 8), 1.5),
    ],
)  # fmt: skip
def test_a_steps_bar(precision: str, case: Case, limit: float | None) -> None:
    bar = step_bar(precision, case)
    assert (bar and bar.limit) == limit


def test_a_bar_is_met_missed_or_not_measured() -> None:
    slow, fast = Bar("x floor", 1.25), Bar("x eager", 4, at_most=False)
    row = Row("step", "one", {"x floor": 1.25, "x eager": 3.9}, [slow, fast])
    assert gpu_step.verdict(row) == ("x floor <= 1.25\nx eager >= 4", "met\nMISSED")
    assert gpu_step.verdict(replace(row, figures={"x floor": None, "x eager": 4.0}))[1] == "not measured\nmet"


def test_nothing_is_begun_after_the_deadline() -> None:
    now = [100.0]
    deadline = Deadline(1, lambda: now[0])
    bench, row, runs = Bench(torch.device("cpu"), deadline), Row("step", "one", {"ms": None}), []
    bench.fill(row, runs.append)
    now[0] = 159.9
    bench.fill(row, runs.append)
    assert not row.note
    now[0] = 160.0
    bench.fill(row, runs.append)
    assert len(runs) == 2
    assert row.note == "deadline"


def test_a_failure_on_a_gpu_leaves_the_others_going() -> None:
    def fail(row: Row) -> None:
        row.figures["ms"] = 1.0
        raise RuntimeError("out of memory\nand more")

    bench, row = Bench(torch.device("cpu"), Deadline(1)), Row("step", "one", {"ms": None})
    with pytest.raises(RuntimeError, match="out of memory"):
        bench.fill(row, fail)
    bench.toy = False
    bench.fill(row, fail)
    assert row.figures == {"ms": None}
    assert row.note == "failed: RuntimeError: out of memory"


def test_a_projection_by_hand() -> None:
    steps = gpu_step.step_rows()
    at = gpu_step.STEPS.index(("Dream-7B", BF16, Case(1024, 32, 1)))
    steps[at].figures["ms"] = 4.0
    table = gpu_step.projection_rows()
    gpu_step.project(table, steps)
    found = table[0].figures
    bytes_of_ranks, bytes_of_commit = 12 * 16 + 4, 32 * 57_344
    expected = 7 * (15e-6 + bytes_of_ranks / 300e9) + 0.25 * 3 * (15e-6 + bytes_of_commit / 300e9)
    assert found["collectives ms"] == pytest.approx(1e3 * expected)
    assert found["projected tokens/s"] == pytest.approx(15.55 / (4e-3 + expected))
    assert table[1].figures["projected tokens/s"] is None, "window 64 was not measured"
