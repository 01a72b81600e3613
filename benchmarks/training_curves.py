"""Draw the training curves in a run folder as one picture: ``python -m benchmarks.training_curves FOLDER PNG``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.plot import draw


def curves(folder: Path, picture: Path) -> None:
    """Draw the losses and, for held-out stories, the share of masked results predicted right, against minutes."""
    log = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    minutes = [entry["seconds"] / 60 for entry in log]

    def paint(panels: Any) -> None:
        left, right = panels
        left.plot(minutes, [e["loss"] for e in log], color="#94a3b8", label="training (with drills)")
        left.plot(minutes, [e["held_out_loss"] for e in log], color="#2563eb", label="held-out stories")
        left.set(title="Weighted loss", xlabel="minutes", ylim=(0, 3))
        left.legend(frameon=False)
        right.plot(minutes, [100 * e["held_out_numbers"] for e in log], color="#2563eb")
        right.set(title="Masked results predicted right, held out", xlabel="minutes", ylabel="%", ylim=(0, 100))

    draw(picture, paint, (9, 3.2), panels=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("picture", type=Path)
    curves(**vars(parser.parse_args()))
