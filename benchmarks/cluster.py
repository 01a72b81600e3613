"""The end of a job on 8 to 512 data replicas, by simulation: what the order of requests and idle replicas would bring.

    python -m benchmarks.cluster                # the projection and its picture, from kept gains: some minutes
    python -m benchmarks.cluster --calibrate    # measure gains of the embedded model anew: minutes on two cores
    python -m benchmarks.cluster --validate     # run real jobs on this machine and compare them with their simulation

Everything is kept in benchmarks/results/cluster.json; a part that is not asked for stays as it was.

The projection is NOT a measurement: no GPU was used. A forward takes what a roofline of data-sheet figures says
(`latency_model.py`); tokens a forward and rows a step are the embedded model's, whose answers end at 60 tokens.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from matplotlib.ticker import NullLocator
from rich.console import Console
from rich.table import Table

from benchmarks import cluster_validation
from benchmarks.branch_scaling import ASSUMED
from benchmarks.cluster_calibration import Measured, all_gains
from benchmarks.cluster_simulator import Cluster, Kind, Requests, simulate
from benchmarks.embedded import BASE, RESULTS
from benchmarks.latency_model import Load, Model, exchange
from lopa_dist.checks import require
from lopa_dist.jobs.show.pareto import draw

FILE = RESULTS / "cluster.json"
IN_FLIGHT = 64  # sequences of a data replica at most
FEWER = 16  # the same, by default
PROMPT, ANSWER = 512, 256  # tokens, on the mean
SKEWED, REPLICAS = 20_000, (8, 32, 128, 512)
DRAWN = 200  # answers of one prompt
SPREAD = ((1319, 4), (1319, 8), (1319, 32), (5000, 8), (5000, 64))  # prompts, as many as GSM8K's or more, and replicas
JOINED = {1: "k=0 m=10", 2: "k=1 m=10", 4: "k=3 m=10", 8: "k=7 m=10"}  # the setting by branch ranks
POLICIES = {  # order, tail
    "input order": ("input", "wait"),
    "longest first": ("longest", "wait"),
    "longest first, dealt out": ("dealt", "wait"),
    "idle replicas become branch ranks": ("input", "branches"),
    "idle replicas take a share": ("input", "share"),
    "longest first, dealt out, then shares": ("dealt", "share"),
}


def read() -> dict[str, Any]:
    """What has been kept."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def write(kept: dict[str, Any]) -> None:
    """Keep it, each list of numbers on one line."""
    numbers = re.compile(r"\[[\s\d.,e+-]+\]")
    text = numbers.sub(lambda found: re.sub(r"\s+", " ", found[0]), json.dumps(kept, indent=1))
    FILE.write_text(text + "\n")


def host_seconds() -> Callable[[int], float]:
    """What a device waits for the host in a step, by sequences: as `host_time.py` measured it beside a CPU."""
    rows = json.loads((RESULTS / "host_time.json").read_text())["rows"]
    verified = [r for r in rows if r["decoding"].startswith("verified") and r["threads"] > 1]
    chosen = {r["sequences"]: r["exposed"] / 1000 for r in verified}
    return lambda sequences: float(np.interp(sequences, list(chosen), list(chosen.values())))


def gpu_kind(measured: Measured, branch: int) -> Kind:
    """A replica of Dream-7B on H200s: the roofline of a forward, host time, and what its ranks send."""
    model, host = Model(), host_seconds()
    commits = measured.tokens_per_forward / BASE["block_size"]

    def seconds(rows: float, sequences: int) -> float:
        spent = model.forward(rows) + host(sequences)
        if branch > 1:
            load = Load(
                measured.branch_limit, sequences, masked=measured.predictions, commits=commits, block=BASE["block_size"]
            )
            spent += sum(exchange(model, ASSUMED, load, branch).values())
        return spent

    return Kind(measured.gains(branch), seconds)


def moving(tokens: int) -> float:
    """Seconds that it takes to send the K/V of `tokens` tokens to another GPU."""
    return ASSUMED.alpha + ASSUMED.beta * tokens * Model().kv_bytes


def requests_of(count: int, lengths: str = "even") -> Requests:
    """Prompts of one length, and answers.

    - even: of half to one and a half times `ANSWER`;
    - skewed: the same, but one in twenty 8 times longer;
    - spread: log-normal, as of a model that ends its answers itself: a median of 150 tokens, one in seven above 400.
    """
    require("lengths", lengths, ("even", "skewed", "spread"))
    random = np.random.default_rng(0)
    answer = random.integers(ANSWER // 2, ANSWER * 3 // 2 + 1, count) if count > 1 else np.array([ANSWER])
    if lengths == "skewed":
        answer = np.where(random.random(count) < 0.05, 8 * answer, answer)
    elif lengths == "spread":
        answer = np.clip(random.lognormal(np.log(150), 0.9, count), 10, 2048).astype(np.int64)
    return Requests(np.full(count, PROMPT), answer)


def run_policy(job: tuple[dict[str, Measured], int, str, int, int, str]) -> dict[str, Any]:
    """Simulate a job (settings, prompts, lengths, sequences in flight, replicas, policy)."""
    settings, prompts, lengths, sequences, replicas, policy = job
    kinds = {size: gpu_kind(settings[name], size) for size, name in JOINED.items()}
    cluster = Cluster(replicas, kinds, sequences, *POLICIES[policy], moving)
    outcome = simulate(requests_of(prompts, lengths), cluster)
    busy = float(outcome.busy.mean())
    told = {
        "prompts": prompts,
        "in_flight": sequences,
        "replicas": replicas,
        "policy": policy,
        "seconds": outcome.seconds,
        "mean_busy_s": busy,
    }
    return told | {"moved_tokens": outcome.moved}


def one_prompt(settings: dict[str, Measured]) -> list[dict[str, Any]]:
    """Seconds to the answer of one prompt on 1 to 8 branch ranks, the mean of `DRAWN` draws of what its steps gain."""
    found = []
    for ranks, name in JOINED.items():
        cluster = Cluster(1, {1: gpu_kind(settings[name], ranks)}, 1)
        times = [simulate(requests_of(1), cluster, seed).seconds for seed in range(DRAWN)]
        found.append({"branch_ranks": ranks, "setting": name, "seconds": float(np.mean(times))})
    return found


def project(settings: dict[str, Measured]) -> dict[str, Any]:
    """All of the projection."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        skewed = product((settings,), (SKEWED,), ("skewed",), (IN_FLIGHT, FEWER), REPLICAS, POLICIES)
        policies = pool.map(run_policy, list(skewed), 1)
        jobs = [(settings, n, "spread", IN_FLIGHT, replicas, policy) for n, replicas in SPREAD for policy in POLICIES]
        spread = pool.map(run_policy, jobs, 1)
    return {
        "label": "PROJECTION, not measured: Dream-7B on H200s by data sheets; tokens a forward of the embedded model",
        "assumed": {"model": asdict(Model()), "link": asdict(ASSUMED), "prompt": PROMPT, "answer": ANSWER},
        "one_prompt": one_prompt(settings),
        "policies": policies,
        "spread": spread,
    }


def table_of(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of figures."""
    table = Table(title=title)
    for column in head:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def faster(policies: Sequence[dict[str, Any]]) -> list[float]:
    """How many times faster than in the order of the input each of these jobs is."""
    size = itemgetter("prompts", "in_flight", "replicas")
    base = {size(r): r["seconds"] for r in policies if r["policy"] == "input order"}
    return [base[size(r)] / r["seconds"] for r in policies]


def show(kept: dict[str, Any], console: Console) -> None:
    """The tables of the projection."""
    console.print(kept["label"])
    alone = kept["one_prompt"][0]["seconds"]
    ranks = [
        [str(r["branch_ranks"]), r["setting"], f"{r['seconds']:.3f}", f"{alone / r['seconds']:.2f}"]
        for r in kept["one_prompt"]
    ]
    console.print(table_of("PROJECTION: one prompt", ("branch ranks", "setting", "seconds", "times faster"), ranks))
    columns = ("prompts", "in flight", "replicas", "policy", "seconds", "times faster than in input order", "busy")
    for policies, lengths in (
        (kept["policies"], "one answer in twenty 8 times longer"),
        (kept["spread"], "log-normal"),
    ):
        rows = [
            [
                f"{r['prompts']:,}", str(r["in_flight"]), str(r["replicas"]), r["policy"], f"{r['seconds']:,.2f}",
                f"{times:.2f}", f"{r['mean_busy_s'] / r['seconds']:.0%}",
            ]
            for r, times in zip(policies, faster(policies), strict=True)
        ]  # fmt: skip
        console.print(table_of(f"PROJECTION: {lengths}", columns, rows))


def picture(kept: dict[str, Any]) -> str:
    """What the policies bring, by replicas."""
    colors = ("#94a3b8", "#2563eb", "#dc2626", "#059669", "#7c3aed")

    def paint(axes: Any) -> None:
        gained = list(zip(kept["policies"], faster(kept["policies"]), strict=True))
        for policy, color in zip([p for p in POLICIES if p != "input order"], colors, strict=True):
            times = [x for r, x in gained if r["policy"] == policy and r["in_flight"] == IN_FLIGHT]
            axes.plot(REPLICAS, times, "o-", color=color, label=policy)
        axes.axhline(1, color="#1f2933", linewidth=0.8, linestyle="--")
        axes.set(xscale="log", xlabel="data replicas of one GPU", ylabel="times faster than in input order")
        axes.set_title(f"{SKEWED:,} prompts, 1 answer in 20 is 8 x longer, {IN_FLIGHT} in flight", fontsize=10)
        axes.set_xticks(REPLICAS, [str(n) for n in REPLICAS])
        axes.xaxis.set_minor_formatter("")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.legend(frameon=False, fontsize=8)
        axes.figure.suptitle("PROJECTION, not measured: Dream-7B on H200s, roofline of data sheets", fontsize=11)

    return draw(RESULTS / "cluster.png", paint, (6.4, 4.6))


def main() -> None:
    """Do what was asked for, print and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--problems", type=int, default=240, help="of a calibrated setting, and of a validating job")
    parser.add_argument("--seconds", type=float, default=20, help="of timing steps, before and after a validating job")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    kept = read()
    if options.calibrate or "settings" not in kept:
        measured = all_gains(options.problems, 2)
        kept |= {"torch": torch.__version__, "problems": options.problems}
        kept["settings"] = {name: asdict(one) for name, one in measured.items()}
        write(kept)
    settings = {name: Measured(**one) for name, one in kept["settings"].items()}
    for name, one in settings.items():
        console.print(f"{name}: {one.tokens_per_forward:.2f} tokens a forward, {one.rows_per_token:.1f} rows a token")
    if options.validate:
        machine = {"machine": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0))}
        kept["validation"] = machine | cluster_validation.validate(settings, options.problems, options.seconds)
        write(kept)
        cluster_validation.show(kept["validation"]["trials"], console)
    if not (options.calibrate or options.validate):
        kept["projection"] = project(settings)
        write(kept)
        show(kept["projection"], console)
        console.print(f"picture: {RESULTS / picture(kept['projection'])}")


if __name__ == "__main__":
    main()
