"""What a long prompt does to the sequences beside it, computed at once and in chunks.

    python -m benchmarks.long_prompts

One of eight prompts has 8,192 tokens, the others 64, on a model of random weights (27M parameters) whose prompts are
causal by blocks, on one thread. Each run has a process of its own, whose peak memory is reported. The table goes to
benchmarks/results/long_prompts.json, too.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import resource
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.embedded import RESULTS
from benchmarks.gpu_shapes import random_model
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.loop import Engine
from lopa_dist.engine.request import Request
from lopa_dist.models.config import ModelConfig
from lopa_dist.parallel.communicator import Solo

MODEL = ModelConfig(
    family="Dream", vocab_size=1024, hidden_size=512, layers=8, heads=8, kv_heads=4, head_dim=64,
    intermediate_size=1536, rms_eps=1e-6, rope_theta=10_000.0, qkv_bias=True, tied=False, shift=True, mask_id=1,
    eos_ids=(0,), pad_id=0, max_positions=16_384,
)  # fmt: skip
DECODE = DecodeConfig(
    verify="confidence",
    drafts=0,
    branches=0,
    max_new_tokens=64,
    max_active_blocks=1,
    context="blocks",
)
PROMPTS = (64,) * 7 + (8192,)  # tokens
CHUNKS = (None, 2048, 1024, 512)


def measure(chunk: int | None) -> dict[str, Any]:
    """Run the job once in this process."""
    torch.set_num_threads(1)
    model = random_model(MODEL, torch.device("cpu"))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, MODEL.vocab_size, size=tokens).tolist() for tokens in PROMPTS]
    requests = [Request(i, prompt, DECODE.max_new_tokens, i) for i, prompt in enumerate(prompts)]
    ends = [time.perf_counter()]
    settings = EngineConfig(len(requests), prefill_chunk=chunk)
    engine = Engine(model, DECODE, Solo(), settings, on_step=lambda _: ends.append(time.perf_counter()))
    assert len(list(engine.generate(requests))) == len(requests)
    return {
        "chunk": chunk,
        "longest_step_s": max(np.diff(ends)),
        "seconds": ends[-1] - ends[0],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """Measure every setting three times in turn, and print and keep the medians."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        runs = pool.map(measure, CHUNKS * 3, chunksize=1)
    figures = [name for name in runs[0] if name != "chunk"]
    rows = [
        {"chunk": chunk}
        | {name: statistics.median(run[name] for run in runs if run["chunk"] == chunk) for name in figures}
        for chunk in CHUNKS
    ]
    kept = {"machine": platform.machine(), "torch": torch.__version__, "prompts": PROMPTS, "rows": rows}
    (RESULTS / "long_prompts.json").write_text(json.dumps(kept, indent=1) + "\n")
    table = Table(
        "engine.prefill_chunk", "longest step", "whole job", "peak memory", title="one prompt of 8,192 tokens"
    )
    for row in rows:
        chunk = "null" if row["chunk"] is None else f"{row['chunk']:,}"
        table.add_row(chunk, f"{row['longest_step_s']:.1f} s", f"{row['seconds']:.1f} s", f"{row['peak_mib']:,.0f} MiB")
    Console(width=None if sys.stdout.isatty() else 150).print(table)


if __name__ == "__main__":
    main()
