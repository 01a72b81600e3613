"""`lopa-dist table RUN`: results as a table with plain columns, for a spreadsheet or a data frame."""

from __future__ import annotations

import csv
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, cast

from lopa_dist.atomic import atomic
from lopa_dist.encodable import encodable
from lopa_dist.jobs.folder.part_names import KEY, in_parts, parts_of
from lopa_dist.jobs.folder.results import result_lines
from lopa_dist.jobs.show.report import check_results
from lopa_dist.jobs.show.run_page import has_changed, items_again, question
from lopa_dist.jobs.show.where_it_began import report_where_it_began
from lopa_dist.optional import lacking
from lopa_dist.remote import is_remote, put
from lopa_dist.tasks.batch_line import PROMPTS
from lopa_dist.tasks.names import without_sample
from lopa_dist.tasks.prompt_template import in_json
from lopa_dist.tasks.rows import ending as ending_of
from lopa_dist.tasks.rows import files_of, is_dataset
from lopa_dist.tasks.rows import rows as source_rows
from lopa_dist.tasks.task import Item

log = logging.getLogger("lopa_dist")
CHANGED = "the input has changed since the run"
AT_ONCE = 1000  # the most rows in memory
PREFIX = "input."  # before the name of a column of the input that a column of the results' own has, too
FIRST = ("id", "sample", "prompt", "text", "correct", "extracted", "finish_reason", "error")
ELSEWHERE = ("custom_id", "index", "sample", "usage", "tpf", "metadata")  # keys of a line with another form here


class Large:
    """The kind of integers that no column of integers can hold (`fits`); they become texts."""


class Wide:
    """The kind of integers that a column of fractions may not hold exactly: beyond 2**53."""


KINDS = {bool: "true or false", int: "integers", float: "fractions", Large: "integers of more than 64 bits"}


def fits(value: int) -> bool:
    """Return whether an integer fits into 64 bits."""
    return -(2**63) <= value < 2**63


class Kinds:
    """The columns of a table, and the kinds of their values."""

    def __init__(self) -> None:
        self.of: dict[str, set[type]] = {}
        self.rows = 0  # how many were added

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the kinds of a row's values."""
        for name, value in row.items():
            kinds = self.of.setdefault(name, set())
            kinds.add(Large if isinstance(value, int) and not fits(value) else type(value))
            if isinstance(value, int) and abs(value) > 2**53:
                kinds.add(Wide)
        self.rows += 1

    def names(self, of_input: Collection[str] = ()) -> list[str]:
        """Return the columns in order: what was asked and answered, those `of_input`, then all others."""
        first = [name for name in (*FIRST, *of_input) if name in self.of]
        return first + [name for name in self.of if name not in first]


def write_table(folder: Path, out: str | Path, key: str = "--out") -> tuple[int, list[str], str]:
    """Write a run's results as `.csv` or `.parquet`; return the number of rows, the columns, and why it lacks prompts.

    Args:
        folder: of the run.
        out: the file, or a pattern for several parts (`part_names`), perhaps remote (`lopa_dist.remote`).
        key: the option or setting that named it, for messages.

    Raises:
        ValueError: there is no such run, or the file is of another kind or cannot be written.
    """
    ending = PurePosixPath(out).suffix
    if ending not in (".csv", ".parquet"):
        raise ValueError(f"{key} {out}: name a .csv or a .parquet file")
    check_results(folder)
    report = report_where_it_began(folder)
    missing = why_without_prompts(folder, report)
    types = passing_types(report["task"]) if ending == ".parquet" and not missing else {}
    if missing and ending == ".parquet":
        missing += "; dates, decimals, lists and binary data of the input are texts"
    names = input_names((line for _, line in result_lines(folder / "results.jsonl")), types)
    kinds, own = Kinds(), dict[str, Any]()

    def table_rows() -> Iterator[dict[str, Any]]:
        again = InputAgain(iter(()) if missing else items_again(report), report["task"]["input"], types)
        lines = (line for _, line in result_lines(folder / "results.jsonl"))
        return rows(lines, again, names, own)

    for row in table_rows():
        kinds.add(row)
    if report["task"].get("truncate"):
        kinds.of.setdefault("truncated", {bool})  # a table has the same columns, whatever happened to its rows
    kinds.of.setdefault("error", {type(None)})
    for name, found in kinds.of.items() if ending == ".parquet" else ():
        if len(known := known_kinds(found)) > 1 and name not in own:
            there = " and ".join(sorted(KINDS.get(kind, "text") for kind in known))
            log.warning("WARNING: the table's column %s has %s, which it holds as texts", name, there)
    made = table_rows()
    for file_name, most in ((out, None),) if not in_parts(str(out)) else parts_of(str(out), kinds.rows):
        with to_be_written(file_name, key) as file:
            write_rows(file, ending, islice(made, most), kinds, own)
    return kinds.rows, kinds.names(own), missing


def write_rows(
    file: Path, ending: str, table_rows: Iterator[dict[str, Any]], kinds: Kinds, own: dict[str, Any]
) -> None:
    """Write rows as ``.csv`` or ``.parquet`` (`write_parquet`)."""
    if ending == ".parquet":
        write_parquet(file, table_rows, {name: kinds.of[name] for name in kinds.names(own)}, own)
        return
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, kinds.names())
        writer.writeheader()
        writer.writerows(table_rows)


@contextmanager
def to_be_written(out: str | Path, key: str) -> Iterator[Path]:
    """Yield a file to write to; once it is whole, it is put in its place, which may be remote.

    If a link is there, it stays, and the file that it names is written.
    """
    if not is_remote(str(out)):
        place = Path(out).expanduser().resolve()
        if key == KEY:
            place.parent.mkdir(parents=True, exist_ok=True)
        with atomic(place, hidden=True) as file:  # readers of a folder skip names that begin with a dot
            yield file
        return
    with TemporaryDirectory(prefix="lopa_dist-") as folder:
        file = Path(folder, PurePosixPath(out).name)
        yield file
        put(file, str(out), key)


def input_types(source: str | None) -> dict[str, list[tuple[str, Any]]]:
    """Return the Arrow types of each column of an input, each type with the first file that has it.

    Empty where the input is not Parquet on this machine.
    """
    if not source or source == "-" or is_remote(source) or is_dataset(source):
        return {}
    files = [file for file in files_of(source) if ending_of(file) == ".parquet"]
    if not files:
        return {}
    from pyarrow.parquet import read_schema

    types: dict[str, dict[Any, str]] = {}
    for file in files:
        for field in read_schema(file):
            types.setdefault(field.name, {}).setdefault(field.type, str(file))
    return {name: [(file, kind) for kind, file in of.items()] for name, of in types.items()}


def common_type(types: Sequence[Any]) -> Any:
    """Return one Arrow type for a column with several in an input's files; text if none holds all values exactly."""
    import pyarrow

    if len(types) == 1:
        return types[0]
    kinds = pyarrow.types
    if any(kinds.is_floating(one) for one in types) and any(
        kinds.is_integer(one) and one.bit_width > 32 for one in types
    ):
        return pyarrow.string()
    try:
        schemas = [pyarrow.schema([("column", one)]) for one in types]
        return pyarrow.unify_schemas(schemas, promote_options="permissive").field("column").type
    except pyarrow.ArrowException:
        return pyarrow.string()


def mixed_types(source: str | None) -> list[str]:
    """Return a sentence for each column of an input with several types, or a type of which something is lost."""
    sentences = []
    for name, types in input_types(source).items():
        if len(types) > 1:
            place = os.path.commonpath([Path(file).parent for file, _ in types])
            there = " and ".join(f"{kind} in {Path(file).relative_to(place)}" for file, kind in types)
            kind = common_type([one for _, one in types])
            sentences.append(f"column {name} is {there}; a table of the results has {kind}")
        elif "time64[ns]" in str(types[0][1]):  # Python's times have no nanoseconds
            sentences.append(f"column {name} is {types[0][1]}, which is read to the microsecond")
    return sentences


def passing_types(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Arrow types of the columns that pass from a task's input into the table: all but the prompt's."""
    prompts = () if task.get("prompt") else (task["column"],) if task.get("column") else PROMPTS
    types = input_types(task["input"])
    return {name: common_type([one for _, one in of]) for name, of in types.items() if name not in prompts}


def write_parquet(
    file: Path, table_rows: Iterator[dict[str, Any]], kinds: dict[str, set[type]], own: dict[str, Any]
) -> None:
    """Write rows as Parquet, some at a time; a column whose values are of several kinds gets texts.

    Args:
        file: to be written.
        table_rows: the rows.
        kinds: of the values, by column.
        own: Arrow types of the columns that come from the input.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"a .parquet file {lacking('pyarrow', error)}; or write .csv") from error
    types = {bool: pyarrow.bool_(), int: pyarrow.int64(), float: pyarrow.float64()}
    columns = {}
    for name, found in kinds.items():
        known = known_kinds(found)
        kind = next(iter(known)) if len(known) == 1 else str
        columns[name] = own.get(name) or types.get(kind, pyarrow.string())
    texts = [name for name, kind in columns.items() if kind == pyarrow.string()]
    with pyarrow.parquet.ParquetWriter(file, pyarrow.schema(columns.items())) as writer:
        while some := list(islice(table_rows, AT_ONCE)):
            for name in texts:
                for row in some:
                    row[name] = text_of(row.get(name))
            writer.write_table(pyarrow.Table.from_pylist(some, writer.schema))


def text_of(value: Any) -> str | None:
    """Return a value as a text: JSON if it is a list or a dict, as in a CSV table."""
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, default=in_json)
    return None if value is None else in_json(value)


def known_kinds(found: set[type]) -> set[type]:
    """Return the kinds of a column's values; integers and fractions count as one if fractions hold all exactly."""
    known = found - {type(None), Wide} or {str}
    return {float} if known == {int, float} and Wide not in found else known


class InputAgain:
    """A run's input, read again beside the run's results, which are in the same order.

    Args:
        items: the input's items and their places in it; none where it cannot be read again.
        source: `task.input`.
        types: of the columns whose values are taken from `source`, not from the results' JSON.
    """

    def __init__(self, items: Iterator[tuple[int, Item]], source: str | None, types: Mapping[str, Any]) -> None:
        self.items, self.types = items, types
        self.given = source_rows(source) if types and source else iter(())
        self.index, self.item = -1, cast("Item | None", None)
        self.number, self.row = 0, dict[str, Any]()

    def item_of(self, line: Mapping[str, Any]) -> Item | None:
        """Return the item of a line of results; None if the input is shorter now, or cannot be read again."""
        while self.index < line["index"]:
            self.index, self.item = next(self.items, (line["index"], None))
        return self.item

    def cells_of(self, item: Item | None) -> dict[str, Any]:
        """Return the values of the columns in `types` from the item's row of the input; None where there is none."""
        if not self.types or item is None or item.origin is None:
            return dict.fromkeys(self.types)
        while self.number < item.origin.line:
            source = next(self.given)
            self.number, self.row = source.number, source.value or {}
        return {name: self.row.get(name) for name in self.types}


def why_without_prompts(folder: Path, report: dict[str, Any]) -> str:
    """Return why a table of a run has no prompts, in words; empty where it has them."""
    try:
        if (changed := has_changed(report)) is not None:
            return f"\nwithout prompts: {CHANGED}" if changed else ""
        again = InputAgain(items_again(report), None, {})
        for _, line in result_lines(folder / "results.jsonl"):
            item = again.item_of(line)
            if item is None or line["custom_id"] != item.custom_id:
                return f"\nwithout prompts: {CHANGED}"
    except (ValueError, OSError) as error:
        return f"\nwithout prompts: {error}"
    return ""


def input_names(lines: Iterable[dict[str, Any]], columns: Iterable[str]) -> dict[str, str]:
    """Return what each column of the input is called in the table.

    A column of the input that has the same name as one of the results' own columns gets the prefix ``input.``. If the
    input was such a table itself, it may already have a column with that longer name, which then gets a second prefix.
    So no two columns have the same name.

    Args:
        lines: of results, with other columns of the input.
        columns: of the input.
    """
    taken, given = {*FIRST}, dict.fromkeys(columns)
    for line in lines:
        taken.update(own_columns(line))
        given.update(dict.fromkeys(line.get("metadata", {})))
    names: dict[str, str] = {}
    for name in sorted(given, key=len):  # a name's shorter form is before it
        shorter = name.removeprefix(PREFIX)
        moves = name in taken or (shorter != name and names.get(shorter) == name)
        names[name] = f"{PREFIX}{name}" if moves else name
    return names


def own_columns(line: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a result line, without its ids and what comes from its input."""
    columns = {key: value for key, value in line.items() if key not in ELSEWHERE} | line.get("usage", {})
    return columns | ({"tokens_per_forward": line["tpf"]} if "tpf" in line else {})


def rows(
    lines: Iterable[dict[str, Any]], again: InputAgain, names: Mapping[str, str], own: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the table's rows: for each line of results, its cells by column.

    Args:
        lines: in the order of the input.
        again: the input; if it has no items, rows have no prompts.
        names: of the input's columns in the table (`input_names`).
        own: is filled with the types of the input's columns, by their names in the table.
    """
    for line in lines:
        item, sample = again.item_of(line), line.get("sample")
        row: dict[str, Any] = {"id": line["custom_id"]}
        if sample is not None:
            row = {"id": without_sample(line["custom_id"], sample), "sample": sample}
        if item is not None:
            row["prompt"] = question(item) if item.messages or item.prompt is not None else None
        row |= own_columns(line)
        if line["finish_reason"] == "error":  # it has no text, which an empty one would be, too
            row["text"] = None
        cells = again.cells_of(item)
        fields = {key: cell for key, cell in line.get("metadata", {}).items() if key not in cells}
        row |= {names[key]: cell for key, cell in fields.items()}
        row = {name: plain(cell) for name, cell in row.items()}
        row |= {names[key]: cell for key, cell in cells.items()}
        own |= {names[key]: again.types[key] for key in cells}
        yield row


def plain(value: Any) -> Any:
    """Return a value as a cell can hold it; lists and objects become JSON."""
    if isinstance(value, list | dict):
        value = json.dumps(value, ensure_ascii=False)
    return encodable(value) if isinstance(value, str) else value
