"""Measure what drafts from text gain for a causal model, on prompts that it was trained for and on foreign ones.

    python -m benchmarks.text_drafts                                        # all kinds of prompts, 2,048 of each
    python -m benchmarks.text_drafts --kind shuffled --drafts 8             # tokens per forward with 8 drafts
    python -m benchmarks.text_drafts --kind own --in-flight 1 --problems 512 --rounds 3
    python -m benchmarks.text_drafts --model my/autoregressive/checkpoint   # a model with drafts from text only
    python -m benchmarks.text_drafts --kind own --drafts 8 --in-flight 1 --in-flight 64 --exposed --problems 512

Runs on one thread. The kinds of prompts are: *own*, word problems of the kind that the package's model was trained on;
*shuffled*, the same with the words of each question in random order; *samples*, the word problems again, with eight
answers to each, sampled at temperature 0.7; and *random*, random tokens, with answers sampled at temperature 1.5, so
that nothing repeats.

Every text is compared with the one that is written one token at a time. `later` is the tokens per forward of the second
half of the prompts, when the table holds the first half's answers. Seconds are processor time; they are medians over
the rounds, in each of which the ways take turns. Writes the results to benchmarks/results/text_drafts.json.

With `--exposed`, measures instead for how many milliseconds of a step a GPU would wait for the host, also in processor
time (`benchmarks.exposed`), and writes them to text_drafts_exposed.json beside it.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any

from benchmarks.answers import load, requests_of
from benchmarks.host_time import exposed, generate
from benchmarks.results import Result, replace_rows, show
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.draft_kinds import SOURCES
from lopa_dist.engine.request import Request, request_key
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.tasks.embedded import Arithmetic

KINDS = ("own", "shuffled", "samples", "random")
PLAIN: dict[str, Any] = {"drafts": 0}
CAUSAL = DecodeConfig(context="causal", max_new_tokens=64, drafts=0)
SAMPLES = 8  # samples of each prompt
TEMPERATURES = {"samples": 0.7, "random": 1.5}
KEYS = ("model", "kind", "in_flight", "drafts", "draft_from", "problems")  # identify a row in the file
SHOWN = {
    "kind": "{kind}", "in flight": "{in_flight}", "drafts": "{drafts}", "from": "{draft_from}",
    "tokens per forward": "{tpf:.2f}", "later": "{later:.2f}", "rows per token": "{rows_per_token:.2f}",
    "processor s": "{processor_s:.1f}", "against one at a time": "{against:.2f}", "equal": "{equal}",
}  # fmt: skip
EXPOSED = {
    "kind": "{kind}", "in flight": "{in_flight}", "drafts": "{drafts}", "from": "{draft_from}",
    "exposed ms": "{exposed_ms:.3f}", "more than one at a time": "{added_ms:.3f}",
}  # fmt: skip


def prompts(builder: EngineBuilder, kind: str, problems: int) -> list[Request]:
    """Return `problems` requests of a kind, each with its own key of random numbers."""
    rng = random.Random(7)
    if kind == "random":
        ids = range(builder.shape.vocab_size)
        usual = [token for token in ids if token not in (builder.shape.mask_id, *builder.shape.eos_ids)]
        return [
            Request(i, rng.choices(usual, k=rng.randrange(8, 40)), CAUSAL.max_new_tokens, request_key(0, str(i)))
            for i in range(problems)
        ]
    items = list(Arithmetic(problems // (SAMPLES if kind == "samples" else 1), "held_out", 1).items())
    if kind == "shuffled":
        for number, item in enumerate(items):
            assert item.messages
            words = item.messages[0]["content"].split(" ")
            rng.shuffle(words)
            items[number] = replace(item, messages=[{"role": "user", "content": " ".join(words)}])
    found = requests_of(items, builder.tokenizer, CAUSAL.max_new_tokens)
    if kind == "samples":
        pairs = product(found, range(SAMPLES))
        return [replace(one, index=i, key=one.key + sample) for i, (one, sample) in enumerate(pairs)]
    return found


def run(builder: EngineBuilder, config: DecodeConfig, requests: list[Request], in_flight: int) -> tuple[Any, Result]:
    """Answer the requests with `in_flight` in flight; return the texts and their figures."""
    engine = builder.engine(config, EngineConfig(in_flight))
    processor = time.process_time()
    done = sorted(engine.generate(requests), key=lambda one: one.request.index)
    seconds = time.process_time() - processor
    tokens, statistics = sum(len(one.tokens) for one in done), engine.statistics
    later = done[len(done) // 2 :]
    accepted, verified = statistics.accepted_from, statistics.verified_from
    return [one.tokens for one in done], {
        "tokens": tokens,
        "tpf": tokens / statistics.forwards,
        "later": sum(len(one.tokens) for one in later) / sum(one.forwards for one in later),
        "rows_per_token": statistics.rows / tokens,
        "processor_s": seconds,
        "acceptance": [round(share, 4) for share in statistics.acceptance()],
        "sources": {name: [accepted[i], verified[i]] for i, name in enumerate(SOURCES) if verified[i]},
        "masks": dict(sorted(engine.lookahead.chosen.items())),
    }


def measure_exposed(
    builder: EngineBuilder, model: str, kind: str, in_flight: int, arguments: argparse.Namespace
) -> None:
    """Measure the host's time that a GPU would wait for, with a number of drafts; the arguments are as in `measure`."""
    requests = prompts(builder, kind, arguments.problems)
    ways = ways_of(builder, [n for n in arguments.drafts if n != "auto"])
    configs = [replace(CAUSAL, temperature=TEMPERATURES.get(kind, 0.0), **way) for way in ways]
    records = [generate(builder, config, in_flight, requests, [])[1] for config in configs]
    rounds = [
        [
            median(exposed(builder, config, in_flight, requests, own))
            for config, own in zip(configs, records, strict=True)
        ]
        for _ in range(arguments.rounds)
    ]
    rows = []
    for way, times in zip(ways, zip(*rounds, strict=True), strict=True):
        row = {"model": model, "kind": kind, "in_flight": in_flight, "problems": len(requests), "draft_from": ""} | way
        added = median(time - plain[0] for time, plain in zip(times, rounds, strict=True))
        rows.append(row | {"exposed_ms": median(times), "added_ms": added})
    replace_rows("text_drafts_exposed", rows, KEYS)
    show(f"{model}, {kind}, {in_flight} in flight, {len(requests)} prompts", rows, EXPOSED)


def ways_of(builder: EngineBuilder, drafts: list[Any]) -> list[dict[str, Any]]:
    """Return the ways that are compared: one token at a time, then each number of drafts from each source."""
    sources = ("masks", "text", "auto") if builder.shape.has_mask else ("text",)
    return [PLAIN, *({"drafts": n, "draft_from": source} for n in drafts for source in sources)]


def measure(builder: EngineBuilder, model: str, kind: str, in_flight: int, arguments: argparse.Namespace) -> None:
    """Measure one kind of prompts with `in_flight` in flight; write and print the results.

    `model` is the name of the model in the file.
    """
    requests = prompts(builder, kind, arguments.problems)
    ways = ways_of(builder, arguments.drafts)
    rounds: list[list[Result]] = [[] for _ in ways]
    texts: list[Any] = [None] * len(ways)
    for _ in range(arguments.rounds):
        for number, way in enumerate(ways):
            config = replace(CAUSAL, temperature=TEMPERATURES.get(kind, 0.0), **way)
            texts[number], figures = run(builder, config, requests, in_flight)
            rounds[number].append(figures)
    rows = []
    for way, found, results in zip(ways, texts, rounds, strict=True):
        row = {"model": model, "kind": kind, "in_flight": in_flight, "problems": len(requests), "draft_from": ""} | way
        against = median(a["processor_s"] / b["processor_s"] for a, b in zip(results, rounds[0], strict=True))
        row |= results[-1] | {"processor_s": median(one["processor_s"] for one in results), "against": against}
        row["equal"] = sum(a == b for a, b in zip(found, texts[0], strict=True))
        rows.append(row)
    replace_rows("text_drafts", rows, KEYS)
    show(f"{model}, {kind}, {in_flight} in flight, {len(requests)} prompts, {arguments.rounds} rounds", rows, SHOWN)


def main() -> None:
    """Measure all cases that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="causal", help="a checkpoint of a causal model that knows the word problems")
    parser.add_argument("--name", help="of the model in the file; its path unless told otherwise")
    parser.add_argument("--kind", action="append", choices=KINDS, help="may be repeated; all")
    parser.add_argument("--in-flight", type=int, action="append", help="may be repeated; 64")
    parser.add_argument("--drafts", action="append", help="numbers, or auto; may be repeated; 8 and auto")
    parser.add_argument("--problems", type=int, default=2048, help="prompts, or answers where they are sampled")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--exposed", action="store_true", help="measure the host's exposed time instead")
    arguments = parser.parse_args()
    arguments.drafts = [int(n) if n.isdigit() else n for n in arguments.drafts or ("8", "auto")]
    builder = load(arguments.model)
    for kind, in_flight in product(arguments.kind or KINDS, arguments.in_flight or (64,)):
        (measure_exposed if arguments.exposed else measure)(
            builder, arguments.name or arguments.model, kind, in_flight, arguments
        )


if __name__ == "__main__":
    main()
