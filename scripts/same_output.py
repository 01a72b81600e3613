"""Compare what two checkouts generate: ``python scripts/same_output.py BEFORE AFTER [--only NAME ...]``.

For changes that must not change any output. Both checkouts run the same fixed jobs on the embedded model through the
command line, with the interpreter that runs this program. Every line of `results.jsonl` must be the same, times aside,
and so must the figures of `report.json` that do not depend on time. Exits with 1 and names the jobs that differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LOPA = ["decode=embedded_plain", "decode.branches=3", "decode.score=gain"]
JOBS: dict[str, list[str]] = {
    "plain": ["decode=embedded_plain"],
    "control": ["decode=embedded_control"],
    "lopa": ["decode.branches=7"],
    "nested": ["decode.lookahead=nested", "decode.score=mean"],
    "lowest_fraction": ["decode.score=lowest_fraction", "decode.alpha=0.25"],
    "sliding_window": ["decode.score=sliding_window", "decode.tau_look=0.3"],
    "sampled": ["decode.temperature=0.7", "decode.top_p=0.9"],
    "block_causal": ["decode.window_attention=block_causal"],
    "cache_none": ["decode.cache=none", "task.limit=8"],
    "cache_prefix": ["decode.cache=prefix", "decode.canvas=whole"],
    "cache_dual": ["decode.cache=dual", "decode.canvas=whole"],
    "joint_stale": ["decode.prompt_attention=joint", "decode.boundary=stale"],
    "blocks_fill": ["decode.prompt_attention=blocks", "decode.boundary=fill", "decode.sub_block_size=8"],
    "block_diffusion": ["decode.max_active_blocks=1", "decode.force=leftmost"],
    "force_window": ["decode.force=window", "decode.confidence=margin"],
    "few_rows": ["engine.max_rows=150", "engine.kv_tokens=600"],
    "static": ["engine.attention=meta", "engine.graphs=always", "task.limit=6"],
    "two_ranks": [],
    "two_ranks_block_causal": ["decode.window_attention=block_causal"],
}
RANKS = {"two_ranks": 2, "two_ranks_block_causal": 2}
TIMES = ("latency_s", "first_step_s")
FIGURES = ("requests", "errors", "accuracy", "completion_tokens", "prompt_tokens", "forwards", "tpf", "branch", "steps")


def run(checkout: Path, name: str) -> dict[str, Any]:
    """What one job of a checkout gives: its result lines and figures, times aside."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS.get(name)}"]
        command = [sys.executable, *(launcher if name in RANKS else []), "-m", "lopa_dist", "task.limit=12"]
        command += [*([] if name in ("plain", "control") else LOPA), *JOBS[name]]
        command += [f"hydra.run.dir={folder}", "logging.progress=never", "logging.plots=false", "parallel.threads=1"]
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, env=os.environ | {"CI": "1"})
        if done.returncode:
            raise SystemExit(f"{name} in {checkout} failed:\n{done.stdout}\n{done.stderr}")
        lines = [json.loads(line) for line in (Path(folder) / "results.jsonl").read_text().splitlines()]
        report = json.loads((Path(folder) / "report.json").read_text())
    for line in lines:
        for key in TIMES:
            line.pop(key, None)
    figures = {key: report[key] for key in FIGURES if key in report}
    return {"lines": lines, "figures": figures}


def main() -> None:
    """Compare job by job."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--only", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--keep", type=Path, help="file that holds what BEFORE gave, read where it is there")
    options = parser.parse_args()
    kept = json.loads(options.keep.read_text()) if options.keep and options.keep.exists() else {}
    different = []
    for name in options.only:
        if name not in kept:
            kept[name] = run(options.before, name)
            if options.keep:
                options.keep.write_text(json.dumps(kept))
        same = kept[name] == run(options.after, name)
        print(f"{name}: {'same' if same else 'DIFFERENT'}", flush=True)
        different += [] if same else [name]
    if different:
        raise SystemExit(f"different: {', '.join(different)}")


if __name__ == "__main__":
    main()
