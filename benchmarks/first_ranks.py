"""Several ranks in `gpu_first`: two that share a device, and NCCL with one, inside and outside of a graph.

As a program it is one of the two ranks: `python -m benchmarks.first_ranks RANK STORE DEVICE`. They talk through the
host, by Gloo, because NCCL refuses two ranks on one GPU. What runs on the device is what runs on several.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore

from benchmarks.first_facts import Fact
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request
from lopa_dist.engine.static_runner import Replay
from lopa_dist.models.checkpoint import load_model
from lopa_dist.models.files import EMBEDDED
from lopa_dist.models.tokenizer import load_tokenizer
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Communicator, Solo, TorchCommunicator
from lopa_dist.tasks.word_problems import problems

GRAPHS = EngineConfig(4, attention="meta", graphs="always")  # the path that a GPU runs
SECONDS = 40  # that two ranks may take
DECODING: dict[str, Any] = {"context": "d2f", "block_size": 16, "max_new_tokens": 64}
LOOKAHEAD = DecodeConfig(branches=7, verify="confidence", drafts=0, **DECODING)
LEAST = 0.97  # of tokens: on a GPU a rank stacks other branches, and so rounds otherwise


def tokens_of(
    model: Transformer, options: EngineConfig, decode: DecodeConfig, count: int, comm: Communicator | None = None
) -> list[list[int]]:
    """Return the answers to a few word problems, which the embedded model was trained for."""
    words = load_tokenizer(EMBEDDED)
    requests = []
    for i, problem in enumerate(islice(problems("held_out", 1), count)):
        ask = [{"role": "user", "content": problem.question}]
        text = str(words.apply_chat_template(ask, tokenize=False, add_generation_prompt=True))
        ids = words(text, add_special_tokens=False).input_ids
        requests.append(Request(i, ids, decode.max_new_tokens, 77 + i))
    made = sorted(Engine(model, decode, comm or Solo(), options).generate(requests), key=lambda one: one.request.index)
    return [one.tokens for one in made]


def agreement(wanted: list[list[int]], found: list[list[int]]) -> float:
    """Return the share of positions that have the same token; where one answer has ended, they differ."""
    pairs = list(zip(wanted, found, strict=True))
    same = sum(a == b for one, other in pairs for a, b in zip(one, other, strict=False))
    return same / max(1, sum(max(len(one), len(other)) for one, other in pairs))


def count_on(device: torch.device) -> int:
    """Return how many problems are solved."""
    return 8 if device.type == "cuda" else 2


def rank(number: int, store: Path, device: torch.device) -> None:
    """Solve the problems as one of two branch ranks; print the answers."""
    limit = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", store=FileStore(str(store), 2), rank=number, world_size=2, timeout=limit)
    assert dist.group.WORLD is not None
    comm = TorchCommunicator(dist.group.WORLD)
    model = load_model(EMBEDDED, torch.float32, device)
    with torch.inference_mode():
        made = tokens_of(model, GRAPHS, LOOKAHEAD, count_on(device), comm)
    print(json.dumps({"tokens": made, "bytes": comm.traffic.bytes}))
    dist.destroy_process_group()


def two_ranks(device: torch.device) -> dict[str, Any]:
    """Two processes on one device against one."""
    model = load_model(EMBEDDED, torch.float32, device)
    wanted = tokens_of(model, GRAPHS, LOOKAHEAD, count_on(device))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.first_ranks"]
        started = [
            subprocess.Popen(
                [*command, str(number), f"{folder}/store", str(device)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for number in range(2)
        ]  # fmt: skip
        try:
            said = [child.communicate(timeout=SECONDS) for child in started]
        finally:
            for child in started:
                child.kill()
    lost = [f"rank {n}: {said[n][1][-3000:]}" for n, child in enumerate(started) if child.returncode]
    if lost:
        raise RuntimeError("\n".join(lost))
    found = [json.loads(out.splitlines()[-1]) for out, _ in said]
    alike, equal = found[0]["tokens"] == found[1]["tokens"], agreement(wanted, found[0]["tokens"])
    return {"ok": alike and equal >= LEAST, "alike": alike, "equal": equal, "bytes": [one["bytes"] for one in found]}


def alone(device: torch.device, captured: bool) -> dict[str, Any]:
    """A world of one: its collectives give what they got, as often as they are replayed."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        comm = TorchCommunicator(dist.group.WORLD)
        given = torch.zeros(3, 5, dtype=torch.int32, device=device)
        result, sent = torch.empty(1, 3, 5, dtype=torch.int32, device=device), given + 7

        def collectives() -> None:
            result.copy_(comm.all_gather(given))
            sent.copy_(given)
            comm.broadcast(sent, 0)

        replay, equal = Replay(), []
        for number in range(5):
            given.fill_(number)
            replay(collectives, device, None) if captured else collectives()
            equal.append(same(result, number) and same(sent, number))
        made = not captured or device.type == "cpu" or replay.graph is not None
        return {"ok": all(equal) and made, "backend": backend, "equal": equal}
    finally:
        dist.destroy_process_group()


def same(tensor: Tensor, number: int) -> bool:
    """Whether a tensor holds one number."""
    return bool((tensor == number).all())


def ranks(device: torch.device) -> Iterator[Fact]:
    """Collectives."""
    yield "collectives of one rank", partial(alone, device, False)
    yield "collectives of one rank, in a graph", partial(alone, device, True)
    yield "two ranks on one device", partial(two_ranks, device)


if __name__ == "__main__":
    rank(int(sys.argv[1]), Path(sys.argv[2]), torch.device(sys.argv[3]))
