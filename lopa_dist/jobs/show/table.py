"""`lopa-dist table RUN`: results with plain columns, for a spreadsheet or a data frame."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from lopa_dist.atomic import atomic
from lopa_dist.encodable import encodable
from lopa_dist.jobs.folder.results import result_lines
from lopa_dist.jobs.show.report import read_report, why_no_results
from lopa_dist.jobs.show.run_page import items_again, question
from lopa_dist.remote import is_remote, put
from lopa_dist.tasks.rows import ending as ending_of
from lopa_dist.tasks.rows import files_of, is_dataset
from lopa_dist.tasks.rows import rows as source_rows
from lopa_dist.tasks.task import Item

AT_ONCE = 1000  # rows in memory
FIRST = ("id", "sample", "prompt", "text", "correct", "extracted", "finish_reason", "error")
ELSEWHERE = ("custom_id", "index", "sample", "usage", "tpf", "metadata")  # of a line, which have another form here


class Large:
    """The kind of integers that no column of integers holds: they become texts."""


def fits(value: int) -> bool:
    """Return whether an integer has 64 bits."""
    return -(2**63) <= value < 2**63


def write_table(folder: Path, out: str | Path, key: str = "--out") -> tuple[int, list[str], str]:
    """Write the results of a run as a `.csv` or `.parquet` file; returns rows, columns, and why prompts are missing.

    Args:
        folder: of the run.
        out: the file, perhaps elsewhere (`lopa_dist.remote`).
        key: what named it, for messages.

    Raises:
        ValueError: no such run, a file of another kind, or one that cannot be written.
    """
    ending = PurePosixPath(out).suffix
    if ending not in (".csv", ".parquet"):
        raise ValueError(f"{key} {out}: name a .csv or a .parquet file")
    if not (folder / "results.jsonl").exists():
        raise ValueError(why_no_results(folder, "no results.jsonl; name the folder of a run"))
    missing = why_without_prompts(folder)
    types = input_types(folder) if ending == ".parquet" and not missing else {}
    taken = {name for _, line in result_lines(folder / "results.jsonl") for name in own_columns(line)} | {*FIRST}
    kinds: dict[str, set[type]] = {}
    own: dict[str, Any] = {}
    count = 0
    for row in rows(folder, not missing, taken, types, own):
        for name, value in row.items():
            kinds.setdefault(name, set()).add(Large if isinstance(value, int) and not fits(value) else type(value))
        count += 1
    names = [name for name in FIRST if name in kinds] + [name for name in kinds if name not in FIRST]
    with to_be_written(out, key) as file:
        if ending == ".parquet":
            write_parquet(
                file, rows(folder, not missing, taken, types, own), {name: kinds[name] for name in names}, own
            )
        else:
            with file.open("w", encoding="utf-8", newline="") as opened:
                writer = csv.DictWriter(opened, names)
                writer.writeheader()
                writer.writerows(rows(folder, not missing, taken, {}, {}))
    return count, names, missing


@contextmanager
def to_be_written(out: str | Path, key: str) -> Iterator[Path]:
    """Yield a file that is put in its place, here or elsewhere, when it is whole."""
    if not is_remote(str(out)):
        place = Path(out).expanduser()
        if key == "task.output":
            place.parent.mkdir(parents=True, exist_ok=True)
        with atomic(place) as file:
            yield file
        return
    with TemporaryDirectory(prefix="lopa_dist-") as folder:
        file = Path(folder, PurePosixPath(out).name)
        yield file
        put(file, str(out), key)


def input_types(folder: Path) -> dict[str, Any]:
    """Return the Arrow types of the columns of a run's input, where that is Parquet on this machine; else none."""
    source = read_report(folder / "report.json")["task"]["input"]
    if not source or source == "-" or is_remote(source) or is_dataset(source):
        return {}
    files = files_of(source)
    if not files or ending_of(files[0]) != ".parquet":
        return {}
    from pyarrow.parquet import read_schema

    return {field.name: field.type for field in read_schema(files[0])}


def write_parquet(
    file: Path, table_rows: Iterator[dict[str, Any]], kinds: dict[str, set[type]], own: dict[str, Any]
) -> None:
    """Write rows, some at a time; a column whose values are of several kinds holds texts.

    Args:
        file: to be written.
        table_rows: the rows.
        kinds: of the values, by column.
        own: Arrow types of columns that the input had, too.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("a .parquet file needs pyarrow: pip install 'lopa_dist[eval]', or write .csv") from error
    types = {bool: pyarrow.bool_(), int: pyarrow.int64(), float: pyarrow.float64()}
    columns = {}
    for name, found in kinds.items():
        [kind, *others] = found - {type(None)} or {str}
        columns[name] = own.get(name) or (pyarrow.string() if others else types.get(kind, pyarrow.string()))
    texts = [name for name, kind in columns.items() if kind == pyarrow.string() and name not in own]
    with pyarrow.parquet.ParquetWriter(file, pyarrow.schema(columns.items())) as writer:
        while some := list(islice(table_rows, AT_ONCE)):
            for name in texts:
                for row in some:
                    row[name] = None if row.get(name) is None else str(row[name])
            writer.write_table(pyarrow.Table.from_pylist(some, writer.schema))


def lines_and_items(folder: Path) -> Iterator[tuple[dict[str, Any], Item | None]]:
    """Yield each line of a run's results with what its input, read once more, has there: None if that is shorter now.

    Raises:
        ValueError, OSError: the input cannot be read again.
    """
    items = items_again(read_report(folder / "report.json"))
    index, item = -1, None
    for _, line in result_lines(folder / "results.jsonl"):
        while index < line["index"]:
            index, item = next(items, (line["index"], None))
        yield line, item


def why_without_prompts(folder: Path) -> str:
    """Return why a table has no prompts; empty where it has."""
    try:
        if any(item is None or line["custom_id"] != item.custom_id for line, item in lines_and_items(folder)):
            return "\nwithout prompts: the input has changed since the run"
    except (ValueError, OSError) as error:
        return f"\nwithout prompts: {error}"
    return ""


def own_columns(line: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a result line that are not of its input, without its names."""
    columns = {key: value for key, value in line.items() if key not in ELSEWHERE} | line.get("usage", {})
    return columns | ({"tokens_per_forward": line["tpf"]} if "tpf" in line else {})


def rows(
    folder: Path, prompts: bool, taken: Collection[str], types: Mapping[str, Any], own: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the results of a run, each by the names of the columns.

    Args:
        folder: of the run.
        prompts: whether the input can be read again.
        taken: names of which no column of the input is called; one that has such a name gets ``input.`` in front.
        types: of the input's columns whose values are as they were there, not as JSON has them.
        own: gets the types of these columns by the names that they have here.
    """
    given = source_rows(read_report(folder / "report.json")["task"]["input"]) if types else iter(())
    number, value = 0, dict[str, Any]()
    lines = lines_and_items(folder) if prompts else ((line, None) for _, line in result_lines(folder / "results.jsonl"))
    for line, item in lines:
        sample = line.get("sample")
        row: dict[str, Any] = {"id": line["custom_id"]}
        if sample is not None:
            row = {"id": line["custom_id"].removesuffix(f"#{sample}"), "sample": sample}
        if item is not None:
            row["prompt"] = question(item)
        row |= own_columns(line)
        fields = line.get("metadata", {})
        names = {key: f"input.{key}" if key in taken else key for key in fields}
        row |= {names[key]: cell for key, cell in fields.items()}
        row = {name: plain(cell) for name, cell in row.items()}
        if types and item is not None and item.origin is not None:
            while number < item.origin.line:
                source = next(given)
                number, value = source.number, source.value or {}
            of_input = {names[key]: key for key in fields if key in types and key in value}
            row |= {name: value[key] for name, key in of_input.items()}
            own |= {name: types[key] for name, key in of_input.items()}
        yield row


def plain(value: Any) -> Any:
    """A value as a cell can hold it: lists and objects as JSON."""
    if isinstance(value, list | dict):
        value = json.dumps(value, ensure_ascii=False)
    return encodable(value) if isinstance(value, str) else value
