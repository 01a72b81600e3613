"""Whether the causal model's texts stay the same whatever it looks ahead, and how fast they come.

    python -m benchmarks.lossless --part texts                     # 2,000 problems: half an hour
    python -m benchmarks.lossless --part speed                     # 256 problems, 1 to 256 in flight: half an hour
    python -m benchmarks.lossless --part speed --problems 64 --in-flight 1
    python -m benchmarks.lossless --part texts --seed 2 --temperature 0 --decoding "n = 8" --decoding auto
    python -m benchmarks.lossless --part texts --in-flight 4 --in-flight 256 --temperature 0 --decoding "n = 8"

On one thread, with the held-out problems of `--seed`. `texts` compares every text with that of one token at a time with
64 in flight, greedy and sampled. In `speed` the ways of decoding take turns, in `--rounds` rounds whose medians count,
and the masked model with its best settings takes part. Seconds are those of the processor, which other work beside it
hardly changes; `wall_tokens_per_s` is by the clock. Results go to benchmarks/results/lossless.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.embedded import RESULTS, requests_of
from lopa_dist.config import ModelOptions
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.tasks.embedded import Arithmetic

IN_FLIGHT = (1, 4, 16, 64, 256)
CAUSAL = DecodeConfig(context="causal", drafts=0, max_new_tokens=64)
MASKED = DecodeConfig(drafts=10, block_size=16, max_new_tokens=64)
LOOKAHEADS: dict[str, dict[str, Any]] = {
    "one token at a time": {},
    **{f"n = {n}": {"drafts": n} for n in (1, 2, 4, 8, 16)},
    "n = 8, 8 branches": {"drafts": 8, "branches": 8},
    "auto": {"drafts": "auto"},
}
MASKED_SETTINGS: dict[str, dict[str, Any]] = {
    "masked model": {},
    "masked model, one block": {"max_active_blocks": 1},
}
TEMPERATURES = (0.0, 0.7, 1.0)
Found = dict[str, Any]


def generate(builder: EngineBuilder, config: DecodeConfig, in_flight: int, problems: int, seed: int) -> Found:
    """Answer the problems; returns the texts and what is counted of them."""
    task = Arithmetic(problems, "held_out", seed)
    items = list(task.items())
    requests = requests_of(items, builder.tokenizer, config.max_new_tokens)
    engine = builder.engine(config, EngineConfig(in_flight))
    began, clock = time.process_time(), time.perf_counter()
    done = sorted(engine.generate(requests), key=lambda generation: generation.request.index)
    seconds, wall = time.process_time() - began, time.perf_counter() - clock
    texts = [generation.tokens for generation in done]
    tokens, statistics = sum(map(len, texts)), engine.statistics
    scores = [task.score(item, builder.tokenizer.decode(text)) for item, text in zip(items, texts, strict=True)]
    right = [bool(score.correct) for score in scores]
    return {
        "texts": texts,
        "accuracy": sum(right) / len(right),
        "tokens_per_s": tokens / seconds,
        "wall_tokens_per_s": tokens / wall,
        "tpf": tokens / statistics.forwards,
        "rows_per_token": statistics.rows / tokens,
        "accepted_per_forward": statistics.accepted_per_forward(),
        "accepted_share": statistics.accepted_share(),
        "acceptance": [round(share, 4) for share in statistics.acceptance()],
        "chosen": dict(sorted(engine.lookahead.chosen.items())) if config.causal else {},
    }


def texts(builder: EngineBuilder, arguments: argparse.Namespace) -> None:
    """Compare ways of looking ahead with one token at a time, at several temperatures."""
    rows = []
    for temperature in arguments.temperature or TEMPERATURES:
        plain: list[list[int]] = []
        for in_flight in arguments.in_flight or [64]:
            found = {}
            for name, setting in LOOKAHEADS.items():
                drafts = setting.get("drafts")
                if drafts is None:
                    wanted = not plain
                elif arguments.decoding:
                    wanted = name in arguments.decoding
                else:
                    wanted = not temperature or drafts in (8, "auto")
                if not wanted:
                    continue
                config = replace(CAUSAL, temperature=temperature, **setting)
                result = generate(builder, config, in_flight if plain else 64, arguments.problems, arguments.seed)
                written = result.pop("texts")
                plain = plain or written
                result["equal"] = sum(one == other for one, other in zip(written, plain, strict=True))
                found[name] = result
                ran = {"part": "texts", "decoding": name, "temperature": temperature}
                rows.append(ran | {"in_flight": in_flight if drafts is not None else 64, **result})
                keep(rows, arguments)
                print(f"{temperature} {name}, {in_flight}: {result['equal']} of {len(plain)} equal", flush=True)
            show(f"temperature {temperature:g}, {arguments.problems} problems, {in_flight} in flight", found)


def speed(builder: EngineBuilder, arguments: argparse.Namespace) -> None:
    """Time every way of looking ahead, and the masked model, with few and many sequences in flight."""
    masked = EngineBuilder(ModelOptions(dtype="fp32"), torch.device("cpu"))
    masked.load(warn=False)
    ways = {name: (builder, replace(CAUSAL, **setting)) for name, setting in LOOKAHEADS.items()}
    ways |= {name: (masked, replace(MASKED, **setting)) for name, setting in MASKED_SETTINGS.items()}
    if arguments.decoding:
        ways = {name: way for name, way in ways.items() if name in ("one token at a time", *arguments.decoding)}
    rows = []
    for in_flight in arguments.in_flight or IN_FLIGHT:
        problems = max(arguments.problems if in_flight > 1 else arguments.problems // 4, in_flight)
        rounds: dict[str, list[Found]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, (of, config) in ways.items():
                rounds[name].append(generate(of, config, in_flight, problems, arguments.seed))
        found = {}
        plain = rounds["one token at a time"][0]["texts"]
        for name, results in rounds.items():
            speeds = ("tokens_per_s", "wall_tokens_per_s")
            found[name] = results[-1] | {key: median(result[key] for result in results) for key in speeds}
            written = found[name].pop("texts")
            if name in LOOKAHEADS:
                found[name]["equal"] = sum(one == other for one, other in zip(written, plain, strict=True))
            rows.append(
                {"part": "speed", "decoding": name, "in_flight": in_flight, "problems": problems, **found[name]}
            )
        keep(rows, arguments)
        show(f"{in_flight} in flight, {problems} problems, medians of {arguments.rounds} rounds", found)


def show(title: str, found: dict[str, Found]) -> None:
    """Print one table."""
    table = Table("decoding", "tokens/s", "accuracy", "tokens a forward", "rows a token", "accepted", title=title)
    for name, r in found.items():
        table.add_row(
            name, f"{r['tokens_per_s']:.0f}", f"{r['accuracy']:.1%}", f"{r['tpf']:.2f}", f"{r['rows_per_token']:.1f}",
            f"{r['accepted_per_forward']:.2f}",
        )  # fmt: skip
    Console(width=100).print(table)


def main() -> None:
    """Measure, print, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("texts", "speed"), default="texts")
    parser.add_argument("--problems", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-flight", type=int, action="append", help=f"may be repeated ({IN_FLIGHT}; 64 for texts)")
    parser.add_argument("--decoding", action="append", help="beside one token at a time; may be repeated (all)")
    parser.add_argument("--temperature", type=float, action="append", help=f"may be repeated ({TEMPERATURES})")
    arguments = parser.parse_args()
    arguments.problems = arguments.problems or {"texts": 2000, "speed": 256}[arguments.part]
    torch.set_num_threads(1)
    builder = EngineBuilder(ModelOptions(path="causal", dtype="fp32"), torch.device("cpu"))
    builder.load(warn=False)
    (texts if arguments.part == "texts" else speed)(builder, arguments)


def keep(rows: list[Found], arguments: argparse.Namespace) -> None:
    """Write the rows so far, in place of older ones of the same setting."""
    file = RESULTS / "lossless.json"
    older = json.loads(file.read_text())["rows"] if file.exists() else []

    def setting(row: Found) -> tuple[Any, ...]:
        return tuple(row.get(key) for key in ("part", "seed", "in_flight", "decoding", "temperature"))

    rows = [{"seed": arguments.seed, "problems": arguments.problems, **row} for row in rows]
    new = {setting(row) for row in rows}
    kept = [row for row in older if setting(row) not in new]
    machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    RESULTS.mkdir(exist_ok=True)
    file.write_text(json.dumps(machine | {"rows": kept + rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
