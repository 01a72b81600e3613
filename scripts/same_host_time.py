"""Compare the host time of two checkouts: ``python scripts/same_host_time.py BEFORE AFTER [--rounds N] [--bar X]``.

Use this for changes that must not make a step slower. The program measures what a GPU would wait for in each step
(`benchmarks.host_time`), in processor time, which other programs hardly change. The two checkouts take turns, each time
in a new process, and medians over the rounds are compared. If a way of decoding takes more time than the bar allows, it
is marked as slower, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

MEASURE = """
import json, statistics, sys, torch
from benchmarks.host_time import *

torch.set_num_threads(1)
builder = EngineBuilder(ModelOptions(dtype="fp32"), torch.device("cpu"))
items = list(Arithmetic(256).items())
found = {}
for name in ("plain", "LoPA, k = 7", "verified, 10 drafts"):
    for sequences, count in ((1, 24), (64, 128)):
        settings = {"verify": "confidence", "drafts": 0, **DECODINGS[name]}
        config = DecodeConfig(block_size=16, max_new_tokens=64, **settings)
        requests = requests_of(items[:count], builder.tokenizer, config.max_new_tokens)
        _, records = generate(builder, config, sequences, requests, [])
        found[f"{name}; {sequences} in flight"] = statistics.median(
            exposed(builder, config, sequences, requests, records)
        )
print(json.dumps(found))
"""


def measured(checkout: Path) -> dict[str, float]:
    """Return the milliseconds per step of each way of decoding, measured by the checkout's own code."""
    environment = os.environ | {"PYTHONPATH": str(checkout.resolve())}
    command = [sys.executable, "-c", MEASURE]
    done = subprocess.run(command, env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bar", type=float, default=1.05, help="the most that AFTER may take, in times of BEFORE")
    arguments = parser.parse_args()
    rounds = [(measured(arguments.before), measured(arguments.after)) for _ in range(arguments.rounds)]
    slower = 0
    for name in rounds[0][0]:
        before, after = (median(one[which][name] for one in rounds) for which in (0, 1))
        over = after > arguments.bar * before
        slower += over
        print(f"{name:32} {before:.3f} -> {after:.3f} ms, {after / before:.2f} x{'   SLOWER' * over}", flush=True)
    return int(slower > 0)


if __name__ == "__main__":
    sys.exit(main())
