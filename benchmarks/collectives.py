"""Seconds of the step's two collectives by size, between the ranks of `torchrun ... -m benchmarks.collectives`.

Rank 0 prints a JSON object: {"all_gather": {bytes: seconds}, "broadcast": {...}}; medians.
"""

from __future__ import annotations

import json
import statistics
import time

import torch

from lopa_dist.parallel.group import Group
from lopa_dist.parallel.launcher import detect
from lopa_dist.parallel.mesh import Mesh
from lopa_dist.parallel.stop import Stop

SIZES = (64, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
TURNS = 60


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    world = detect()
    group = Group(world, Mesh(1, world.size), "auto", 60, torch.device("cpu"), Stop(5))
    with group.failures.guard():
        found: dict[str, dict[int, float]] = {"all_gather": {}, "broadcast": {}}
        for size in SIZES:
            buffer = torch.zeros(size, dtype=torch.uint8)
            spent: dict[str, list[float]] = {"all_gather": [], "broadcast": []}
            for _ in range(TURNS):
                group.comm.all_gather(buffer[:1])  # so that all begin at once
                began = time.perf_counter()
                group.comm.all_gather(buffer)
                spent["all_gather"].append(time.perf_counter() - began)
                group.comm.all_gather(buffer[:1])
                began = time.perf_counter()
                group.comm.broadcast(buffer, 1)  # rank 0 receives: who sends need not wait
                spent["broadcast"].append(time.perf_counter() - began)
            for what, seconds in spent.items():
                found[what][size] = statistics.median(seconds)
        if world.rank == 0:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
