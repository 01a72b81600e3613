"""Check ranks for `gpu_first`: two ranks that share a device, and NCCL with one rank, outside and inside a graph.

As a program, this file is one of the two ranks: `python -m benchmarks.first_ranks RANK STORE DEVICE`. The two ranks
communicate through the host, with Gloo, because NCCL refuses two ranks on one GPU. On the device, they run the same
work as ranks on several devices.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore

from benchmarks.first_facts import Fact
from benchmarks.first_texts import GRAPHS, LOOKAHEAD, agreement, count_on, tokens_of
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.static_runner import Replay
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.files import EMBEDDED
from lopa_dist.parallel.communicator import TorchCommunicator

SECONDS = {"cuda": 40, "cpu": 400}  # time limit for two ranks; even toy shapes may take long on a busy CPU
LEAST = 0.97  # least share of equal tokens: on a GPU, a rank stacks other branches in a tile, and so rounds differently


def lookahead(device: torch.device) -> DecodeConfig:
    """Return how the ranks decode: on a CPU, where kernels are interpreted, less far and less long."""
    return LOOKAHEAD if device.type == "cuda" else replace(LOOKAHEAD, branches=3, max_new_tokens=16)


def rank(number: int, store: Path, device: torch.device) -> None:
    """Solve the problems as the branch rank `number` of two, which meet through the file `store`; print the answers."""
    limit = timedelta(seconds=SECONDS[device.type])
    dist.init_process_group("gloo", store=FileStore(str(store), 2), rank=number, world_size=2, timeout=limit)
    assert dist.group.WORLD is not None
    comm = TorchCommunicator(dist.group.WORLD)
    model = load_model(EMBEDDED, torch.float32, device)
    with torch.inference_mode():
        tokens = tokens_of(model, GRAPHS, lookahead(device), count_on(device), comm)
    print(json.dumps({"tokens": tokens, "bytes": comm.traffic}))
    dist.destroy_process_group()


def two_ranks(device: torch.device) -> dict[str, Any]:
    """Compare the answers of two branch ranks on one device with those of a single process."""
    model = load_model(EMBEDDED, torch.float32, device)
    expected = tokens_of(model, GRAPHS, lookahead(device), count_on(device))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.first_ranks"]
        children = [
            subprocess.Popen(
                [*command, str(number), f"{folder}/store", str(device)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for number in range(2)
        ]  # fmt: skip
        try:
            outputs = [child.communicate(timeout=SECONDS[device.type]) for child in children]
        finally:
            for child in children:
                child.kill()
    failed = [f"rank {n}: {outputs[n][1][-3000:]}" for n, child in enumerate(children) if child.returncode]
    if failed:
        raise RuntimeError("\n".join(failed))
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in outputs)
    alike, equal = first["tokens"] == second["tokens"], agreement(expected, first["tokens"])
    sent = [first["bytes"], second["bytes"]]
    return {"ok": alike and equal >= LEAST, "alike": alike, "equal": equal, "bytes": sent}


def one_rank(device: torch.device, captured: bool) -> dict[str, Any]:
    """Check five times that the collectives of a single rank return their inputs; if `captured`, in a graph."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        comm = TorchCommunicator(dist.group.WORLD)
        given = torch.zeros(3, 5, dtype=torch.int32, device=device)
        gathered, sent = torch.empty(1, 3, 5, dtype=torch.int32, device=device), given + 7

        def collectives() -> None:
            gathered.copy_(comm.all_gather(given))
            sent.copy_(given)
            comm.broadcast(sent, 0)

        replay, equal = Replay(), []
        for number in range(5):
            given.fill_(number)
            replay(collectives, device, None) if captured else collectives()
            equal += [bool((result == number).all()) for result in (gathered, sent)]
        was_captured = not captured or device.type == "cpu" or replay.graph is not None
        return {"ok": all(equal) and was_captured, "backend": backend, "equal": equal}
    finally:
        dist.destroy_process_group()


def ranks(device: torch.device) -> Iterator[Fact]:
    """Yield the facts about collectives of one rank, and about two ranks."""
    yield "collectives of one rank", partial(one_rank, device, False)
    yield "collectives of one rank, in a graph", partial(one_rank, device, True)
    yield "two ranks on one device", partial(two_ranks, device)


if __name__ == "__main__":
    rank(int(sys.argv[1]), Path(sys.argv[2]), torch.device(sys.argv[3]))
