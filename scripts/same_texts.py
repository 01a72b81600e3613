"""Print how many requests of two runs have the same text.

python scripts/same_texts.py RUN OTHER_RUN
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def texts(run: str) -> dict[str, str]:
    """Return a run's texts by the ids of their requests."""
    lines = (json.loads(line) for line in (Path(run) / "results.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["custom_id"]: line["text"] for line in lines}


def main(one: str, other: str) -> None:
    """Print how many texts of two runs are equal; exit with 1 if a text differs or is missing."""
    first, second = texts(one), texts(other)
    same = sum(second.get(request) == text for request, text in first.items())
    print(f"{same} of {len(first)} texts of {Path(one).name} and {Path(other).name} are equal")
    sys.exit(same != len(first) or first.keys() != second.keys())


if __name__ == "__main__":
    main(*sys.argv[1:])
