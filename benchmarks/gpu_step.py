"""How far a step is from what this GPU can do: one program, one table, some 8 minutes on one H200.

    python -m benchmarks.gpu_step [--minutes 8] [--part machine|step|eager|attention|gemm|projection]... [--toy]

Random weights of Dream-7B's and LLaDA-8B's shapes, made on the device, one model in memory at a time; no checkpoint is
needed. Parts:

- machine: the bandwidth of a copy and of a read, the rate of a bf16 and of an fp8 product. Floors come from these.
- step: the body's and the head's CUDA graphs, by prefix, window, branches and precision: milliseconds a step, bytes and
  operations a second, the roofline floor (`roofline`), how many times it, and where the time goes. Attention, linears
  and head are graphs of their own over all layers; rest is what the step takes more than these: embedding, norms,
  rotation, gates, and the gaps between kernels.
- eager: a whole step of ours, the host's preparation included, beside transformers' Qwen2 on the same weights, with
  branches as batch rows and the head on the same positions.
- attention: see `gpu_attention`. gemm: see `gpu_gemm`.
- projection: tokens a second that the paper's tokens per forward would give with the measured step, on as many GPUs as
  branches, with collectives as `latency_model` has them; beside the published tokens a second. A projection, no
  measurement: the host's time between steps and the link's constants are assumptions.

What matters most is measured first; from the deadline on nothing new is begun. Results are kept in
benchmarks/results/gpu_step-<device>.json. Without a GPU, or with --toy, tiny shapes run through the same code on the
CPU: it shows that the program works, and every figure is "not measured". The bars say what we hold ourselves to:

- bf16, one branch, window up to 96: at most 1.25 x floor. fp8: 1.5 x its floor. 8 branches of window 64: 1.35 x.
- 4 x faster than eager.
- Attention: 1.5 x faster than padded SDPA with branches as batch rows (LLaDA's heads), and never below 0.9 x of the
  best that torch has. Products of virtually padded rows: no bucket slower than the library with real padding.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import gpu_attention, gpu_gemm
from benchmarks.gpu_bench import Bench, Row
from benchmarks.latency_model import Link, Load, Model, step
from benchmarks.roofline import BF16, DREAM, FP8, MODELS, Bar, Case, Deadline, Machine, ratio, step_bar, work
from lopa_dist.decode import DecodeConfig
from lopa_dist.decode.layout import Batch
from lopa_dist.engine.buckets import bucket
from lopa_dist.engine.kv_pool import KVPool
from lopa_dist.engine.profile import windows
from lopa_dist.engine.runners import FUSED, Runners
from lopa_dist.engine.static_runner import StaticRunner
from lopa_dist.kernels.attention import attend_tiles
from lopa_dist.kernels.dispatch import TRITON
from lopa_dist.kernels.quantized import FP8 as FP8_DTYPE
from lopa_dist.kernels.record_head import Sampling
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.quantize import quantize
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo

RESULTS = Path(__file__).parent / "results"
PARTS = ("machine", "step", "eager", "attention", "gemm", "projection")
PREFIXES, WINDOWS, BRANCHES = (256, 1024, 2048), (32, 64, 96), (1, 2, 4, 8)
COLUMNS = ("ms", "floor ms", "x floor", "TB/s", "TFLOP/s", "attention", "linears", "head", "rest")
CASES = [Case(p, w, b) for p in PREFIXES for w in WINDOWS for b in BRANCHES]
STEPS = [(model, precision, case) for model in MODELS for precision in (BF16, FP8) for case in CASES]
EAGER = [Case(1024, 32, 1), Case(1024, 96, 1), Case(1024, 64, 8)]
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
    parser.add_argument("--minutes", type=float, default=8.0, help="nothing new is begun after so many")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--toy", action="store_true", help="tiny shapes on the CPU, which measure nothing")
    options = parser.parse_args(arguments)
    began, parts = time.monotonic(), options.part or list(PARTS)
    toy = options.toy or not torch.cuda.is_available()
    bench = Bench(torch.device("cpu" if toy else "cuda"), Deadline(options.minutes))
    torch.manual_seed(0)

    tables = make_rows(parts)
    products: list[dict[str, Any]] = []
    machine_part(bench, tables.get("machine", machine_rows()))
    model_parts(bench, "Dream-7B", tables)
    if "attention" in parts:
        with torch.inference_mode():
            gpu_attention.run(bench, tables["attention"], small)
    model_parts(bench, "LLaDA-8B", tables)
    if "gemm" in parts:
        with torch.inference_mode():
            gpu_gemm.run(bench, tables["gemm"], small, products)
    if "projection" in parts:
        project(tables["projection"], tables.get("step", []))

    rows = [row for part in PARTS if part in parts for row in tables[part]]
    if bench.deadline.over():
        for row in rows:
            row.note = row.note or ("" if any(row.figures.values()) else "deadline")
    show(rows, bench)
    if toy:
        print("No GPU was measured: tiny shapes ran on the CPU, and nothing was written.")
        return
    print(f"written to {keep(bench, rows, products, options.minutes, time.monotonic() - began)}")


def make_rows(parts: Iterable[str]) -> dict[str, list[Row]]:
    """All rows of the table, with nothing measured."""
    makers: dict[str, Callable[[], list[Row]]] = {
        "machine": machine_rows,
        "step": step_rows,
        "eager": eager_rows,
        "attention": gpu_attention.rows,
        "gemm": gpu_gemm.rows,
        "projection": projection_rows,
    }
    return {part: makers[part]() for part in parts}


def small(config: ModelConfig) -> ModelConfig:
    """A toy of a model's shape."""
    return replace(
        config, vocab_size=512, hidden_size=64, layers=2, heads=4, kv_heads=max(4 * config.kv_heads // config.heads, 2),
        head_dim=16, intermediate_size=96, mask_id=511, eos_ids=(510,), pad_id=510,
    )  # fmt: skip


def random_model(config: ModelConfig, device: torch.device) -> Transformer:
    """A model of bf16 noise, made where it is to be."""
    with torch.device("meta"):
        model = Transformer(config)
    model = model.to(torch.bfloat16).to_empty(device=device)
    for name, parameter in model.named_parameters():
        parameter.data.fill_(1) if "norm" in name else parameter.data.normal_(0, 0.02)
    return model.requires_grad_(False).eval()


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
    free(bench)
    bandwidths = [row.figures["TB/s"] or 0.0 for row in table[:2]]
    rate, fp8_rate = (row.figures["TFLOP/s"] or 0.0 for row in table[2:])
    if max(bandwidths) and rate:
        bench.machine = Machine(1e12 * max(bandwidths), 1e12 * rate, 1e12 * (fp8_rate or rate))


def free(bench: Bench) -> None:
    """Give the device's memory back."""
    gc.collect()
    if not bench.toy:
        torch.cuda.empty_cache()


# step


def step_rows() -> list[Row]:
    """Every step."""
    rows = []
    for model, precision, case in STEPS:
        bar = step_bar(precision, case)
        name = f"{model} {precision}, prefix {case.prefix}, {case.branches} x {case.window} rows"
        rows.append(Row("step", name, dict.fromkeys(COLUMNS), [] if bar is None else [bar]))
    return rows


def importance(case: Case) -> tuple[bool, bool]:
    """Sorts steps: those with a bar in bf16 first, and the usual prefix."""
    return step_bar(BF16, case) is None, case.prefix != 1024


def model_parts(bench: Bench, name: str, tables: dict[str, list[Row]]) -> None:
    """All that needs one model: its steps in bf16, eager's, and its steps in fp8."""
    if not {"step", "eager"} & set(tables) or bench.deadline.over():
        return
    config = MODELS[name]
    shape = small(config) if bench.toy else config
    model = random_model(shape, bench.device)
    for precision in (BF16, FP8):
        if precision == FP8 and "step" in tables:
            FUSED.pop(model, None)
            quantize(model, "fp8")
        for case in sorted(CASES, key=importance):
            if "step" in tables:
                row = tables["step"][STEPS.index((name, precision, case))]
                bench.fill(row, partial(measure_step, bench, model, config, precision, case))
        if precision == BF16 and config is DREAM and "eager" in tables:
            eager_part(bench, model, tables["eager"])
    FUSED.pop(model, None)
    del model
    free(bench)


def toy_case(case: Case) -> Case:
    """A step for a toy model."""
    return Case(case.prefix // 16, case.window // 8, case.branches)


def prepare(bench: Bench, model: Transformer, case: Case) -> tuple[StaticRunner, Batch]:
    """A static runner over a pool of noise, and a batch of branches of one sequence."""
    config = DecodeConfig(branches=case.branches - 1, block_size=case.window, max_active_blocks=1)
    pool = KVPool(model.config, 1, case.prefix, torch.bfloat16, bench.device)
    pool.allocate(0, case.prefix)
    pool.reserve(bucket(case.rows) or case.rows)
    pool.keys.normal_()
    pool.values.normal_()
    runner = Runners(model, config, "meta", "always", Solo()).make(pool, Sampling(), 1, case.prefix)
    assert isinstance(runner, StaticRunner)
    batch = windows(case.branches, case.window, model.config.mask_id, bench.device)
    positions = case.prefix + torch.arange(case.window, device=bench.device).repeat(case.branches)
    return runner, replace(batch, shared=np.full(case.branches, case.prefix), positions=positions)


def measure_step(bench: Bench, model: Transformer, config: ModelConfig, precision: str, case: Case, row: Row) -> None:
    """One step and its parts."""
    needed = work(config, precision, case)
    runner, batch = prepare(bench, model, toy_case(case) if bench.toy else case)
    with torch.inference_mode():
        runner.forward(runner.prepare(batch))
        size = bucket(len(batch.tokens)) or 0
        body, head = runner.bodies[size], runner.heads[bucket(len(batch.head_rows)) or 0]
        body_replay = partial(body.replay, partial(body.run, runner), bench.device, runner.memory)
        head_replay = partial(head.replay, partial(head.run, runner), bench.device, runner.memory)

        def whole() -> None:
            body_replay()
            head_replay()

        network, pool = runner.network, runner.pool
        shape = model.config
        made = torch.empty(size, shape.hidden_size, dtype=torch.bfloat16, device=bench.device).normal_()
        between = made.new_empty(size, shape.intermediate_size).normal_()
        q = made.new_empty(size, shape.heads, shape.head_dim).normal_()

        def attention() -> None:
            for number in range(shape.layers):
                attend_tiles(q, pool.keys[number], pool.values[number], body.plan)

        def linears() -> None:
            for layer in network.layers:
                network.project(layer.qkv, made, body.rows)
                network.project(layer.out, q.flatten(1), body.rows)
                network.project(layer.gate_up, made, body.rows)
                network.project(layer.down, between, body.rows)

        spent = bench.replays(whole)
        parts = {
            "attention": bench.graph(attention),
            "linears": bench.graph(linears),
            "head": bench.replays(head_replay),
        }
    floor = None if bench.machine is None else 1e3 * needed.floor(bench.machine, precision)
    row.figures |= parts
    row.figures |= {
        "ms": spent,
        "floor ms": floor,
        "x floor": ratio(spent, floor),
        "TB/s": ratio(needed.bytes / 1e9, spent),
        "TFLOP/s": ratio(needed.flops / 1e9, spent),
        "rest": None if spent is None else spent - sum(t for t in parts.values() if t is not None),
    }


# eager


def eager_rows() -> list[Row]:
    """Steps that transformers takes, too."""
    names = ("ms", "eager ms", "x eager")
    return [
        Row(
            "eager", f"Dream-7B bf16, prefix {c.prefix}, {c.branches} x {c.window} rows, host included",
            dict.fromkeys(names), [Bar("x eager", 4, False)],
        )
        for c in EAGER
    ]  # fmt: skip


def eager_part(bench: Bench, model: Transformer, table: list[Row]) -> None:
    """Both, one after the other, on the same weights."""
    made: list[Any] = []

    def measure(case: Case, row: Row) -> None:
        if not made:
            made.append(qwen2(model, bench.device))
        case = toy_case(case) if bench.toy else case
        runner, batch = prepare(bench, model, case)
        with torch.inference_mode():
            ours = bench.wall(lambda: runner.forward(runner.prepare(batch)))
            theirs = bench.wall(eager_step(made[0], model.config, case, bench.device))
        row.figures |= {"ms": ours, "eager ms": theirs, "x eager": ratio(theirs, ours)}

    for row, case in zip(table, EAGER, strict=True):
        bench.fill(row, partial(measure, case))


def qwen2(model: Transformer, device: torch.device) -> Any:
    """Qwen2 of transformers, with a model's weights: the same memory."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    shape = model.config
    config = Qwen2Config(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, rms_norm_eps=shape.rms_eps, rope_theta=shape.rope_theta, tie_word_embeddings=False,
        attn_implementation="sdpa", pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        made = Qwen2ForCausalLM(config).to(torch.bfloat16)
    made.load_state_dict(model.state_dict(), assign=True)
    made.model.rotary_emb = Qwen2RotaryEmbedding(config=config).to(device)
    return made.requires_grad_(False).eval()


def eager_step(model: Any, shape: ModelConfig, case: Case, device: torch.device) -> Callable[[], object]:
    """A step as plain code takes it: branches as batch rows, logits of every other position, their records."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer in range(shape.layers):
        k, v = (
            torch.empty(case.branches, shape.kv_heads, case.prefix, shape.head_dim, dtype=torch.bfloat16, device=device)
            for _ in range(2)
        )
        cache.update(k.normal_(), v.normal_(), layer)
    tokens = torch.full((case.branches, case.window), shape.mask_id, device=device)
    positions = (case.prefix + torch.arange(case.window, device=device)).expand(case.branches, -1)
    mask = torch.zeros(
        case.branches, 1, case.window, case.prefix + case.window, dtype=torch.bfloat16, device=device
    )  # fmt: skip
    wanted = torch.arange(0, case.window, 2, device=device)

    def run() -> Tensor:
        found = model(
            input_ids=tokens, position_ids=positions, past_key_values=cache, attention_mask=mask, use_cache=True,
            logits_to_keep=wanted,
        )  # fmt: skip
        cache.crop(-case.window)
        probabilities = found.logits.float().softmax(-1)
        confidence, token = probabilities.max(-1)
        entropy = (probabilities * (probabilities + 1e-10).log()).sum(-1)
        return torch.stack([token.float(), confidence, entropy])

    return run


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
    """From the measured step of one branch a GPU, prefix 1024."""
    at = [(tpf, tps, window) for _, tpf, tps in PUBLISHED for window in WINDOWS]
    for row, (tpf, tps, window) in zip(table, at, strict=True):
        row.note = "a projection"
        spent = None
        if steps:
            spent = steps[STEPS.index(("Dream-7B", BF16, Case(1024, window, 1)))].figures["ms"]
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
    device = "no GPU" if bench.toy else torch.cuda.get_device_name(bench.device)
    table = Table(title=f"A step on {device}; attention, linears, head and rest in milliseconds")
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
    console.print(table)
    bars = [bar.met(row.figures) for row in rows for bar in row.bars]
    print(f"bars met: {bars.count(True)}, missed: {bars.count(False)}, {NOT_MEASURED}: {bars.count(None)}")


def told(row: Row) -> dict[str, Any]:
    """A row for JSON."""
    bars = [{**asdict(bar), "met": bar.met(row.figures)} for bar in row.bars]
    return {"part": row.part, "case": row.case, "figures": row.figures, "bars": bars, "note": row.note}


def keep(bench: Bench, rows: list[Row], products: list[dict[str, Any]], minutes: float, seconds: float) -> Path:
    """Write the results, and say where."""
    report = {
        **software(bench),
        "minutes": minutes,
        "seconds": round(seconds, 1),
        "rows": [told(row) for row in rows],
        "products": products,
    }
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"gpu_step-{'-'.join(report['device'].replace('/', ' ').split())}.json"
    file.write_text(json.dumps(report, indent=1) + "\n")
    return file


def software(bench: Bench) -> dict[str, Any]:
    """What was measured, and with what."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = "unknown"
    return {
        "device": torch.cuda.get_device_name(bench.device),
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": version("triton") if TRITON else None,
        "transformers": version("transformers"),
    }


if __name__ == "__main__":
    main()
