"""Measure accuracy and tokens per forward of the embedded model with every kind of decoding.

    python -m benchmarks.embedded                 # everything: 500 held-out problems per setting
    python -m benchmarks.embedded --part grid     # k x tau_conf of LoPA's published rule
    python -m benchmarks.embedded --part front    # variants of lookahead, and the control
    python -m benchmarks.embedded --part verified --problems 2000    # verified lookahead and its competitors
    python -m benchmarks.embedded --part depths   # branches x drafts
    python -m benchmarks.embedded --part temperatures # sampled answers
    python -m benchmarks.embedded --part blocks       # one or two blocks at a time: fewer rows per token
    python -m benchmarks.embedded --part final    # the chosen settings on the final test seed
    python -m benchmarks.embedded --part eight_bits    # fp8 and int8 weights

Settings are chosen on problem seed 1; only the part `final` uses seed 2. The results are kept in
benchmarks/results/embedded.json as long as the model's weights stay the same; only missing ones are measured.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

from benchmarks.answers import COLUMNS, PUBLISHED, answer, load
from benchmarks.plot import draw
from benchmarks.results import RESULTS, Result, measured, show
from lopa_dist.decode import DecodeConfig
from lopa_dist.models.config import QUANTIZATIONS
from lopa_dist.models.files import EMBEDDED
from lopa_dist.tasks.embedded import Arithmetic

Setting = dict[str, Any]
Named = list[tuple[str, Setting]]
BASE: Setting = {"block_size": 16, "max_new_tokens": 64, "branches": 0}  # every setting extends `PUBLISHED` and this
THRESHOLDS = (0.95, 0.9, 0.8, 0.7)
LEFT_TO_RIGHT: Setting = {"tau_conf": 1.0, "sub_block_size": 1, "max_active_blocks": 1}
ONE_BLOCK: Setting = {"max_active_blocks": 1}
PLAIN: Setting = {"tau_conf": 0.9}


def drafted(branches: int, drafts: int, **more: Any) -> Setting:
    """Return a setting of verified lookahead: `branches` branches, `drafts` drafts, and `more` options."""
    return {"verify": "agreement", "branches": branches, "drafts": drafts, **more}


CHAIN, TREE = ("verified, draft rows", drafted(0, 10)), ("verified, tree of 8", drafted(7, 10))
LOPA = ("LoPA", {"branches": 7})
CONTROLS: Named = [("control", {"extra_fill": 1}), ("control", {"extra_fill": 2})]
PARTS: dict[str, Named] = {
    "grid": [
        ("left to right", LEFT_TO_RIGHT),
        *(("plain", {"branches": 0, "tau_conf": tau}) for tau in THRESHOLDS),
        *(("LoPA", {"branches": k, "tau_conf": tau}) for k in (1, 3, 7, 15) for tau in THRESHOLDS),
    ],
    "front": [
        *(("control", {"extra_fill": extra, "tau_conf": tau}) for extra in (1, 2) for tau in THRESHOLDS),
        ("LoPA variant", {"branches": 3, "tau_look": 0.5}),
        ("LoPA variant", {"branches": 3, "confidence": "probability"}),
        ("LoPA variant", {"branches": 3, "context": "d2f_causal"}),
        ("plain variant", {"context": "d2f_causal"}),
    ],
    "verified": [CHAIN, ("plain", PLAIN), CONTROLS[0], TREE, CONTROLS[1], LOPA],
    "depths": [
        ("verified", drafted(k, m))
        for k, m in [*((0, m) for m in (2, 4, 8, 12, 16)), *((k, 10) for k in (1, 3, 15)), (7, 1)]
    ],
    "temperatures": [
        ("left to right, sampled", {**LEFT_TO_RIGHT, "temperature": 1.0}),
        *(
            (name, {**setting, "temperature": temperature})
            for temperature in (0.3, 0.7, 1.0)
            for name, setting in (("plain, sampled", PLAIN), ("verified, sampled", drafted(0, 10)))
        ),
    ],
    "blocks": [
        *(("control, 1 block", {"extra_fill": extra, **ONE_BLOCK}) for extra in (1, 2, 3, 4)),
        ("plain, 1 block", {**PLAIN, **ONE_BLOCK}),
        ("verified, 1 block", drafted(0, 6, **ONE_BLOCK)),
        ("verified, 2 blocks", drafted(0, 10, max_active_blocks=2)),
        ("control, 2 blocks", {"extra_fill": 2, "max_active_blocks": 2}),
    ],
    "final": [
        ("left to right", LEFT_TO_RIGHT), ("plain", PLAIN), CHAIN, TREE, LOPA, ("LoPA", {"branches": 1}),
        *CONTROLS,
    ],
    "eight_bits": [
        (f"{name}, {kind}", {**setting, "quantization": kind})
        for kind in ("none", *QUANTIZATIONS)
        for name, setting in (("plain", PLAIN), ("LoPA", {"branches": 3}))
    ],
}  # fmt: skip
SEEDS = {"final": 2}  # problem seeds of the parts; all other parts use seed 1
MOST = {"LoPA": 500}  # most problems of a setting: LoPA runs up to 16 windows in each step, which is slow on a CPU


@dataclass(frozen=True)
class Job:
    """One measurement."""

    name: str
    setting: Setting
    problems: int
    seed: int

    @property
    def key(self) -> str:
        """What identifies the job's result among those of the same weights."""
        return json.dumps([{**BASE, **self.setting}, self.problems, self.seed], sort_keys=True)


def work(job: Job) -> Result:
    """Measure one setting in this process, on one thread, and return its result."""
    setting = dict(job.setting)
    builder = load(quantization=setting.pop("quantization", "none"))
    task = Arithmetic(job.problems, "held_out", job.seed)
    answers = answer(builder, DecodeConfig(**{**PUBLISHED, **BASE, **setting}), task, list(task.items()), 32)
    return {"name": job.name, "setting": job.setting, **answers.figures, "problems": job.problems, "seed": job.seed}


def picture(results: list[Result]) -> str:
    """Draw accuracy against tokens per forward for plain decoding, LoPA and the control; return the file's name."""
    seed1 = [r for r in results if r["seed"] == 1 and r["problems"] == 500]
    published = [r for r in seed1 if r["name"] == "LoPA" and r["setting"].get("tau_conf", 0.9) == 0.9]
    counts = ", ".join(str(k) for k in sorted(r["setting"]["branches"] for r in published))
    lines = [
        ("plain, tau 0.95 to 0.7", "o-", [r for r in seed1 if r["name"] == "plain"], "#1f2933"),
        (f"LoPA (the paper), k = {counts}, tau 0.9", "s-", published, "#dc2626"),
    ]
    for extra, style in ((1, "^--"), (2, "v--")):
        control = [r for r in seed1 if r["name"] == "control" and r["setting"]["extra_fill"] == extra]
        lines.append((f"control: +{extra} a step, unverified", style, control, "#94a3b8"))

    def paint(axes: Any) -> None:
        for label, style, chosen, color in lines:
            chosen = sorted(chosen, key=lambda r: r["tpf"])
            points = [r["tpf"] for r in chosen], [100 * r["accuracy"] for r in chosen]
            axes.plot(*points, style, color=color, label=label)
        axes.set(xlabel="tokens per forward (TPF)", ylabel="accuracy, %")
        axes.set_title("Embedded model, 500 held-out problems: accuracy against speed")
        axes.legend(frameon=False, fontsize=8)

    return draw(RESULTS / "embedded.png", paint, (7.2, 4.6))


STYLES = {
    "plain": ("o", "#1f2933", "plain decoding"),
    "control 1": ("^", "#94a3b8", "control: +1 a step, unverified"),
    "control 2": ("v", "#94a3b8", "control: +2 a step, unverified"),
    "LoPA": ("s", "#dc2626", "LoPA (the paper), k = 7"),
    "verified, draft rows": ("D", "#2563eb", "verified, 10 drafts in rows (the default)"),
    "verified, tree of 8": ("P", "#059669", "verified, a tree of 8 branches with 10 drafts"),
}


def comparison(results: list[Result]) -> str:
    """Draw the part `verified`: accuracy, with standard errors, against tokens per forward and against rows per token.

    Returns the file's name.
    """

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
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    results: dict[str, Result] = {}
    for part in PARTS if options.part == "all" else [options.part]:
        seed = SEEDS.get(part, 1)
        jobs = [
            Job(name, setting, min(options.problems, MOST.get(name, options.problems)), seed)
            for name, setting in PARTS[part]
        ]
        results = measured("embedded", EMBEDDED, {job.key: job for job in jobs}, work, options.processes)
        rows = [{**results[job.key], "name": job.name} for job in jobs]
        for row in rows:
            row["words"] = ", ".join(f"{key}={value}" for key, value in row["setting"].items())
        columns = {"decoding": "{name}", "setting": "{words}", **COLUMNS}
        show(f"{part}: {options.problems} held-out problems, seed {seed}", rows, columns)
        if part == "verified":
            print(f"picture: {RESULTS / comparison(rows)}")
    if {"plain", "control"} <= {result["name"] for result in results.values()}:
        print(f"picture: {RESULTS / picture(list(results.values()))}")


if __name__ == "__main__":
    main()
