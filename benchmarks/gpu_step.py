"""How far a step is from what this GPU can do: one program, one table, some 8 minutes on one H200.

    python -m benchmarks.gpu_step [--part machine|step|whole|eager|attention|gemm|projection]...
                                  [--minutes 7.5] [--json FILE] [--toy]

Random weights of Dream-7B's and LLaDA-8B's shapes, made on the device, one model in memory at a time; no checkpoint is
needed. Parts:

- machine: the bandwidth of a copy and of a read, the rate of a bf16 and of an fp8 product. Floors come from these.
- step: forwards by prefix, window, branches and precision: milliseconds, bytes and operations a second, the roofline
  floor (`roofline`), how many times it, and where the time goes. whole: steps of the engine, host included. eager: the
  forward beside transformers' Qwen2. See `gpu_model`.
- attention: see `gpu_attention`.
- gemm: see `gpu_gemm`.
- projection: tokens a second that the paper's tokens per forward would give with the measured step of the engine, on as
  many GPUs as branches, with collectives as `latency_model` has them; beside the published tokens a second. A
  projection, no measurement: the link's constants are assumptions.

What has a bar is measured first; from the deadline on nothing new is begun. Results are kept in
benchmarks/results/gpu_step-<device>.json, those of parts that broke off included. Without a GPU, or with --toy, tiny
shapes run through the same code on the CPU: it shows that the program works, every figure is "not measured", and
nothing is written but what --json asks for. The bars say what we hold ourselves to:

- bf16, one branch, window up to 96: at most 1.25 x floor. fp8: 1.5 x the floor of half the bytes, though the engine
  keeps the head in bf16 ("x floor" is with that). 8 branches of window 64: 1.35 x.
- 4 x faster than eager.
- Attention: 1.5 x faster than padded SDPA with branches as batch rows (LLaDA's heads), and never below 0.9 x of the
  best that torch has. Products of virtually padded rows: no bucket slower than the library with real padding.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import gpu_attention, gpu_gemm, gpu_model
from benchmarks.gpu_bench import Bench, Row
from benchmarks.gpu_model import COLUMNS, WHOLE, WINDOWS, Tables
from benchmarks.latency_model import Link, Load, Model, step
from benchmarks.roofline import BF16, MODELS, Bar, Case, Deadline, Machine
from lopa_dist.kernels.dispatch import TRITON
from lopa_dist.kernels.quantized import FP8 as FP8_DTYPE

RESULTS = Path(__file__).parent / "results"
PARTS = ("machine", "step", "whole", "eager", "attention", "gemm", "projection")
MINUTES = 7.5  # to end, with what was begun, within eight
NOT_MEASURED = "not measured"
WIDTH = 400  # of a table that no terminal shows

PUBLISHED = (
    ("D2F-Dream-Base, MBPP", 15.55, 708.48),
    ("D2F-Dream-Base, GSM8K", 13.16, 619.33),
    ("D2F-Dream-Instruct, MBPP", 9.52, 636.55),
    ("D2F-Dream-Instruct, GSM8K", 11.42, 609.9),
)
"""LoPA-Dist on 8 H200 (setting S12): tokens per forward, and tokens a second."""
RANKS = 8
LINK = Link(alpha=15e-6, beta=1 / 300e9)
"""Of a message over NVLink: assumed, not measured."""


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="nothing new is begun after so many")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--toy", action="store_true", help="tiny shapes on the CPU, which measure nothing")
    options = parser.parse_args(arguments)
    began, parts = time.monotonic(), options.part or list(PARTS)
    toy = options.toy or not torch.cuda.is_available()
    bench = Bench(torch.device("cpu" if toy else "cuda"), Deadline(options.minutes))
    torch.manual_seed(0)

    tables = make_rows(parts)
    try:
        measure(bench, tables)
    finally:  # whatever broke off, what was measured is written
        rows = [row for part in PARTS if part in parts for row in tables[part]]
        if bench.deadline.over():
            for row in rows:
                row.note = row.note or ("" if any(row.figures.values()) else "deadline")
        show(rows, bench)
        if toy:
            print("No GPU was measured: tiny shapes ran on the CPU.")
        file = options.json or (None if toy else RESULTS / f"gpu_step-{'-'.join(device(bench).split())}.json")
        if file is not None:
            keep(file, bench, rows, options.minutes, time.monotonic() - began)
            print(f"written to {file}")


def measure(bench: Bench, tables: Tables) -> None:
    """All parts, what has a bar first."""
    machine_part(bench, tables.get("machine", machine_rows()))
    gpu_model.run(bench, "Dream-7B", tables)
    if "attention" in tables:
        gpu_attention.run(bench, tables["attention"])
    gpu_model.run(bench, "LLaDA-8B", tables)
    if "projection" in tables:
        project(tables["projection"], tables.get("whole", []))
    if "gemm" in tables:
        gpu_gemm.run(bench, tables["gemm"])
    for name in MODELS:
        gpu_model.run(bench, name, tables, bars=False)


def make_rows(parts: Iterable[str]) -> Tables:
    """All rows of the table, with nothing measured."""
    makers: dict[str, Callable[[], list[Row]]] = {
        "machine": machine_rows,
        "step": gpu_model.step_rows,
        "whole": gpu_model.whole_rows,
        "eager": gpu_model.eager_rows,
        "attention": gpu_attention.rows,
        "gemm": gpu_gemm.rows,
        "projection": projection_rows,
    }
    return {part: makers[part]() for part in parts}


# machine


def machine_rows() -> list[Row]:
    """What is measured of the device."""
    return [
        Row("machine", "copy", {"TB/s": None}),
        Row("machine", "read", {"TB/s": None}),
        Row("machine", "bf16 product", {"TFLOP/s": None}),
        Row("machine", "fp8 product", {"TFLOP/s": None}),
    ]


def machine_part(bench: Bench, table: list[Row]) -> None:
    """Bandwidth and rates, as large copies, reads and products of this torch reach them."""
    size = 1 << (16 if bench.toy else 30)  # numbers
    side = 64 if bench.toy else 8192

    def per_second(amount: float, spent: float | None) -> float | None:
        return None if spent is None else amount / spent / 1e9

    def copy(row: Row) -> None:
        source = torch.ones(size, dtype=torch.bfloat16, device=bench.device)
        target = torch.empty_like(source)
        row.figures["TB/s"] = per_second(4 * size, bench.replays(lambda: target.copy_(source)))

    def read(row: Row) -> None:
        source = torch.ones(size, dtype=torch.bfloat16, device=bench.device)
        row.figures["TB/s"] = per_second(2 * size, bench.replays(source.amax))

    def product(row: Row) -> None:
        x, w = (torch.empty(side, side, dtype=torch.bfloat16, device=bench.device).normal_() for _ in range(2))
        row.figures["TFLOP/s"] = per_second(2.0 * side**3, bench.replays(lambda: F.linear(x, w)))

    def fp8_product(row: Row) -> None:
        x, w = (torch.empty(side, side, device=bench.device).normal_().to(FP8_DTYPE) for _ in range(2))
        if bench.toy:
            return
        one = torch.ones(side, device=bench.device)

        def multiply() -> Tensor:
            scales = one[:, None], one[None]
            return torch._scaled_mm(x, w.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True)

        row.figures["TFLOP/s"] = per_second(2.0 * side**3, bench.replays(multiply))

    for row, measure in zip(table, (copy, read, product, fp8_product), strict=True):
        bench.fill(row, measure)
    bench.free()
    bandwidths = [row.figures["TB/s"] or 0.0 for row in table[:2]]
    rate, fp8_rate = (row.figures["TFLOP/s"] or 0.0 for row in table[2:])
    if max(bandwidths) and rate:
        bench.machine = Machine(1e12 * max(bandwidths), 1e12 * rate, 1e12 * (fp8_rate or rate))


# projection


def projection_rows() -> list[Row]:
    """What the paper published, by window."""
    return [
        Row(
            "projection",
            f"{name}, {RANKS} GPUs, window {window}: published {tpf} tokens a forward, {tps:.0f} tokens/s",
            dict.fromkeys(("projected tokens/s", "step ms", "collectives ms", "x published")),
        )
        for name, tpf, tps in PUBLISHED
        for window in WINDOWS
    ]


def project(table: list[Row], steps: list[Row]) -> None:
    """From the engine's measured step of one branch a GPU, prefix 1024."""
    at = [(tpf, tps, window) for _, tpf, tps in PUBLISHED for window in WINDOWS]
    for row, (tpf, tps, window) in zip(table, at, strict=True):
        row.note = "a projection"
        spent = None
        if steps:
            spent = steps[WHOLE.index((BF16, Case(1024, window, 1)))].figures["ms"]
        if spent is None:
            continue
        parts = step(Model(), LINK, Load(RANKS, 1, window, window // 2), RANKS)
        collectives = 1e3 * (parts["all_gather"] + parts["commit"])
        projected = tpf / (spent + collectives) * 1e3
        row.figures |= {
            "projected tokens/s": projected,
            "step ms": spent,
            "collectives ms": collectives,
            "x published": projected / tps,
        }


# telling


def verdict(row: Row) -> tuple[str, str]:
    """The bars, and whether they were met."""
    words = {True: "met", False: "MISSED", None: NOT_MEASURED}
    return "\n".join(str(bar) for bar in row.bars), "\n".join(words[bar.met(row.figures)] for bar in row.bars)


def number(value: float | None) -> str:
    """Four digits, or that there are none."""
    if value is None:
        return NOT_MEASURED
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def show(rows: list[Row], bench: Bench) -> None:
    """The table."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    table = Table(title=f"A step on {device(bench)}; attention, linears, head and rest in milliseconds")
    for name in ("part", "case", *COLUMNS, "besides", "bar", "", "note"):
        whole = not console.is_terminal and name != "note"
        table.add_column(name, justify="right" if name in COLUMNS else "left", no_wrap=whole)
    part = ""
    for row in rows:
        if row.part != part:
            table.add_section()
            part = row.part
        cells = [number(row.figures[name]) if name in row.figures else "" for name in COLUMNS]
        besides = "\n".join(f"{name} {number(value)}" for name, value in row.figures.items() if name not in COLUMNS)
        table.add_row(row.part, row.case, *cells, besides, *verdict(row), row.note)
    console.print(table, bars_table(rows))
    bars = [bar.met(row.figures) for row in rows for bar in row.bars]
    print(f"bars met: {bars.count(True)}, missed: {bars.count(False)}, {NOT_MEASURED}: {bars.count(None)}")


def bars_table(rows: list[Row]) -> Table:
    """Every bar once: the worst figure that was measured for it, and how many cases meet it."""
    held: dict[tuple[str, Bar], list[Row]] = {}
    for row in rows:
        for bar in row.bars:
            held.setdefault((row.part, bar), []).append(row)
    table = Table(title="The bars")
    for name in ("part", "bar", "worst", "cases", "met", "missed", NOT_MEASURED):
        table.add_column(name, justify="left" if name in ("part", "bar") else "right")
    for (part, bar), cases in held.items():
        figures = [figure for row in cases if (figure := row.figures[bar.figure]) is not None]
        worst = (max if bar.at_most else min)(figures, default=None)
        verdicts = [bar.met(row.figures) for row in cases]
        counts = (len(cases), *(verdicts.count(verdict) for verdict in (True, False, None)))
        table.add_row(part, str(bar), number(worst), *map(str, counts))
    return table


def as_json(row: Row) -> dict[str, Any]:
    """A row for JSON."""

    def said(value: float | None) -> float | str:
        return NOT_MEASURED if value is None else value

    figures = {name: said(value) for name, value in row.figures.items()}
    bars = [{**asdict(bar), "met": said(bar.met(row.figures))} for bar in row.bars]
    return {"part": row.part, "case": row.case, "figures": figures, "bars": bars, "note": row.note}


def keep(file: Path, bench: Bench, rows: list[Row], minutes: float, seconds: float) -> None:
    """Write the results."""
    report = {
        **software(bench),
        "minutes": minutes,
        "seconds": round(seconds, 1),
        "rows": [as_json(row) for row in rows],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n")


def device(bench: Bench) -> str:
    """What was measured."""
    return "no GPU" if bench.toy else torch.cuda.get_device_name(bench.device).replace("/", " ")


def software(bench: Bench) -> dict[str, Any]:
    """What was measured, and with what."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = "unknown"
    return {
        "device": device(bench),
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": version("triton") if TRITON else None,
        "transformers": version("transformers"),
    }


if __name__ == "__main__":
    main()
