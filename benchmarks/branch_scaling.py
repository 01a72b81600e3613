"""What branch ranks are worth: the embedded model on 1, 2 and 4 ranks of this machine, one thread each.

    python -m benchmarks.branch_scaling                     # LoPA with k = 7: the same branches on more ranks
    python -m benchmarks.branch_scaling --decoding verified # verified lookahead: a branch of 10 drafts for each rank
    python -m benchmarks.branch_scaling --rounds 1 --problems 16     # a quick look

Starts the main job through torchrun, again and again with the rank counts in turn, and takes medians, because machines
have moods. Beside the speed-up stands its ceiling: two independent single-rank jobs at once, which send nothing; where
these take longer than one alone, the cores share something (a physical core, memory, other people's work). The latency
model (`latency_model.py`) is fitted from measured collectives and projected to Dream-7B on more ranks. Writes
benchmarks/results/branch_scaling.json and .png, or branch_scaling_verified.json and .png.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.latency_model import FORMULA, Link, Load, Model, fit, step
from lopa_dist.engine.statistics import PHASES
from lopa_dist.jobs.show.pareto import draw

RESULTS = Path(__file__).parent / "results"
RANKS = (1, 2, 4)
PROJECTED = (1, 2, 4, 8, 16, 64)
ASSUMED = Link(alpha=15e-6, beta=1 / 300e9)  # a message over NVLink, about: not measured
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


DECODINGS = {
    "lopa": ["decode=embedded_lopa", "decode.branches=7"],
    "verified": ["decode=embedded"],
}


def start(folder: Path, ranks: int, sequences: int, problems: int, decoding: str) -> subprocess.Popen[bytes]:
    """The main job; one rank needs no torchrun."""
    launcher = [*TORCHRUN, str(ranks)] if ranks > 1 else []
    branches = [f"decode.branches={ranks - 1}"] if decoding == "verified" else []  # one on each rank
    command = [
        sys.executable, *launcher, "-m", "lopa_dist", *DECODINGS[decoding], *branches, f"parallel.branch={ranks}",
        "parallel.threads=1", f"task.limit={problems}", f"engine.max_sequences={sequences}", f"hydra.run.dir={folder}",
        "logging.wandb.mode=disabled", "logging.progress=never",
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT)


def finish(job: subprocess.Popen[bytes], folder: Path) -> dict[str, Any]:
    """Its report."""
    if job.wait():
        sys.exit(f"the job in {folder} failed")
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def measure(rounds: int, sequences: int, problems: int, decoding: str, console: Console) -> list[dict[str, Any]]:
    """Reports of all rounds: of every rank count, and of two single ranks at once (ranks: "two alone")."""
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        for turn in range(rounds):
            for ranks in RANKS:
                folder = Path(temporary) / f"{turn}-{ranks}"
                report = finish(start(folder, ranks, sequences, problems, decoding), folder)
                found.append({"ranks": ranks, **report})
                console.print(f"round {turn + 1}: {ranks} ranks, {sequences} in flight: {report['decode_s']:.2f} s")
            folders = [Path(temporary) / f"{turn}-alone-{i}" for i in (0, 1)]
            jobs = [start(folder, 1, sequences, problems, decoding) for folder in folders]
            both = [finish(job, folder) for job, folder in zip(jobs, folders, strict=True)]
            found.append({"ranks": "two alone", "decode_s": max(r["decode_s"] for r in both)})
            console.print(f"round {turn + 1}: two single ranks at once: {found[-1]['decode_s']:.2f} s")
    return found


def summarise(reports: list[dict[str, Any]], sequences: int) -> list[dict[str, Any]]:
    """One row for every rank count, medians over the rounds."""

    def median(ranks: Any, *path: str) -> float:
        values: list[Any] = [r for r in reports if r["ranks"] == ranks]
        for key in path:
            values = [v[key] for v in values]
        return statistics.median(values)

    alone = median(1, "decode_s")
    return [
        {
            "ranks": ranks,
            "sequences": sequences,
            "decode_s": median(ranks, "decode_s"),
            "decode_s_of_rounds": [round(r["decode_s"], 3) for r in reports if r["ranks"] == ranks],
            "speed_up": alone / median(ranks, "decode_s"),
            "ceiling": 2 * alone / median("two alone", "decode_s") if ranks == 2 else None,
            "tokens_per_s": median(ranks, "tokens_per_s", "job"),
            "tpf": median(ranks, "tpf"),
            "steps": median(ranks, "steps"),
            "step_ms": {p: median(ranks, "step_ms", p) for p in (*PHASES, "total")},
            "bytes_per_step": {w: median(ranks, "comm_bytes_per_step", w) for w in ("all_gather", "commit")},
        }
        for ranks in RANKS
    ]


def collectives(ranks: int) -> dict[str, dict[int, float]]:
    """Seconds by size, measured between so many processes (`collectives.py`)."""
    command = [sys.executable, *TORCHRUN, str(ranks), "-m", "benchmarks.collectives"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    return {what: {int(size): s for size, s in times.items()} for what, times in json.loads(line).items()}


def project(link: Link, branches: int, sequences: int) -> list[dict[str, Any]]:
    """The model's steps for Dream-7B, in milliseconds."""
    load, rows = Load(branches, sequences), []
    alone = step(Model(), link, load, 1)["total"]
    for ranks in PROJECTED:
        parts = step(Model(), link, load, ranks)
        milliseconds = {part: 1000 * s for part, s in parts.items()}
        rows.append({"ranks": ranks, **asdict(load), "ms": milliseconds, "speed_up": alone / parts["total"]})
    return rows


def show_measured(rows: list[dict[str, Any]], console: Console) -> None:
    """The table of one number of sequences in flight."""
    table = Table(title=f"Embedded model, {rows[0]['sequences']} in flight: ms a step, one thread a rank")
    sizes = ("gathered B/step", "committed B/step")
    for name in ("ranks", *PHASES, "step", "TPF", "tokens/s", "speed-up", "ceiling", *sizes):
        table.add_column(name, justify="right")
    for r in rows:
        times = [f"{r['step_ms'][p]:.2f}" for p in (*PHASES, "total")]
        sent = [f"{r['bytes_per_step'][w]:,.0f}" for w in ("all_gather", "commit")]
        ceiling = f"{r['ceiling']:.2f}" if r["ceiling"] else ""
        speeds = (f"{r['tpf']:.2f}", f"{r['tokens_per_s']:.0f}", f"{r['speed_up']:.2f}")
        table.add_row(str(r["ranks"]), *times, *speeds, ceiling, *sent)
    console.print(table)


def show_projected(name: str, link: Link, rows: list[dict[str, Any]], console: Console) -> None:
    """The table of one link and load."""
    title = (
        f"PROJECTION, not measured: Dream-7B on H200s, {rows[0]['branches']} branches x {rows[0]['sequences']} "
        f"sequences; {name} link: alpha {link.alpha * 1e6:.0f} us, {1e-9 / max(link.beta, 1e-15):.1f} GB/s\n{FORMULA}"
    )
    table = Table(title=title)
    for column in ("ranks", "forward ms", "all-gather ms", "commit ms", "step ms", "speed-up"):
        table.add_column(column, justify="right")
    for r in rows:
        parts = [f"{r['ms'][p]:.3f}" for p in ("forward", "all_gather", "commit", "total")]
        table.add_row(str(r["ranks"]), *parts, f"{r['speed_up']:.2f}")
    console.print(table)


def picture(rows: list[dict[str, Any]], cores: int, name: str) -> str:
    """Where a step's time goes, by ranks, for each number of sequences in flight."""
    colors = dict(zip(PHASES, ("#2563eb", "#f59e0b", "#10b981", "#dc2626", "#94a3b8"), strict=True))

    def paint(axes: Any) -> None:
        base = {r["sequences"]: r["step_ms"]["total"] for r in rows if r["ranks"] == 1}
        places = np.arange(len(rows)) + [0.6 * list(base).index(r["sequences"]) for r in rows]
        bottom = np.zeros(len(rows))
        for phase in PHASES:
            heights = np.array([100 * r["step_ms"][phase] / base[r["sequences"]] for r in rows])
            axes.bar(places, heights, 0.75, bottom, color=colors[phase], label=phase.replace("_", "-"))
            bottom += heights
        for place, top, r in zip(places, bottom, rows, strict=True):
            axes.text(place, top + 1, f"{r['speed_up']:.2f}x", ha="center", va="bottom", fontsize=9)
        shared = [" on shared cores" if r["ranks"] > cores else f" rank{'s' if r['ranks'] > 1 else ''}" for r in rows]
        names = [f"{r['ranks']}{how}\n{r['sequences']} in flight" for r, how in zip(rows, shared, strict=True)]
        axes.set_xticks(places, names, fontsize=8)
        axes.set(ylabel="time of a step, % of one rank", ylim=(0, 1.15 * max(100.0, bottom.max())))
        axes.set_title(f"Branch ranks, one thread each, on {cores} cores: embedded model")
        axes.legend(frameon=False, fontsize=8, ncols=len(PHASES), loc="upper center", bbox_to_anchor=(0.5, -0.16))

    return draw(RESULTS / f"{name}.png", paint, (7.2, 4.4))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 1], help="in flight at once")
    parser.add_argument("--decoding", choices=list(DECODINGS), default="lopa")
    options = parser.parse_args()
    name = "branch_scaling" if options.decoding == "lopa" else f"branch_scaling_{options.decoding}"
    console = Console(width=None if sys.stdout.isatty() else 150)
    load = os.getloadavg()[0]  # before anything of ours: how busy others keep the machine
    if load > 0.5:
        console.print(f"[bold red]load {load:.1f}: others use this machine, the figures will not be what they could be")
    rows = []
    for sequences in options.sequences:
        problems = options.problems if sequences > 1 else max(4, options.problems // 4)
        rows += summarise(measure(options.rounds, sequences, problems, options.decoding, console), sequences)
    messages = collectives(2)
    # one hop of a ring of two, and of a tree of two: both collectives are one message then
    link = fit({size: statistics.mean(times[size] for times in messages.values()) for size in messages["all_gather"]})
    for sequences in options.sequences:
        show_measured([r for r in rows if r["sequences"] == sequences], console)
    projections = []
    for kind, chosen in (("measured (Gloo, this machine)", link), ("assumed (NVLink)", ASSUMED)):
        for branches, sequences in ((8, 1), (64, 1), (64, 16)):
            projected = project(chosen, branches, sequences)
            show_projected(kind, chosen, projected, console)
            projections.append({"link": kind, **asdict(chosen), "rows": projected})
    cores = len(os.sched_getaffinity(0))
    report = {
        "machine": platform.processor() or platform.machine(),
        "cores": cores,
        "load_before": load,
        "torch": torch.__version__,
        "rounds": options.rounds,
        "problems": options.problems,
        "decoding": DECODINGS[options.decoding],
        "measured": rows,
        "collectives_2_ranks_s": messages,
        "projection": {
            "label": "PROJECTION for Dream-7B, not measured: device figures from data sheets",
            "formula": FORMULA,
            "model": asdict(Model()),
            "tables": projections,
        },
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"picture: {RESULTS / picture(rows, cores, name)}")


if __name__ == "__main__":
    main()
