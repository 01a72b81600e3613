"""Count the experts' weights that a forward reads, by its rows, and compare a layer's time with that of a plain loop.

    python -m benchmarks.experts                    # both parts: seconds for the bytes, a minute for the times
    python -m benchmarks.experts --part bytes

Bytes: routers with the published sizes and random weights choose experts for random rows. These rows choose
independently. Rows of one text choose more alike, and so touch fewer experts.

Time: processor time on one thread, of this package's layer, and of a loop over all experts in which each expert takes
the rows that chose it. The two take turns, and the best of several runs counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.results import show
from lopa_dist.models.config import Experts
from lopa_dist.models.experts import Gate, SparseMLP

HIDDEN = 2048
ROUTERS = {
    "LLaDA2.0-mini": (Experts(256, 8, 512, "grouped_sigmoid", True, 2.5, 8, 4), 19),
    "SDAR-30B-A3B, RND1": (Experts(128, 8, 768, "softmax", True), 48),
}
"""For each model: its experts, and how many layers have experts."""
ROWS = (1, 4, 6, 10, 16, 32, 38, 50, 62, 128, 256, 512)
DRAWS = 20
WIDTH, LAYER = 1024, Experts(64, 8, 512, "softmax", True)  # hidden size and experts of the layer that is timed


def touched(experts: Experts, rows: int, draws: int = DRAWS, hidden: int = HIDDEN) -> float:
    """Return how many experts the rows of a forward choose, on average over `draws` random routers."""
    draw, found = torch.Generator().manual_seed(rows), 0
    for _ in range(draws):
        gate = Gate(hidden, experts).requires_grad_(False)
        gate.weight.normal_(std=hidden**-0.5, generator=draw)
        chosen, _ = gate(torch.randn(rows, hidden, generator=draw))
        found += len(chosen.unique())
    return found / draws


def show_bytes() -> None:
    """Print how many experts a forward touches, and the gigabytes of their weights in bf16."""
    rows = []
    for count in ROWS:
        row = {"rows": str(count)}
        for name, (experts, layers) in ROUTERS.items():
            chosen = touched(experts, count)
            row[f"{name}: experts"] = f"{chosen:.0f}"
            row[f"{name}: GB"] = f"{chosen * 3 * experts.size * HIDDEN * 2 * layers / 1e9:.1f}"
        rows.append(row)
    show("experts of a forward", rows)


def loop(mlp: SparseMLP, x: Tensor) -> Tensor:
    """Return the output of the layer `mlp`, computed by a loop over experts; each takes the rows that chose it."""
    chosen, weights = mlp.gate(x)
    out = torch.zeros_like(x)
    for number in range(mlp.experts.count):
        rows, place = (chosen == number).nonzero(as_tuple=True)
        gate, up = F.linear(x[rows], mlp.gate_up[number].flatten(0, 1)).chunk(2, -1)
        out.index_add_(0, rows, F.linear(F.silu(gate) * up, mlp.down[number]) * weights[rows, place, None])
    return out


@torch.inference_mode()
def show_times() -> None:
    """Print the milliseconds of a layer, for several numbers of rows."""
    mlp = SparseMLP(WIDTH, LAYER).requires_grad_(False)
    for weight in mlp.parameters():
        weight.normal_(std=WIDTH**-0.5)
    ways: dict[str, Callable[[Tensor], Tensor]] = {"this package": mlp, "loop": partial(loop, mlp)}
    table = []
    for rows in (1, 16, 512):
        x, best = torch.randn(rows, WIDTH), dict.fromkeys(ways, float("inf"))
        for _ in range(7 if rows == 512 else 25):
            for name, way in ways.items():
                began = time.process_time()
                way(x)
                best[name] = min(best[name], time.process_time() - began)
        table.append({"rows": rows} | {name: f"{1000 * seconds:.2f}" for name, seconds in best.items()})
    show(f"milliseconds of a layer: {LAYER.count} experts of {LAYER.size}, hidden size {WIDTH}", table)


def main() -> None:
    """Print the tables of the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("bytes", "time"), action="append")
    parts = parser.parse_args().part or ["bytes", "time"]
    torch.set_num_threads(1)
    for part in parts:
        show_bytes() if part == "bytes" else show_times()


if __name__ == "__main__":
    main()
