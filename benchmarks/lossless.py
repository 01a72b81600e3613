"""Check that the causal model writes the same texts with any lookahead, and measure how fast it writes them.

    python -m benchmarks.lossless --part texts                     # 2,000 problems: half an hour
    python -m benchmarks.lossless --part speed                     # 256 problems, 1 to 256 in flight: half an hour
    python -m benchmarks.lossless --part speed --problems 64 --in-flight 1
    python -m benchmarks.lossless --part texts --seed 2 --temperature 0 --decoding "n = 8" --decoding auto
    python -m benchmarks.lossless --part texts --in-flight 4 --in-flight 256 --temperature 0 --decoding "n = 8"

Runs on one thread, with the held-out problems of `--seed`. `texts` compares every text, greedy or sampled, with the one
that is written one token at a time with 64 in flight. `speed` takes medians over `--rounds` rounds, in which the ways
of decoding take turns. `speed` includes the masked model with its best settings, and transformers' `generate`.

`tokens_per_s` is by processor time, which other work on the machine hardly changes, and `wall_tokens_per_s` by the
clock. Writes the results to benchmarks/results/lossless.json.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any

from benchmarks.answers import COLUMNS, answer, load, requests_of
from benchmarks.peer import transformers_texts
from benchmarks.results import Result, replace_rows, show
from lopa_dist.decode import DecodeConfig
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.tasks.embedded import Arithmetic

IN_FLIGHT = (1, 4, 16, 64, 256)
CAUSAL = DecodeConfig(context="causal", drafts=0, max_new_tokens=64)
MASKED = DecodeConfig(drafts=10, block_size=16, max_new_tokens=64)
ONE = "one token at a time"
PEER = "transformers' generate"
LOOKAHEADS: dict[str, dict[str, Any]] = {
    ONE: {},
    **{f"n = {n}": {"drafts": n, "draft_from": "masks"} for n in (1, 2, 4, 8, 16)},
    "n = 8, 8 branches": {"drafts": 8, "branches": 8, "draft_from": "masks"},
    "auto": {"drafts": "auto"},
    "auto, masks": {"drafts": "auto", "draft_from": "masks"},
}
MASKED_SETTINGS: dict[str, dict[str, Any]] = {
    "masked model": {},
    "masked model, one block": {"max_active_blocks": 1},
}
TEMPERATURES = (0.0, 0.7, 1.0)
COMPARED = (8, "auto")  # numbers of drafts that are also compared on sampled texts
SPEEDS = ("tokens_per_s", "wall_tokens_per_s")
KEYS = ("part", "seed", "in_flight", "decoding", "temperature", "dtype")  # identify a row in the file
SHOWN = {
    "decoding": "{decoding}", "in flight": "{in_flight}", **COLUMNS,
    "accepted per forward": "{accepted_per_forward:.2f}", "against transformers": "{against_peer:.2f}",
    "equal": "{equal}",
}  # fmt: skip
Texts = list[list[int]]


def generate(
    builder: EngineBuilder, config: DecodeConfig, in_flight: int, problems: int, seed: int
) -> tuple[Texts, Result]:
    """Answer the first held-out problems of `seed`; return the texts and their figures."""
    task = Arithmetic(problems, "held_out", seed)
    answers = answer(builder, config, task, list(task.items()), in_flight)
    statistics = answers.engine.statistics
    return answers.tokens, answers.figures | {
        "tokens_per_s": answers.total / answers.processor_s,
        "wall_tokens_per_s": answers.total / answers.seconds,
        "accepted_per_forward": statistics.accepted_per_forward(),
        "accepted_share": statistics.accepted_share(),
        "acceptance": [round(share, 4) for share in statistics.acceptance()],
        "chosen": dict(sorted(answers.engine.lookahead.chosen.items())) if config.causal else {},
    }


def equal(texts: Texts, others: Texts) -> int:
    """Return how many texts are the same in both lists."""
    return sum(one == other for one, other in zip(texts, others, strict=True))


def of_precision(arguments: argparse.Namespace) -> dict[str, str]:
    """Return what a row in the file says about the precision: its name, or nothing for fp32."""
    return {} if arguments.dtype == "fp32" else {"dtype": arguments.dtype}


def compare_texts(builder: EngineBuilder, problems: int, arguments: argparse.Namespace) -> None:
    """Compare the texts of every lookahead with those of one token at a time, at several temperatures."""
    precision = of_precision(arguments)
    for temperature in arguments.temperature or TEMPERATURES:
        plain: Texts = []
        rows = []
        for name, in_flight in [(ONE, 64), *product(list(LOOKAHEADS)[1:], arguments.in_flight or [64])]:
            setting = LOOKAHEADS[name]
            usual = not temperature or setting.get("drafts") in COMPARED
            if name != ONE and not (name in arguments.decoding if arguments.decoding else usual):
                continue
            config = replace(CAUSAL, temperature=temperature, **setting)
            texts, figures = generate(builder, config, in_flight, problems, arguments.seed)
            plain = plain or texts
            row = {"seed": arguments.seed, "problems": problems, "part": "texts", "temperature": temperature}
            row |= precision | {"decoding": name, "in_flight": in_flight}
            rows.append(row | figures | {"equal": equal(texts, plain)})
            replace_rows("lossless", rows[-1:], KEYS)
            print(f"{temperature} {name}, {in_flight}: {rows[-1]['equal']} of {problems} equal", flush=True)
        show(f"temperature {temperature:g}, {problems} problems", rows, SHOWN)


def compare_speed(builder: EngineBuilder, most: int, arguments: argparse.Namespace) -> None:
    """Measure the speed of every lookahead, of the masked model and of transformers, with few and many in flight.

    `most` is the number of problems; with one in flight, a quarter of them.
    """
    masked = load(dtype=arguments.dtype)
    ways = {name: (builder, replace(CAUSAL, **setting)) for name, setting in LOOKAHEADS.items()}
    ways |= {name: (masked, replace(MASKED, **setting)) for name, setting in MASKED_SETTINGS.items()}
    if arguments.decoding:
        ways = {name: way for name, way in ways.items() if name in (ONE, *arguments.decoding)}
    items = list(Arithmetic(most, "held_out", arguments.seed).items())
    requests = requests_of(items, builder.tokenizer, CAUSAL.max_new_tokens)
    for in_flight in arguments.in_flight or IN_FLIGHT:
        problems = max(most if in_flight > 1 else most // 4, in_flight)
        texts: dict[str, Texts] = {}
        rounds: dict[str, list[Result]] = {name: [] for name in ways}
        peers: list[float] = []
        for _ in range(arguments.rounds):
            texts[PEER], seconds = transformers_texts(builder.load(warn=False), requests[:problems], in_flight)
            peers.append(sum(map(len, texts[PEER])) / seconds)
            for name, (model, config) in ways.items():
                texts[name], figures = generate(model, config, in_flight, problems, arguments.seed)
                rounds[name].append(figures)
        rows = []
        for name, results in rounds.items():
            row = {"seed": arguments.seed, "problems": problems, "part": "speed", "in_flight": in_flight}
            row |= of_precision(arguments)
            row |= {"decoding": name, **results[-1], **{key: median(r[key] for r in results) for key in SPEEDS}}
            rows.append(row | ({"equal": equal(texts[name], texts[ONE])} if name in LOOKAHEADS else {}))
        speed = median(peers)
        for row in rows:
            row["against_peer"] = row["tokens_per_s"] / speed
        peer = {key: rows[0][key] for key in KEYS if key in rows[0]} | {"decoding": PEER, "problems": problems}
        peer |= {"tokens_per_s": speed, "equal": equal(texts[PEER], texts[ONE])}
        replace_rows("lossless", [peer, *rows], KEYS)
        print(f"{PEER}: {speed:.0f} tokens/s, {peer['equal']} texts equal")
        show(f"{in_flight} in flight, {problems} problems, medians of {arguments.rounds} rounds", rows, SHOWN)


def main() -> None:
    """Measure the part that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("texts", "speed"), default="texts")
    parser.add_argument("--problems", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-flight", type=int, action="append", help=f"may be repeated ({IN_FLIGHT}; 64 for texts)")
    decodings = [name for name in (*LOOKAHEADS, *MASKED_SETTINGS) if name != ONE]
    parser.add_argument(
        "--decoding", action="append", choices=decodings, help="beside one token at a time; may be repeated (all)"
    )
    parser.add_argument("--temperature", type=float, action="append", help=f"may be repeated ({TEMPERATURES})")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of all models, transformers' too")
    arguments = parser.parse_args()
    builder = load("causal", dtype=arguments.dtype)
    gc.collect()
    gc.freeze()  # as jobs do
    if arguments.part == "texts":
        compare_texts(builder, arguments.problems or 2000, arguments)
    else:
        compare_speed(builder, arguments.problems or 256, arguments)


if __name__ == "__main__":
    main()
