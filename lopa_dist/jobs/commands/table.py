"""`lopa-dist table RUN`: results with plain columns, for a spreadsheet or a data frame."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lopa_dist.encodable import encodable
from lopa_dist.jobs.run.results import result_lines
from lopa_dist.jobs.show.report import read_report
from lopa_dist.jobs.show.run_page import items_again, question
from lopa_dist.whole import whole

FIRST = ("id", "sample", "prompt", "text", "correct", "extracted", "finish_reason", "error")
ELSEWHERE = ("custom_id", "index", "sample", "usage", "tpf", "metadata")  # of a line, which have another form here


def write_table(folder: Path, file: Path) -> tuple[int, list[str], str]:
    """Write the results of a run as a `.csv` or `.parquet` file; returns rows, columns, and why prompts are missing.

    Raises:
        ValueError: no such run, or a file of another kind.
    """
    if file.suffix not in (".csv", ".parquet"):
        raise ValueError(f"--out {file}: name a .csv or a .parquet file")
    if not (folder / "results.jsonl").exists():
        if (folder / "journal").exists():
            raise ValueError(f"{folder}: not finished; `lopa-dist status {folder}` says how it goes on")
        raise ValueError(f"{folder}: no results.jsonl; name the folder of a run")
    prompts, missing = prompts_of(folder)
    columns: dict[str, None] = {}
    count = 0
    for row in rows(folder, prompts):
        columns |= dict.fromkeys(row)
        count += 1
    names = [name for name in FIRST if name in columns] + [name for name in columns if name not in FIRST]
    with whole(file) as partial:
        if file.suffix == ".parquet":
            write_parquet(partial, folder, prompts, names)
        else:
            with partial.open("w", encoding="utf-8", newline="") as out:
                writer = csv.DictWriter(out, names)
                writer.writeheader()
                writer.writerows(rows(folder, prompts))
    return count, names, missing


def write_parquet(file: Path, folder: Path, prompts: dict[int, str], names: list[str]) -> None:
    """Write all rows; a column whose values are of several kinds holds texts."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("a .parquet file needs pyarrow: pip install 'lopa_dist[eval]', or write .csv") from error
    found = list(rows(folder, prompts))
    table = {}
    for name in names:
        values = [row.get(name) for row in found]
        if len({type(value) for value in values} - {type(None)}) > 1:
            values = [None if value is None else str(value) for value in values]
        table[name] = values
    pyarrow.parquet.write_table(pyarrow.table(table), file)


def prompts_of(folder: Path) -> tuple[dict[int, str], str]:
    """By index, the prompts of a run, read from its input once more; and in words why there are none."""
    lines = {line["index"]: line["custom_id"] for _, line in result_lines(folder / "results.jsonl")}
    try:
        report = read_report(folder / "report.json")
        first, step = (report["task"].get(key, default) for key, default in (("shard", 0), ("shards", 1)))
        step = step if "shard" in report["task"] else 1
        found = {first + step * i: (item.custom_id, question(item)) for i, item in enumerate(items_again(report))}
    except (ValueError, OSError) as error:
        return {}, f"\nwithout prompts: {error}"
    if any(found.get(index, ("", ""))[0] != name for index, name in lines.items()):
        return {}, "\nwithout prompts: the input has changed since the run"
    return {index: found[index][1] for index in lines}, ""


def rows(folder: Path, prompts: dict[int, str]) -> Iterator[dict[str, Any]]:
    """The results of a run, each by the names of the columns; columns of the input keep their names where they can."""
    for _, line in result_lines(folder / "results.jsonl"):
        sample = line.get("sample")
        row: dict[str, Any] = {"id": line["custom_id"]}
        if sample is not None:
            row = {"id": line["custom_id"].removesuffix(f"#{sample}"), "sample": sample}
        if line["index"] in prompts:
            row["prompt"] = prompts[line["index"]]
        row |= {key: value for key, value in line.items() if key not in ELSEWHERE} | line.get("usage", {})
        if "tpf" in line:
            row["tokens_per_forward"] = line["tpf"]
        for key, value in line.get("metadata", {}).items():
            row[key if key not in row and key not in FIRST else f"input.{key}"] = value
        yield {key: plain(value) for key, value in row.items()}


def plain(value: Any) -> Any:
    """A value as a cell can hold it: lists and objects as JSON."""
    if isinstance(value, list | dict):
        value = json.dumps(value, ensure_ascii=False)
    return encodable(value) if isinstance(value, str) else value
