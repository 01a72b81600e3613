"""Accuracy and tokens per forward of the embedded model under every kind of decoding.

    python -m benchmarks.embedded                 # everything: 500 held-out problems a setting
    python -m benchmarks.embedded --part grid     # k x tau_conf of the published rule
    python -m benchmarks.embedded --part front    # variants of lookahead, and the control
    python -m benchmarks.embedded --part verified --problems 2000    # verified lookahead and what it is compared with
    python -m benchmarks.embedded --part depths   # branches x drafts
    python -m benchmarks.embedded --part temperatures # sampled answers
    python -m benchmarks.embedded --part blocks       # one or two blocks at a time: fewer rows a token
    python -m benchmarks.embedded --part final    # the chosen settings on the final test seed
    python -m benchmarks.embedded --part eight_bits    # fp8 and int8 weights

Settings are chosen on problem seed 1; seed 2 is only for the `final` part. Counting is honest: tokens up to the first
EOS, every forward of a sequence, prefill included. Results are kept in benchmarks/results/embedded.json, keyed by the
model's weights, and only what is missing is run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kept import Kept
from lopa_dist.config import ModelOptions
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.request import Request, request_key
from lopa_dist.jobs.setup.build import EngineBuilder
from lopa_dist.jobs.show.pareto import draw
from lopa_dist.models.files import EMBEDDED
from lopa_dist.models.quantize import KINDS
from lopa_dist.tasks.embedded import Arithmetic
from lopa_dist.tasks.task import Item, Task

RESULTS = Path(__file__).parent / "results"
BASE = {"block_size": 16, "max_new_tokens": 64, "branches": 0}
UNVERIFIED: dict[str, Any] = {
    "verify": "confidence",
    "drafts": 0,
}  # under `BASE`; results are keyed without it
BRANCHES, THRESHOLDS = (0, 1, 3, 7, 15), (0.95, 0.9, 0.8, 0.7)
LEFT_TO_RIGHT = {"tau_conf": 1.0, "sub_block_size": 1, "max_active_blocks": 1}

Setting = dict[str, Any]


def grid() -> list[tuple[str, Setting]]:
    """The published rule over k and tau_conf."""
    named = [("left to right", dict(LEFT_TO_RIGHT))]
    for k in BRANCHES:
        named += [("plain" if k == 0 else "LoPA published", {"branches": k, "tau_conf": t}) for t in THRESHOLDS]
    return named


def front() -> list[tuple[str, Setting]]:
    """Variants of lookahead, and the control."""
    named: list[tuple[str, Setting]] = []
    for extra in (1, 2):
        named += [("control", {"extra_fill": extra, "tau_conf": t}) for t in THRESHOLDS]
    for variant in (
        {"tau_look": 0.5},
        {"confidence": "probability"},
        {"context": "d2f_causal"},
    ):
        named.append(("LoPA variant", {"branches": 3, **variant}))
    named.append(("plain variant", {"context": "d2f_causal"}))
    return named


def drafted(branches: int, drafts: int, **more: Any) -> Setting:
    """Verified lookahead."""
    return {"verify": "agreement", "branches": branches, "drafts": drafts, **more}


def verified() -> list[tuple[str, Setting]]:
    """Verified lookahead, plain decoding, the control and LoPA as published."""
    return [
        ("verified, draft rows", drafted(0, 10)),
        ("plain", {"tau_conf": 0.9}),
        ("control", {"extra_fill": 1}),
        ("verified, tree of 8", drafted(7, 10)),
        ("control", {"extra_fill": 2}),
        ("LoPA published", {"branches": 7}),
    ]


def depths() -> list[tuple[str, Setting]]:
    """Branches x drafts of verified lookahead."""
    grid_of = [(0, m) for m in (2, 4, 8, 12, 16)] + [(k, 10) for k in (1, 3, 15)]
    return [("verified", drafted(k, m)) for k, m in [*grid_of, (7, 1)]]


def temperatures() -> list[tuple[str, Setting]]:
    """Plain decoding and verified lookahead of sampled tokens, and sampling from left to right, one token at a time."""
    return [("left to right, sampled", {**LEFT_TO_RIGHT, "temperature": 1.0})] + [
        (name, {**setting, "temperature": t})
        for t in (0.3, 0.7, 1.0)
        for name, setting in (("plain, sampled", {"tau_conf": 0.9}), ("verified, sampled", drafted(0, 10)))
    ]


def blocks() -> list[tuple[str, Setting]]:
    """One or two blocks at a time: fewer tokens a forward, and fewer rows a token."""
    named: list[tuple[str, Setting]] = [("control, 1 block", {"extra_fill": extra}) for extra in (1, 2, 3, 4)]
    named += [("plain, 1 block", {"tau_conf": 0.9}), ("verified, 1 block", drafted(0, 6))]
    return [(name, {**setting, "max_active_blocks": 1}) for name, setting in named] + [
        (name, {**setting, "max_active_blocks": 2})
        for name, setting in (("verified, 2 blocks", drafted(0, 10)), ("control, 2 blocks", {"extra_fill": 2}))
    ]


def final() -> list[tuple[str, Setting]]:
    """What the README quotes, on problems that no choice was made on."""
    return [
        ("left to right", dict(LEFT_TO_RIGHT)),
        ("plain", {"tau_conf": 0.9}),
        ("verified, draft rows", drafted(0, 10)),
        ("verified, tree of 8", drafted(7, 10)),
        ("LoPA published", {"branches": 7}),
        ("LoPA published", {"branches": 1}),
        ("control", {"extra_fill": 1}),
        ("control", {"extra_fill": 2}),
    ]


def eight_bits() -> list[tuple[str, Setting]]:
    """What quantised weights cost in accuracy."""
    return [
        (f"{name}, {kind}", {**setting, "quantization": kind})
        for kind in ("none", *KINDS)
        for name, setting in (("plain", {"tau_conf": 0.9}), ("LoPA", {"branches": 3}))
    ]


PARTS = {
    "grid": (grid, 1),
    "front": (front, 1),
    "verified": (verified, 1),
    "depths": (depths, 1),
    "temperatures": (temperatures, 1),
    "blocks": (blocks, 1),
    "final": (final, 2),
    "eight_bits": (eight_bits, 1),
}


MOST = {"LoPA published": 500}
"""Most problems of a setting: its eight windows a step make it slow on a CPU."""


def requests_of(items: Sequence[Item], tokenizer: Any, max_new_tokens: int) -> list[Request]:
    """Return the items' chats as requests, in order."""
    requests = []
    for i, item in enumerate(items):
        text = tokenizer.apply_chat_template(item.messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        requests.append(Request(i, ids, max_new_tokens, request_key(0, item.custom_id)))
    return requests


def measure(setting: Setting, problems: int, seed: int) -> dict[str, Any]:
    """Run one setting in this process, on one thread."""
    torch.set_num_threads(1)
    quantization = setting.get("quantization", "none")
    config = DecodeConfig(**{**UNVERIFIED, **BASE, **{k: v for k, v in setting.items() if k != "quantization"}})
    builder = EngineBuilder(ModelOptions(quantization=quantization, dtype="fp32"), torch.device("cpu"))
    builder.load(warn=False)
    task = Arithmetic(problems, "held_out", seed)
    return figures_of(builder, config, task, list(task.items())) | {"problems": problems, "seed": seed}


def figures_of(builder: EngineBuilder, config: DecodeConfig, task: Task, items: Sequence[Item]) -> dict[str, Any]:
    """Generate answers to a task's items, 32 at a time, and return what is counted of them."""
    requests = requests_of(items, builder.tokenizer, config.max_new_tokens)
    engine = builder.engine(config, EngineConfig(32))
    began = time.perf_counter()
    done = list(engine.generate(requests))
    seconds = time.perf_counter() - began
    scores = [task.score(items[g.request.index], builder.tokenizer.decode(g.tokens)) for g in done]
    tokens, forwards = sum(len(g.tokens) for g in done), sum(g.forwards for g in done)
    return {
        "accuracy": sum(bool(score.correct) for score in scores if score) / len(scores),
        "tpf": tokens / forwards,
        "tokens_per_s": tokens / seconds,
        "reference_tpf": sum(g.filled for g in done) / (forwards + len(done)),
        "lookahead_wins": 1 - engine.statistics.wins[0] / max(1, sum(engine.statistics.wins.values())),
        "rows_per_token": engine.statistics.rows / tokens,
        "accepted_per_forward": engine.statistics.accepted_per_forward(),
        "acceptance": engine.statistics.acceptance(),
    }


def work(job: tuple[str, Setting, int, int]) -> tuple[str, Setting, dict[str, Any]]:
    """A pool's unit of work."""
    name, setting, problems, seed = job
    return name, setting, measure(setting, problems, seed)


def key(setting: Setting, problems: int, seed: int) -> str:
    """What identifies a result."""
    return json.dumps([{**BASE, **setting}, problems, seed], sort_keys=True)


def load() -> Kept:
    """Kept results of the present weights."""
    return Kept(RESULTS / "embedded.json", EMBEDDED)


def run(jobs: list[tuple[str, Setting, int, int]], processes: int, console: Console) -> dict[str, Any]:
    """Measure what is missing; every result is kept as soon as it is there."""
    measured = load()
    missing = [j for j in jobs if key(j[1], j[2], j[3]) not in measured.results]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for i, (name, setting, result) in enumerate(pool.imap_unordered(work, missing), 1):
            found = {"name": name, "setting": setting, **result}
            measured.put(key(setting, result["problems"], result["seed"]), found)
            console.print(f"[{i}/{len(missing)}] {name} {setting}: {result['accuracy']:.1%}, TPF {result['tpf']:.2f}")
    return measured.results


def show(rows: Iterable[dict[str, Any]], title: str, console: Console) -> None:
    """One table."""
    table = Table(title=title)
    for column in (
        "decoding",
        "setting",
        "accuracy",
        "TPF",
        "rows/token",
        "tokens/s",
        "reference TPF",
        "lookahead wins",
    ):
        table.add_column(column, justify="left" if column in ("decoding", "setting") else "right")
    for r in rows:
        setting = ", ".join(f"{k}={v}" for k, v in r["setting"].items() if BASE.get(k) != v)
        wins = f"{r['lookahead_wins']:.0%}" if r["setting"].get("branches") else ""
        figures = (
            f"{r['accuracy']:.1%}",
            f"{r['tpf']:.2f}",
            f"{r['rows_per_token']:.1f}",
            f"{r['tokens_per_s']:.0f}",
            f"{r['reference_tpf']:.2f}",
        )
        table.add_row(r["name"], setting, *figures, wins)
    console.print(table)


def span(chosen: list[dict[str, Any]]) -> str:
    """The branch counts of results, in words."""
    return ", ".join(str(k) for k in sorted(r["setting"]["branches"] for r in chosen))


def picture(results: list[dict[str, Any]]) -> str:
    """Accuracy against TPF: plain, published LoPA by k, the control."""

    def paint(axes: Any) -> None:
        def line(label: str, style: str, chosen: list[dict[str, Any]], color: str) -> None:
            chosen = sorted(chosen, key=lambda r: r["tpf"])
            axes.plot(
                [r["tpf"] for r in chosen],
                [100 * r["accuracy"] for r in chosen],
                style,
                color=color,
                label=label,
            )

        seed1 = [r for r in results if r["seed"] == 1 and r["problems"] == 500]
        line("plain, tau 0.95 to 0.7", "o-", [r for r in seed1 if r["name"] == "plain"], "#1f2933")
        published = [r for r in seed1 if r["name"] == "LoPA published" and r["setting"].get("tau_conf", 0.9) == 0.9]
        line(f"LoPA as published, k = {span(published)}, tau 0.9", "s-", published, "#dc2626")
        for extra, style in ((1, "^--"), (2, "v--")):
            control = [r for r in seed1 if r["name"] == "control" and r["setting"]["extra_fill"] == extra]
            line(f"control: +{extra} a step, unverified", style, control, "#94a3b8")
        axes.set(xlabel="tokens per forward (TPF)", ylabel="accuracy, %")
        axes.set_title("Embedded model, 500 held-out problems: accuracy against speed")
        axes.legend(frameon=False, fontsize=8)

    return draw(RESULTS / "embedded.png", paint, (7.2, 4.6))


STYLES = {
    "plain": ("o", "#1f2933", "plain decoding"),
    "control 1": ("^", "#94a3b8", "control: +1 a step, unverified"),
    "control 2": ("v", "#94a3b8", "control: +2 a step, unverified"),
    "LoPA published": ("s", "#dc2626", "LoPA as published, k = 7"),
    "verified, draft rows": ("D", "#2563eb", "verified, 10 drafts in rows (the default)"),
    "verified, tree of 8": ("P", "#059669", "verified, a tree of 8 branches with 10 drafts"),
}


def comparison(results: list[dict[str, Any]]) -> str:
    """Accuracy against tokens per forward, and against rows per token: the part `verified`, with standard errors."""

    def paint(panels: Any) -> None:
        for axes, figure in zip(panels, ("tpf", "rows_per_token"), strict=True):
            for r in results:
                name = f"{r['name']} {r['setting']['extra_fill']}" if r["name"] == "control" else r["name"]
                marker, color, words = STYLES[name]
                error = 100 * (r["accuracy"] * (1 - r["accuracy"]) / r["problems"]) ** 0.5
                axes.errorbar(r[figure], 100 * r["accuracy"], error, fmt=marker, color=color, capsize=2, label=words)
            axes.set(ylabel="accuracy, %")
            axes.margins(0.1)
        panels[0].set(xlabel="tokens per forward")
        panels[1].set(xlabel="rows per token")
        panels[0].set_title("more is better", fontsize=9)
        panels[1].set(title="less is better", xscale="log", ylabel="")
        panels[1].title.set_fontsize(9)
        panels[1].set_xticks([10, 20, 50, 100], ["10", "20", "50", "100"])
        panels[1].xaxis.set_minor_formatter("")
        handles, names = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False, fontsize=8)

    return draw(RESULTS / "verified.png", paint, (9.6, 4.6), panels=2)


def main() -> None:
    """Run the chosen parts and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["all", *PARTS], default="all")
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--most-branches", type=int, help="leave out settings with more lookahead branches")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    console = Console()
    names = list(PARTS) if options.part == "all" else [options.part]
    for name in names:
        make, seed = PARTS[name]
        jobs = [
            (label, setting, min(options.problems, MOST.get(label, options.problems)), seed)
            for label, setting in make()
        ]
        if options.most_branches is not None:
            jobs = [j for j in jobs if j[1].get("branches", 0) <= options.most_branches]
        found = run(jobs, options.processes, console)
        rows = [{**found[key(s, n, seed)], "name": label} for label, s, n, seed in jobs]
        show(rows, f"{name}: {options.problems} held-out problems, seed {seed}", console)
        if name == "verified":
            console.print(f"picture: {RESULTS / comparison(rows)}")
    everything = list(load().results.values())
    if {"plain", "control"} <= {r["name"] for r in everything}:
        console.print(f"picture: {RESULTS / picture(everything)}")


if __name__ == "__main__":
    main()
