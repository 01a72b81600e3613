"""`figures.npz` of a shard's run: the figures of its report; `lopa-dist merge` makes the report of all from these."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from lopa_dist.atomic import atomic
from lopa_dist.engine.work import Work
from lopa_dist.jobs.folder.merged import Merged
from lopa_dist.jobs.folder.packed import Columns
from lopa_dist.jobs.folder.results import AGAIN, FIGURES
from lopa_dist.ragged import Ints

COUNTS = "counts"  # the one entry that is not a column


def write_figures(folder: Path, merged: Merged) -> None:
    """Write the figures of a shard's finished requests into its run folder."""
    counts = {"work": merged.work.totals(), "failed": merged.failed, "unjudged": merged.unjudged}
    columns = {name: merged.figures[name] for name in merged.figures.columns}
    held: dict[str, Any] = {COUNTS: np.array(json.dumps(counts)), **columns}
    with atomic(folder / FIGURES) as partial, partial.open("wb") as file:
        np.savez(file, **held)


def read_figures(shards: Iterable[tuple[Path, Ints]]) -> Merged:
    """Return the figures of all shards together, in input order.

    Args:
        shards: the run folder of each, and where its finished requests stand in the whole input.

    Raises:
        ValueError: the figures of a shard are damaged, or of other requests.
    """
    work, failed, unjudged = Work(), 0, 0
    parts: list[tuple[dict[str, Any], Ints]] = []
    for folder, places in shards:
        try:
            with np.load(folder / FIGURES) as file:
                columns = {name: file[name] for name in file.files}
            counts = json.loads(str(columns.pop(COUNTS)))
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"{folder / FIGURES}: {error}; start its job again, which generates nothing anew"
            ) from error
        if any(len(column) != len(places) for column in columns.values()):
            raise ValueError(f"{folder / FIGURES}: not of its results.jsonl; {AGAIN}")
        work.add(counts["work"])
        failed, unjudged = failed + counts["failed"], unjudged + counts["unjudged"]
        parts.append((columns, places))
    order = np.argsort(np.concatenate([places for _, places in parts]))
    joined = Columns()
    joined.count = len(order)
    for name in {name: None for columns, _ in parts for name in columns}:
        values = [columns.get(name, np.full(len(places), np.nan)) for columns, places in parts]
        joined.columns[name] = array("d", np.concatenate(values)[order].tobytes())
    return Merged(joined, work, failed, unjudged, [])
