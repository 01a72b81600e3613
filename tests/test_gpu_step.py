"""The GPU's benchmark without a GPU: it runs to its end and claims nothing; its floors, bars and deadline by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_attention, gpu_bench, gpu_model, gpu_step
from benchmarks.gpu_bench import Bench, Row
from benchmarks.roofline import BF16, DREAM, FP8, LLADA, Bar, Case, Deadline, Machine, halved, step_bar, work
from lopa_dist.rows import ForwardBatch

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
    tables = shown.split("The bars")
    steps, bars = ([line.split("│") for line in table.splitlines() if line[:1] == "│"] for table in tables)
    assert {cells[1].strip() for cells in steps} == {*gpu_step.PARTS, ""}
    figures = [cell.strip() for cells in steps for cell in cells[3:12]]
    assert set(figures) == {"", "not measured"}
    assert figures.count("not measured") >= 9 * len(gpu_model.STEPS)
    besides = [cells[12].strip() for cells in steps if cells[12].strip()]
    assert besides
    assert all(cell.endswith("not measured") for cell in besides)
    assert not any("failed" in cells[15] or "deadline" in cells[15] for cells in steps)
    assert len(bars) == 7
    assert all(cells[3].strip() == "not measured" and cells[4].split() == cells[7].split() for cells in bars)


def test_json_without_gpu_claims_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "toy.json"
    gpu_step.main(["--toy", "--part", "eager", "--part", "machine", "--json", str(file)])
    assert f"written to {file}" in capsys.readouterr().out
    written = json.loads(file.read_text())
    assert written["device"] == "no GPU"
    assert {figure for row in written["rows"] for figure in row["figures"].values()} == {"not measured"}
    assert {bar["met"] for row in written["rows"] for bar in row["bars"]} == {"not measured"}


def test_what_was_measured_is_reported_though_a_part_breaks_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("no room for a model")

    monkeypatch.setattr(gpu_model, "random_model", broken)
    file = tmp_path / "toy.json"
    with pytest.raises(MemoryError):
        gpu_step.main(["--toy", "--json", str(file)])
    assert "The bars" in capsys.readouterr().out
    assert file.exists()


def test_what_has_a_bar_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[Row] = []
    monkeypatch.setattr(Bench, "fill", lambda bench, row, measure: filled.append(row))
    gpu_step.main(["--toy"])
    late = [i for i, row in enumerate(filled) if row.part == "step" and not row.bars]
    assert late == list(range(len(filled) - len(late), len(filled)))
    assert len(late) == 2 * 24
    assert len({id(row) for row in filled}) == len(filled), "nothing twice"


def test_a_part_alone_and_no_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_step.main(["--toy", "--part", "step", "--minutes", "0"])
    shown = capsys.readouterr().out
    assert len(re.findall("deadline", shown)) == len(gpu_model.STEPS)
    assert "gemm" not in shown


def test_what_a_gpu_would_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a clock that always says 5 ms: every figure is there, and is kept."""

    def clock(bench: Bench, function: Callable[[], object], repeats: int = 0) -> float:
        function()
        return 5.0

    for name in ("replays", "graph", "wall"):
        monkeypatch.setattr(Bench, name, clock)
    monkeypatch.setattr(Bench, "laps", lambda bench, run: clock(bench, lambda: run(lambda: None)))
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

    monkeypatch.setattr(gpu_step, "device", lambda bench: "NVIDIA H200")
    file = tmp_path / "results.json"
    gpu_step.keep(file, Bench(torch.device("cpu"), Deadline(1)), rows, 8, 1.23)
    found = json.loads(file.read_text())
    assert {"device", "driver", "torch", "triton", "rows"} <= set(found)
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
    least = halved(DREAM, case)
    assert least.bytes == pytest.approx(7.07e9 + 57_344 * 1056, rel=1e-3), "half of bf16's weights, the head's too"
    assert least.flops == half.flops


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
    steps = gpu_model.whole_rows()
    steps[gpu_model.WHOLE.index((BF16, Case(1024, 32, 1)))].figures["ms"] = 4.0
    table = gpu_step.projection_rows()
    gpu_step.project(table, steps)
    found = table[0].figures
    bytes_of_ranks, bytes_of_commit = 12 * 16 + 4, 32 * 57_344
    expected = 7 * (15e-6 + bytes_of_ranks / 300e9) + 0.25 * 3 * (15e-6 + bytes_of_commit / 300e9)
    assert found["collectives ms"] == pytest.approx(1e3 * expected)
    assert found["projected tokens/s"] == pytest.approx(15.55 / (4e-3 + expected))
    assert table[1].figures["projected tokens/s"] is None, "window 64 was not measured"


def test_whole_steps_are_those_of_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most forwards have all branches of a whole block, and the last block's see the case's prefix."""
    seen: list[tuple[int, int]] = []
    prepare = gpu_model.StaticRunner.prepare

    def spy(runner: gpu_model.StaticRunner, batch: ForwardBatch, *rest: object) -> object:
        seen.append((len(batch.tokens), int(batch.shared.max())))
        return prepare(runner, batch, *rest)

    monkeypatch.setattr(gpu_model.StaticRunner, "prepare", spy)
    monkeypatch.setattr(gpu_model, "toy_case", lambda case: case)
    bench, case = Bench(torch.device("cpu"), Deadline(1)), Case(128, 16, 4)
    torch.manual_seed(0)
    model = gpu_model.random_model(bench.shape(DREAM), bench.device)
    marks: list[int] = []
    monkeypatch.setattr(bench, "laps", lambda run: run(lambda: marks.append(len(seen))))
    gpu_model.measure_whole(bench, model, case, None, Row("whole", "one", {}))
    assert marks == list(range(1, len(seen) + 1)), "a lap a step"
    later = seen[len(seen) // 2 :]
    fresh = (80, 127)  # with the row before the window, until its first position is filled; padded
    assert sum(one in ((64, 128), fresh) for one in later) >= 0.8 * len(later)


def test_transformers_gets_no_mask_and_sees_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, case = Bench(torch.device("cpu"), Deadline(1)), Case(16, 8, 2)
    model = gpu_model.random_model(bench.shape(DREAM), bench.device)
    written, plain = [], torch.nn.functional.scaled_dot_product_attention

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        written.append((q.shape[2], k.shape[1:3], options["attn_mask"], options["is_causal"]))
        return plain(q, k, v, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    shape = model.config
    run = gpu_model.eager_step(gpu_model.qwen2(model, bench.device), shape, case, bench.device)
    with torch.inference_mode():
        first, second = run(), run()
    assert written == [(8, (shape.kv_heads, 24), None, False)] * 2 * shape.layers
    assert first.shape == (3, 2, 4)
    assert torch.equal(first, second), "the cache is as it was"


def test_another_that_fails_leaves_the_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> None:
        raise RuntimeError("no kernel for this GPU")

    monkeypatch.setattr(gpu_attention, "stock_varlen", broken)
    bench = Bench(torch.device("cpu"), Deadline(1))
    config, mix, row = bench.shape(LLADA), gpu_attention.Mix((4, 8), 2, 2), gpu_attention.rows()[0]
    bench.toy = False
    monkeypatch.setattr(bench, "graph", lambda function: (function(), 2.0)[1])
    gpu_attention.measure(bench, config, mix, row)
    assert row.figures["varlen"] is None
    assert row.figures["x padded SDPA"] == row.figures["x best stock"] == 1.0
    assert row.note.count("no kernel for this GPU") == 1


def test_the_median_of_the_runs_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, spent = [0.0], [9.0, 9.0, 0.003, 0.001, 0.002]  # seconds; compiling and capturing first

    def run() -> None:
        now[0] += spent.pop(0)

    def before() -> None:
        now[0] += 100.0

    def mark(device: torch.device) -> SimpleNamespace:
        at = now[0]
        return SimpleNamespace(at=at, elapsed_time=lambda end: 1e3 * (end.at - at))

    monkeypatch.setattr(gpu_bench, "device_mark", mark)
    cpu = torch.device("cpu")
    assert gpu_bench.median_ms(gpu_bench.graphed(run, cpu), cpu, 3, before) == pytest.approx(2.0)
    assert not spent


def test_laps_of_the_second_half_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 9.0, 18.0, 18.002, 18.006, 18.009])
    monkeypatch.setattr("benchmarks.gpu_bench.time.perf_counter", lambda: next(times))
    bench = Bench(torch.device("cpu"), Deadline(1, lambda: 0.0))
    bench.toy = False
    assert bench.laps(lambda mark: [mark() for _ in range(6)]) == pytest.approx(3.0)
