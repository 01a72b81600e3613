"""Measure how a long prompt delays other sequences, if it is computed at once, and if it is computed in chunks.

    python -m benchmarks.long_prompts

One of eight prompts has 8,192 tokens, and the others have 64. The model has random weights (26M parameters) and reads
prompts block by block (`decode.context=blocks`), on one thread. Each run has its own process, whose peak memory is
reported. Writes the results to benchmarks/results/long_prompts.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.answers import PUBLISHED
from benchmarks.gpu_shapes import random_model
from benchmarks.results import machine, show, write
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
DECODE = DecodeConfig(**PUBLISHED, branches=0, max_new_tokens=64, max_active_blocks=1, context="blocks")
PROMPTS = (64,) * 7 + (8192,)  # tokens of each prompt
CHUNKS = (None, 2048, 1024, 512)  # values of `engine.prefill_chunk`


def measure(chunk: int | None) -> dict[str, Any]:
    """Run the job once in this process, with chunks of `chunk` tokens, and return its figures."""
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
    """Measure all settings in turn, three times; write and print the medians."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        runs = pool.map(measure, CHUNKS * 3, chunksize=1)
    figures = [name for name in runs[0] if name != "chunk"]
    rows = [
        {"chunk": chunk}
        | {name: statistics.median(run[name] for run in runs if run["chunk"] == chunk) for name in figures}
        for chunk in CHUNKS
    ]
    write("long_prompts", machine() | {"prompts": PROMPTS, "rows": rows})
    columns = {"longest step": "{longest_step_s:.1f} s", "whole job": "{seconds:.1f} s", "peak": "{peak_mib:,.0f} MiB"}
    show("one prompt of 8,192 tokens", rows, {"engine.prefill_chunk": "{chunk}", **columns})


if __name__ == "__main__":
    main()
