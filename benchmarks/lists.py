"""Accuracy of a list model by family, and its tokens per forward, under plain decodings and the control.

    python -m benchmarks.lists                                  # 400 held-out problems a setting
    python -m benchmarks.lists --model outputs/lists/checkpoint --problems 80 --only plain
    python -m benchmarks.lists --output outputs/lists/accuracy.json

Counting is as in `benchmarks.embedded`: tokens up to the first EOS, every forward of a sequence, prefill included.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.embedded import LEFT_TO_RIGHT, requests_of
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Generation
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.files import find
from lopa_dist.models.tokenizer import load_tokenizer
from lopa_dist.parallel.communicator import Solo
from lopa_dist.tasks.list_problems import FAMILIES, LENGTHS
from lopa_dist.tasks.lists import Lists

BASE: dict[str, Any] = {"block_size": 16, "max_new_tokens": 128, "branches": 0, "tau_conf": 0.9}
SETTINGS: dict[str, dict[str, Any]] = {
    "left to right": dict(LEFT_TO_RIGHT),
    "plain": {},
    "control 1": {"extra_fill": 1},
    "control 2": {"extra_fill": 2},
}


def figures(done: Sequence[tuple[Generation, bool]]) -> dict[str, float]:
    """Of finished requests and whether they are right."""
    tokens, forwards = sum(len(g.tokens) for g, _ in done), sum(g.forwards for g, _ in done)
    return {"problems": len(done), "accuracy": sum(right for _, right in done) / len(done), "tpf": tokens / forwards}


def measure(folder: Path, setting: dict[str, Any], problems: int, seed: int) -> dict[str, Any]:
    """Run one setting; `figures` of all problems, of each family, and of lists by their number of items."""
    config = DecodeConfig(**{**BASE, **setting})
    model, tokenizer = load_model(folder, torch.float32, torch.device("cpu")), load_tokenizer(folder)
    task = Lists(problems, "held_out", seed)
    items = list(task.items())
    requests = requests_of(items, tokenizer, config.max_new_tokens)
    done: dict[str, list[tuple[Generation, bool]]] = {"all": []}
    for generation in Engine(model, config, Solo(), EngineConfig(32)).generate(requests):
        item = items[generation.request.index]
        family, length = item.custom_id.rpartition("-")[2], item.reference.count(",") + 1
        kind = next((kind for kind, lengths in LENGTHS.items() if length in lengths), "")
        judged = generation, task.score(item, tokenizer.decode(generation.tokens)).correct
        for group in ("all", family) if family == "latin" else ("all", family, f"{family} {kind}"):
            done.setdefault(group, []).append(judged)
    groups = {name: figures(done[name]) for name in sorted(done)}
    return {"setting": {**BASE, **setting}, "seed": seed, "groups": groups}


def shown(results: dict[str, dict[str, Any]]) -> Table:
    """Accuracy and tokens per forward of each family, and its lengths, under each setting."""
    table = Table("family", *results)
    names = [f"{family}{kind}" for family in FAMILIES for kind in ("", *(f" {kind}" for kind in LENGTHS))]
    known = {name for r in results.values() for name in r["groups"]}
    for group in ("all", *(name for name in names if name in known)):
        found = [r["groups"].get(group) for r in results.values()]
        table.add_row(group, *(f"{f['accuracy']:.1%} at {f['tpf']:.2f}" if f else "" for f in found))
    return table


def main() -> None:
    """Measure, print, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="outputs/lists/checkpoint", help="a checkpoint folder")
    parser.add_argument("--problems", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1, help="2 is the final test")
    parser.add_argument("--only", choices=list(SETTINGS), help="one setting")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = find(arguments.model, "--model")
    names = [arguments.only] if arguments.only else list(SETTINGS)
    results = {n: measure(folder, SETTINGS[n], arguments.problems, arguments.seed) for n in names}
    Console().print(shown(results))
    if arguments.output:
        weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:16]
        arguments.output.write_text(json.dumps({"weights": weights, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
