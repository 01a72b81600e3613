"""Measure the speed-up from branch ranks: the embedded model on 1, 2 and 4 ranks of this machine, one thread each.

    python -m benchmarks.branch_scaling                     # LoPA with k = 7: the same branches on more ranks
    python -m benchmarks.branch_scaling --decoding verified # verified lookahead: a branch of 10 drafts for each rank
    python -m benchmarks.branch_scaling --rounds 1 --problems 16     # a quick look

Each round starts the main job once for each rank count. The results are medians over the rounds, because a machine's
speed varies. For two ranks, the table also shows a ceiling of the speed-up: what two independent single-rank jobs
reach, which run at the same time and send nothing to each other. If the two take longer than one job alone, they
compete for something: a physical core, memory, or time that other programs use. Writes
benchmarks/results/branch_scaling.json and .png, or branch_scaling_verified.json and .png.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plot import draw
from benchmarks.results import RESULTS, Result, machine, show, write
from lopa_dist.engine.statistics import PHASES

RANKS = (1, 2, 4)
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
DECODINGS = {
    "lopa": ["decode=embedded_lopa", "decode.branches=7"],
    "verified": ["decode=embedded"],
}


def start(folder: Path, ranks: int, sequences: int, problems: int, decoding: str) -> subprocess.Popen[bytes]:
    """Start the main job on `ranks` ranks, and return its process; a single rank needs no torchrun."""
    launcher = [*TORCHRUN, str(ranks)] if ranks > 1 else []
    branches = [f"decode.branches={ranks - 1}"] if decoding == "verified" else []  # one branch on each rank
    command = [
        sys.executable, *launcher, "-m", "lopa_dist", *DECODINGS[decoding], *branches, f"parallel.branch={ranks}",
        "parallel.threads=1", f"task.limit={problems}", f"engine.max_sequences={sequences}", f"hydra.run.dir={folder}",
        "logging.wandb.mode=disabled", "logging.progress=never",
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT)


def finish(job: subprocess.Popen[bytes], folder: Path) -> Result:
    """Wait until the job ends, and return the report that it wrote to `folder`; exit if the job failed."""
    if job.wait():
        sys.exit(f"the job in {folder} failed")
    report: Result = json.loads((folder / "report.json").read_text())
    return report


def measure(rounds: int, sequences: int, problems: int, decoding: str) -> dict[int, list[Result]]:
    """Run the jobs of all rounds, and return their reports by rank count.

    Under 0 are the jobs for the ceiling: of two single-rank jobs that run at the same time, the slower one.
    """
    reports: dict[int, list[Result]] = {ranks: [] for ranks in (*RANKS, 0)}
    with tempfile.TemporaryDirectory() as temporary:
        for turn in range(rounds):
            for ranks in reports:
                folders = [Path(temporary) / f"{turn}-{ranks}-{i}" for i in range(1 if ranks else 2)]
                jobs = [start(folder, ranks or 1, sequences, problems, decoding) for folder in folders]
                done = [finish(job, folder) for job, folder in zip(jobs, folders, strict=True)]
                reports[ranks].append(max(done, key=lambda report: report["decode_s"]))
                what = f"{ranks} ranks" if ranks else "two single ranks at once"
                seconds = reports[ranks][-1]["decode_s"]
                print(f"round {turn + 1}: {what}, {sequences} in flight: {seconds:.2f} s", flush=True)
    return reports


def summarise(reports: dict[int, list[Result]], sequences: int) -> list[Result]:
    """Return a row of medians over the rounds for each rank count."""

    def median(ranks: int, *path: str) -> float:
        values: list[Any] = reports[ranks]
        for key in path:
            values = [value[key] for value in values]
        return statistics.median(values)

    alone = median(1, "decode_s")
    return [
        {
            "ranks": ranks,
            "sequences": sequences,
            "decode_s": median(ranks, "decode_s"),
            "decode_s_of_rounds": [round(report["decode_s"], 3) for report in reports[ranks]],
            "speed_up": alone / median(ranks, "decode_s"),
            "ceiling": 2 * alone / median(0, "decode_s") if ranks == 2 else None,
            "tokens_per_s": median(ranks, "tokens_per_s", "job"),
            "tpf": median(ranks, "tpf"),
            "steps": median(ranks, "steps"),
            "step_ms": {phase: median(ranks, "step_ms", phase) for phase in (*PHASES, "total")},
            "bytes_per_step": {what: median(ranks, "comm_bytes_per_step", what) for what in ("all_gather", "commit")},
        }
        for ranks in RANKS
    ]


def picture(rows: list[Result], cores: int, name: str) -> str:
    """Draw the share of each phase in a step's time, by ranks and sequences in flight; return the file's name."""
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
    """Measure the jobs; print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 1], help="in flight at once")
    parser.add_argument("--decoding", choices=list(DECODINGS), default="lopa")
    options = parser.parse_args()
    name = "branch_scaling" if options.decoding == "lopa" else f"branch_scaling_{options.decoding}"
    load = os.getloadavg()[0]  # measured before our jobs start: how busy other programs keep the machine
    if load > 0.5:
        print(f"load {load:.1f}: others use this machine, the figures will not be what they could be")
    rows = []
    for sequences in options.sequences:
        problems = options.problems if sequences > 1 else max(4, options.problems // 4)
        rows += summarise(measure(options.rounds, sequences, problems, options.decoding), sequences)
    columns = {"ranks": "{ranks}", "in flight": "{sequences}"}
    columns |= {phase: f"{{step_ms[{phase}]:.2f}}" for phase in (*PHASES, "total")}
    columns |= {"TPF": "{tpf:.2f}", "tokens/s": "{tokens_per_s:.0f}", "speed-up": "{speed_up:.2f}"}
    columns |= {"ceiling": "{ceiling}", "gathered B/step": "{bytes_per_step[all_gather]:,.0f}"}
    columns |= {"committed B/step": "{bytes_per_step[commit]:,.0f}"}
    shown = [{**row, "ceiling": f"{row['ceiling']:.2f}" if row["ceiling"] else ""} for row in rows]
    show("Embedded model: ms a step, one thread a rank", shown, columns)
    about = {"load_before": load, "rounds": options.rounds, "problems": options.problems}
    write(name, machine() | about | {"decoding": DECODINGS[options.decoding], "measured": rows})
    print(f"picture: {RESULTS / picture(rows, machine()['cores'], name)}")


if __name__ == "__main__":
    main()
