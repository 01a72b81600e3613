"""The figures of a run, counted honestly, and the reference's way of counting beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lopa_dist.config import Config
from lopa_dist.engine.request import Generation
from lopa_dist.engine.statistics import Statistics
from lopa_dist.parallel.communicator import Communicator
from lopa_dist.parallel.launcher import World


def build_report(
    config: Config,
    generations: Sequence[Generation],
    correct: Sequence[bool],
    errors: int,
    statistics: Statistics,
    comm: Communicator,
    world: World,
    backend: str,
    versions: dict[str, str],
    decode_s: float,
    wall_s: float,
) -> dict[str, Any]:
    """`report.json` (DESIGN section 4).

    `completion_tokens` end at the first EOS; a forward is every pass of a sequence through the model, prefill
    included; time runs from admission to finish. `reference_counting` counts as the LoPA code does (spec section 7):
    filler included, one more step a sample, the first round's time left out.
    """
    tokens = np.array([len(g.tokens) for g in generations], float)
    forwards = np.array([g.forwards for g in generations], float)
    seconds = np.array([g.seconds for g in generations], float)
    appended = np.array([g.appended for g in generations], float)
    later = np.array([g.seconds - g.first_step_seconds for g in generations], float)
    rates = tokens / np.maximum(seconds, 1e-9)
    wins = [statistics.wins.get(j, 0) for j in range(config.decode.max_branches)]
    steps = max(1, statistics.steps)
    return {
        "schema": 1,
        "requests": len(generations) + errors,
        "errors": errors,
        **({"accuracy": float(np.mean(correct))} if len(correct) else {}),
        "completion_tokens": int(tokens.sum()),
        "forwards": int(forwards.sum()),
        "tpf": ratio(tokens.sum(), forwards.sum()),
        "tokens_per_s": {
            "mean": mean(rates),
            "max": float(rates.max(initial=0.0)),
            "top10": mean(np.sort(rates)[-10:]),
            "job": ratio(tokens.sum(), decode_s),
        },
        "latency_s": {f"p{q}": float(np.percentile(seconds, q)) if len(seconds) else 0.0 for q in (50, 90, 99)},
        "reference_counting": {
            "tokens": int(appended.sum()),
            "forwards": int(forwards.sum() + len(generations)),
            "tpf": ratio(appended.sum(), forwards.sum() + len(generations)),
            "tokens_per_s": mean(appended / np.maximum(later, 1e-9)),
        },
        "branch": {"k": config.decode.branches, "wins": wins},
        "step_ms": statistics.milliseconds(),
        "steps": statistics.steps,
        "comm_bytes_per_step": {what: amount / steps for what, amount in comm.traffic.bytes.items()},
        "world": {
            "size": world.size,
            "data": 1,
            "branch": comm.size,
            "tensor": 1,
            "backend": backend,
            "launcher": world.launcher,
        },
        "model": config.to_dict()["model"],
        "task": config.to_dict()["task"],
        "decode": config.to_dict()["decode"],
        "engine": config.to_dict()["engine"],
        "seed": config.seed,
        "versions": versions,
        "decode_s": decode_s,
        "wall_s": wall_s,
    }


def mean(values: Any) -> float:
    """The mean, 0 of nothing."""
    return float(np.mean(values)) if len(values) else 0.0


def ratio(a: float, b: float) -> float:
    """A / b, 0 where b is 0."""
    return float(a / b) if b else 0.0
