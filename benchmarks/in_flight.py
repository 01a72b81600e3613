"""Measure tokens per second of the embedded model, by the number of sequences in flight.

    python -m benchmarks.in_flight                     # 256 problems each, 1, 4, 16, 64 and 256 in flight: half an hour
    python -m benchmarks.in_flight --problems 64 --in-flight 1 --in-flight 16

Runs on one thread. For each number in flight, the ways of decoding run one after the other, so that other work on the
machine affects them alike. Writes the results to benchmarks/results/in_flight.json.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from benchmarks.answers import COLUMNS, PUBLISHED, answer, load
from benchmarks.results import replace_rows, show
from lopa_dist.decode import DecodeConfig
from lopa_dist.tasks.embedded import Arithmetic

IN_FLIGHT = (1, 4, 16, 64, 256)
BASE = DecodeConfig(block_size=16, max_new_tokens=64, branches=0, **PUBLISHED)
VERIFIED: dict[str, Any] = {"verify": "agreement", "drafts": 10}
ONE_BLOCK: dict[str, Any] = {"max_active_blocks": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, one block": ONE_BLOCK,
    "control, one block": {"extra_fill": 1, **ONE_BLOCK},
    "10 drafts": VERIFIED,
    "10 drafts, one block": {**VERIFIED, **ONE_BLOCK},
}


def main() -> None:
    """Measure every case; print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=256)
    parser.add_argument("--in-flight", type=int, action="append", help=f"sequences; may be repeated ({IN_FLIGHT})")
    arguments = parser.parse_args()
    builder, task = load(), Arithmetic(arguments.problems)
    items, rows = list(task.items()), []
    for in_flight in arguments.in_flight or IN_FLIGHT:
        for name, setting in SETTINGS.items():
            figures = answer(builder, replace(BASE, **setting), task, items, in_flight).figures
            rows.append({"decoding": name, "in_flight": in_flight, "problems": arguments.problems, **figures})
    replace_rows("in_flight", rows, ("decoding", "in_flight", "problems"))
    show(f"{arguments.problems} problems", rows, {"decoding": "{decoding}", "in flight": "{in_flight}", **COLUMNS})


if __name__ == "__main__":
    main()
