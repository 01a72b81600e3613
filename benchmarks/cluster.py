"""Simulate jobs on 8 to 512 data replicas, to find how much sooner they end if requests run in a good order.

    python -m benchmarks.cluster                # the projection and its picture, from measured gains: some minutes
    python -m benchmarks.cluster --calibrate    # measure the gains of the embedded model again: minutes on two cores
    python -m benchmarks.cluster --validate     # run real jobs on this machine and compare them with their simulation

Also simulates one prompt on 1 to 8 branch ranks. The results are in benchmarks/results/cluster.json; a run changes only
the part that it was asked for.

The projection is NOT a measurement. The time of a forward comes from a roofline of data-sheet figures
(`latency_model.py`). Tokens per forward and rows per step are those that the embedded model has, whose answers have at
most some 60 tokens.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import product
from operator import itemgetter
from typing import Any

import numpy as np
from matplotlib.ticker import NullLocator

from benchmarks.cluster_jobs import Measured, all_gains, validate
from benchmarks.cluster_simulator import Cluster, Requests, simulate
from benchmarks.embedded import BASE
from benchmarks.latency_model import ASSUMED, Load, Model, exchange
from benchmarks.plot import draw
from benchmarks.results import RESULTS, machine, read, show, write

MODEL = Model()
IN_FLIGHT = (64, 16)  # most sequences in flight on a data replica; 16 is the default of a job
PROMPT, ANSWER = 512, 256  # tokens of every prompt; mean tokens of an answer, the long ones apart
PROMPTS, REPLICAS = 20_000, (8, 32, 128, 512)
DRAWN = 200  # simulations of one prompt, each with other draws
HOST = "verified, 10 drafts"  # the decoding of `host_time.json` that is like these settings
BRANCHES = {1: "k=0 m=10", 2: "k=1 m=10", 4: "k=3 m=10", 8: "k=7 m=10"}  # setting for each number of branch ranks
POLICIES = {"input order": "input", "longest first": "longest", "longest first, dealt out": "dealt"}


def host_seconds() -> Callable[[int], float]:
    """Return a function from the number of sequences to the seconds of a step in which a device waits for the host.

    `host_time.py` measured these seconds on a CPU.
    """
    verified = [r for r in read("host_time")["rows"] if r["decoding"] == HOST and r["threads"] > 1]
    chosen = {r["sequences"]: r["exposed"] / 1000 for r in verified}
    return lambda sequences: float(np.interp(sequences, list(chosen), list(chosen.values())))


def gpus(measured: Measured, replicas: int, branch: int, most: int) -> Cluster:
    """Return a cluster of `replicas` replicas of Dream-7B, each with `branch` branch ranks, on H200s.

    A step takes the forward's time by the roofline, the host's time, and the time of the exchange between branch ranks.

    Args:
        measured: the gains of the setting with which the replicas decode.
        replicas: number of data replicas.
        branch: branch ranks of each replica.
        most: most sequences in flight on a replica.
    """
    host, block = host_seconds(), BASE["block_size"]

    def seconds(rows: float, sequences: int) -> float:
        commits = measured.tokens_per_forward / block
        load = Load(measured.branch_limit, sequences, measured.predictions, commits, block)
        return MODEL.forward(rows) + host(sequences) + exchange(MODEL.kv_bytes, ASSUMED, load, branch)

    return Cluster(replicas, measured.gains(branch), seconds, most)


def run_policy(job: tuple[dict[str, Measured], int, int, str]) -> dict[str, Any]:
    """Simulate a job, given as (settings, sequences in flight, replicas, policy), and return its figures.

    The lengths of answers are random, and one answer in twenty gets eight times its length.
    """
    settings, sequences, replicas, policy = job
    random = np.random.default_rng(0)
    answers = random.integers(ANSWER // 2, ANSWER * 3 // 2 + 1, PROMPTS)
    answers = np.where(random.random(PROMPTS) < 0.05, 8 * answers, answers)
    cluster = replace(gpus(settings[BRANCHES[1]], replicas, 1, sequences), order=POLICIES[policy])
    outcome = simulate(Requests(np.full(PROMPTS, PROMPT), answers), cluster)
    about = {"prompts": PROMPTS, "in_flight": sequences, "replicas": replicas, "policy": policy}
    return about | {"seconds": outcome.seconds, "mean_busy_s": float(outcome.busy.mean())}


def one_prompt(settings: dict[str, Measured]) -> list[dict[str, Any]]:
    """Return the seconds until one prompt is answered on 1 to 8 branch ranks: the means of `DRAWN` simulations.

    The simulations differ in the tokens that the steps gain.
    """
    request, rows = Requests(np.array([PROMPT]), np.array([ANSWER])), []
    for ranks, name in BRANCHES.items():
        cluster = gpus(settings[name], 1, ranks, 1)
        seconds = float(np.mean([simulate(request, cluster, seed).seconds for seed in range(DRAWN)]))
        rows.append({"branch_ranks": ranks, "setting": name, "seconds": seconds})
    return rows


def project(settings: dict[str, Measured]) -> dict[str, Any]:
    """Return the whole projection: one prompt on several branch ranks, and the policies on many replicas."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        policies = pool.map(run_policy, list(product((settings,), IN_FLIGHT, REPLICAS, POLICIES)), 1)
    return {
        "label": "PROJECTION, not measured: Dream-7B on H200s by data sheets; tokens per forward of the embedded model",
        "assumed": {"model": asdict(MODEL), "link": asdict(ASSUMED), "prompt": PROMPT, "answer": ANSWER},
        "one_prompt": one_prompt(settings),
        "policies": policies,
    }


def faster(policies: Sequence[dict[str, Any]]) -> list[float]:
    """Return how many times as fast each job is as the same job in input order."""
    size = itemgetter("in_flight", "replicas")
    base = {size(r): r["seconds"] for r in policies if r["policy"] == "input order"}
    return [base[size(r)] / r["seconds"] for r in policies]


def show_projection(projection: dict[str, Any]) -> None:
    """Print the tables of the projection."""
    print(projection["label"])
    alone = projection["one_prompt"][0]["seconds"]
    ranks = [{**r, "times": alone / r["seconds"]} for r in projection["one_prompt"]]
    columns = {"setting": "{setting}", "seconds": "{seconds:.3f}", "times faster": "{times:.2f}"}
    show("PROJECTION: one prompt", ranks, {"branch ranks": "{branch_ranks}", **columns})
    policies = projection["policies"]
    rows = [
        {**r, "times": times, "busy": r["mean_busy_s"] / r["seconds"]}
        for r, times in zip(policies, faster(policies), strict=True)
    ]
    columns = {
        "policy": "{policy}", "in flight": "{in_flight}", "replicas": "{replicas}", "seconds": "{seconds:,.2f}",
        "times faster than in input order": "{times:.2f}", "busy": "{busy:.0%}",
    }  # fmt: skip
    show(f"PROJECTION: {PROMPTS:,} prompts, one answer in twenty 8 times longer", rows, columns)


def show_trials(trials: list[dict[str, Any]]) -> None:
    """Print the measured figures of real jobs next to the simulated ones."""
    rows = []
    for trial in trials:
        row = {"data replicas": trial["data"]}
        for name in ("forwards", "steps", "seconds"):
            real, simulated = (np.max(trial[of][name]) for of in ("measured", "simulated"))
            row[name] = f"{real:,.1f} -> {simulated:,.1f} ({simulated / real - 1:+.1%})"
        rows.append(row)
    show(f"Jobs of {trials[0]['problems']} problems on this machine: measured -> simulated", rows)


def picture(projection: dict[str, Any]) -> str:
    """Draw how many times as fast the policies are as input order, by replicas; return the file's name."""
    colors = ("#94a3b8", "#2563eb")

    def paint(axes: Any) -> None:
        gained = list(zip(projection["policies"], faster(projection["policies"]), strict=True))
        for policy, color in zip([p for p in POLICIES if p != "input order"], colors, strict=True):
            times = [x for r, x in gained if r["policy"] == policy and r["in_flight"] == IN_FLIGHT[0]]
            axes.plot(REPLICAS, times, "o-", color=color, label=policy)
        axes.axhline(1, color="#1f2933", linewidth=0.8, linestyle="--")
        axes.set(xscale="log", xlabel="data replicas of one GPU", ylabel="times faster than in input order")
        axes.set_title(f"{PROMPTS:,} prompts, 1 answer in 20 is 8 x longer, {IN_FLIGHT[0]} in flight", fontsize=10)
        axes.set_xticks(REPLICAS, [str(n) for n in REPLICAS])
        axes.xaxis.set_minor_formatter("")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.legend(frameon=False, fontsize=8)
        axes.figure.suptitle("PROJECTION, not measured: Dream-7B on H200s, roofline of data sheets", fontsize=11)

    return draw(RESULTS / "cluster.png", paint, (6.4, 4.6))


def main() -> None:
    """Run the parts that were asked for; print and write their results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--problems", type=int, default=240, help="of a calibrated setting, and of a validating job")
    parser.add_argument("--seconds", type=float, default=20, help="of timing steps, before and after a validating job")
    options = parser.parse_args()
    content = read("cluster")
    if options.calibrate or "settings" not in content:
        measured = all_gains(options.problems, 2)
        content |= {"torch": machine()["torch"], "problems": options.problems}
        content["settings"] = {name: asdict(one) for name, one in measured.items()}
        write("cluster", content)
    settings = {name: Measured(**one) for name, one in content["settings"].items()}
    columns = {"tokens per forward": "{tokens_per_forward:.2f}", "rows per token": "{rows_per_token:.1f}"}
    rows = [{"name": name, **one} for name, one in content["settings"].items()]
    show("gains of the embedded model", rows, {"setting": "{name}", **columns})
    if options.validate:
        content["validation"] = machine() | validate(settings, options.problems, options.seconds)
        write("cluster", content)
        show_trials(content["validation"]["trials"])
    if not (options.calibrate or options.validate):
        content["projection"] = project(settings)
        write("cluster", content)
        show_projection(content["projection"])
        print(f"picture: {RESULTS / picture(content['projection'])}")


if __name__ == "__main__":
    main()
