"""Rows of a data source: a local file, a folder of JSON files, standard input, or a dataset of the Hugging Face hub.

A source is written as

- a path: JSON Lines, one JSON array or object (`.json`), a table with a line of names (`.csv`, `.tsv`), Parquet; all
  but Parquet also gzipped (`.gz`);
- a folder, or a pattern (`part-*.parquet`): its files of one of these kinds, sorted by path; in a folder with only
  `*.json` files, each has one object (how MATH is distributed);
- ``-``: JSON Lines from standard input;
- ``hf://owner/name:split`` or ``hf://owner/name:config:split``: read with the `datasets` library, never running the
  dataset's own code. A path in place of ``owner/name`` reads a local folder in the same way;
- any other path with ``://`` that fsspec reads (``s3://``, ``gs://``, ``hf://datasets/owner/name/file.jsonl``): a file
  of the kinds above, which is fetched first.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import sys
import zlib
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from glob import glob, has_magic
from itertools import chain, count, zip_longest
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from lopa_dist.encodable import json_line
from lopa_dist.optional import lacking
from lopa_dist.remote import exists, fetched, is_remote

HUB = "hf://"
LINES = ("", ".jsonl", ".ndjson")
TABLES = (".csv", ".tsv", ".parquet")
GZIP = b"\x1f\x8b"  # how a gzipped file begins
DEEPEST = 100  # how deep lists and objects in a line may be nested: what handles them later calls itself for each level
RUN_LOCK = "job.lock"  # a file that each run folder has
READING = (OSError, EOFError, zlib.error)  # what reading a damaged or missing file raises


@dataclass(frozen=True)
class Row:
    """One row with its number, from 1: an object, or what is wrong with it and as much as can be read of it."""

    number: int
    value: dict[str, Any] | None = None
    error: str | None = None  # without the number
    where: str = ""  # if there are several files: which one, and the line in it


def check(source: str, key: str = "task.input") -> None:
    """Raise a ValueError that names `key` if the source cannot be used, as far as that shows without reading it."""
    if is_dataset(source):
        hub_parts(source, key)
        return
    check_ending(source, key)
    if not is_remote(source) and is_pipe(Path(source).expanduser()):
        raise ValueError(
            f"{key}={source}: a pipe can be read only once, and a job reads its input several times; give it to "
            f"standard input, with {key}=-"
        )
    is_there = exists(source, key) if is_remote(source) else source == "-" or bool(files_of(source, key))
    if not is_there:
        raise ValueError(f"{key}={source}: no such file")


def is_pipe(path: Path) -> bool:
    """Return whether a path is that of a pipe, a socket or a device, such as of ``<(command)`` in a shell."""
    return path.exists() and not path.is_file() and not path.is_dir()


def check_ending(source: str, key: str = "task.input") -> None:
    """Raise a ValueError that names `key` if the source's name ends like that of a file which cannot be read here."""
    path = Path(source).expanduser()
    if not is_dataset(source) and ending(path) not in (*LINES, ".json", *TABLES) and not path.is_dir():
        raise ValueError(
            f"{key}={source}: a {ending(path)} file is not read, but .jsonl, .json, .csv, .tsv and .parquet are; save "
            "or rename it as one of these"
        )


def ending(path: Path) -> str:
    """Return the ending of a file's name, which says what kind it is, in lower case and without ``.gz``."""
    name = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return name.suffix.lower()


def is_table(source: str) -> bool:
    """Return whether a source has the same columns in each row."""
    return is_dataset(source) or kind_of(source) in TABLES


def kind_of(source: str) -> str:
    """Return the ending of a file, or that of the first file in a folder or of a pattern."""
    here = not is_dataset(source) and not is_remote(source) and source != "-"
    [first, *_] = (files_of(source) if here else []) or [Path(source)]
    return ending(first)


def files_of(source: str, key: str = "task.input") -> list[Path]:
    """Return the files of a local source, by path: the file itself, those in a folder, or those that a pattern names.

    In a folder, hidden files and those that begin with an underscore, as Spark's markers do, are left out; so are
    `*.json` files beside others, which they describe, and folders of runs, whose answers are no prompts. The list is
    empty if there is no such file, or none of a pattern.

    Raises:
        ValueError: a folder has no files of prompts, or the files are of several kinds.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        inside = data_in(path)
        files = [file for file in inside if ending(file) in (*LINES[1:], *TABLES)]
        files = sorted(files or [file for file in inside if ending(file) == ".json"])
        if not files:
            raise ValueError(f"{key}={source}: a folder without files of prompts (.jsonl, .json, .csv, .tsv, .parquet)")
    else:
        found = map(Path, glob(str(path), recursive=True))
        files = [path] if path.exists() else sorted(file for file in found if not file.is_dir())
    if len(kinds := sorted({ending(file) for file in files})) > 1:
        pattern = path / f"*{kinds[-1]}" if path.is_dir() else path.with_name(f"*{kinds[-1]}")
        raise ValueError(f"{key}={source}: has files of several kinds ({', '.join(kinds)}); name one: {key}={pattern}")
    return files


def data_in(folder: Path) -> list[Path]:
    """Return the files at any depth of a folder that may be data: neither hidden, nor of a run that is below it."""
    inside = list(files_below(folder))
    runs = {file.parent for file in inside if file.name == RUN_LOCK} - {folder}
    files = (file for file in inside if file.is_file() and not hidden(file.relative_to(folder)))
    return [file for file in files if runs.isdisjoint(file.parents)]


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files at any depth of a folder, also behind links to folders; each folder is entered once."""
    entered = set[tuple[int, int]]()
    for place, folders, names in os.walk(folder, followlinks=True):
        folders.sort()
        found = os.stat(place)
        if (found.st_dev, found.st_ino) in entered:
            folders.clear()
            continue
        entered.add((found.st_dev, found.st_ino))
        yield from (Path(place, name) for name in names)


def local_files(source: str | None) -> list[Path]:
    """Return the files of a source as absolute paths without links; none if it is not on this machine, or is gone."""
    source = (source or "-").removeprefix("file://")
    if source == "-" or is_dataset(source) or is_remote(source):
        return []
    try:
        return [file.resolve() for file in files_of(source)]
    except (OSError, ValueError):
        return []


def signature(source: str | None) -> list[tuple[str, int, int]]:
    """Return the name, size and modification time (ns) of each file of a source; none if it is not on this machine."""
    try:
        stats = [(str(file), file.stat()) for file in local_files(source)]
    except OSError:  # it is gone
        return []
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def takes(source: str, file: str) -> bool:
    """Return whether `source` is a pattern of local files that `file`, which need not exist, matches."""
    if is_dataset(source) or is_remote(source) or is_remote(file) or not has_magic(source):
        return False
    if Path(source).expanduser().exists():  # it is the name of a file
        return False
    pattern, name = Path(source).expanduser(), Path(file).expanduser()
    fixed = next(place for place in (*pattern.parents, Path()) if not has_magic(str(place)))
    rest, place = pattern.relative_to(fixed).parts, name.resolve()
    return place.is_relative_to(fixed.resolve()) and matches(rest, place.relative_to(fixed.resolve()).parts)


def matches(pattern: Sequence[str], names: Sequence[str]) -> bool:
    """Return whether the parts of a path match those of a pattern, in which ``**`` is any number of folders."""
    if not pattern or not names:
        return not pattern and not names
    if pattern[0] == "**":
        return len(pattern) == 1 or matches(pattern[1:], names) or matches(pattern, names[1:])
    return fnmatchcase(names[0], pattern[0]) and matches(pattern[1:], names[1:])


def not_read(source: str) -> list[str]:
    """Return in words what is not read of a folder, or of the folders of a pattern, and what to do."""
    path = Path(source).expanduser()
    if is_dataset(source) or is_remote(source) or source == "-":
        return []
    files, notes = files_of(source), []
    if path.is_dir() and ending(files[0]) != ".json":
        others = sorted(str(file.relative_to(path)) for file in data_in(path) if ending(file) == ".json")
        if others:
            names = ", ".join(others[:3]) + (f" and {len(others) - 3:,} more" if len(others) > 3 else "")
            notes.append(f".json files beside others are not read: {names}; to read them, name '{path / '*.json'}'")
    folders = {part for file in files for part in file.parts[:-1] if "=" in part and part not in path.parts}
    if folders:
        notes.append(f"values in the names of folders do not become columns ({sorted(folders)[0]})")
    return notes


def hidden(path: Path) -> bool:
    """Return whether a file, or a folder that it is in, begins with a dot or an underscore: it is not data."""
    return any(part.startswith((".", "_")) for part in path.parts)


def is_dataset(source: str) -> bool:
    """Return whether a source is a dataset rather than a file."""
    return source.startswith(HUB) and not is_remote(source)


def rows(source: str, key: str = "task.input") -> Iterator[Row]:
    """Yield the rows of a source, in order, numbered from 1.

    Blank lines are skipped; in JSON Lines they are counted. In a table, they and the line of names are not.

    Raises:
        ValueError: the source as a whole cannot be read; the message names `key`.
    """
    check(source, key)
    try:
        if is_dataset(source):
            yield from hub_rows(source, key)
        else:
            with fetched(source, key) if is_remote(source) else nullcontext(source) as local:
                yield from file_rows(str(local), key)
    except READING as error:
        raise ValueError(f"{key}={source}: cannot be read ({error})") from error


def file_rows(source: str, key: str) -> Iterator[Row]:
    """Yield the rows of a file, a folder or standard input."""
    files = [] if source == "-" else files_of(source, key)
    path = Path(source).expanduser()
    kind = ending(path)
    for file in files:
        with naming(file, key):
            refuse_utf_16(file, key)
    if path.is_dir() and ending(files[0]) == ".json":
        for number, file in enumerate(files, 1):
            with open_lines(str(file)) as opened:
                yield parse(opened.read(), number)
    elif len(files) > 1 or (files and files[0] != path):
        yield from rows_of_all(files, key)
    elif kind == ".parquet":
        yield from parquet_rows(source, key)
    elif kind in (".csv", ".tsv"):
        yield from csv_rows(source, key)
    elif kind == ".json":
        yield from json_rows(source)
    else:
        with open_lines(source) as lines:
            yield from (parse(line, number) for number, line in enumerate(lines, 1) if line.strip())


def rows_of_all(files: Sequence[Path], key: str) -> Iterator[Row]:
    """Yield the rows of one file after the other, numbered consecutively; each row says where it is (`Row.where`)."""
    numbers, common = count(1), Path(os.path.commonpath([file.parent for file in files]))
    for file in files:
        name = file.relative_to(common)
        with naming(file, key):
            for row in file_rows(str(file), key):
                yield replace(row, number=next(numbers), where=f"{name}, line {row.number}")


@contextmanager
def naming(file: Path, key: str) -> Iterator[None]:
    """Raise errors of reading one of several files as a ValueError that names `key` and the file."""
    try:
        yield
    except READING as error:
        raise ValueError(f"{key}={file}: cannot be read ({error}); mend or remove it") from error


def refuse_utf_16(file: Path, key: str) -> None:
    """Raise a ValueError that names `key` if a file begins like UTF-16, which spreadsheets write as Unicode text."""
    with gzip.open(file) if file.suffix.lower() == ".gz" else file.open("rb") as opened:
        if opened.read(2) in (BOM_UTF16_LE, BOM_UTF16_BE):
            raise ValueError(f"{key}={file}: looks like UTF-16; save it as UTF-8")


def open_lines(source: str, newline: str | None = None) -> TextIO:
    """Return an open file of a source's text, as UTF-8; other bytes become lone surrogates, which `parse` refuses."""
    if source == "-":
        if sys.stdin is None:
            raise ValueError("task.input=-: standard input is closed; name a file")
        given: Any = io.BufferedReader(sys.stdin.buffer) if not hasattr(sys.stdin.buffer, "peek") else sys.stdin.buffer
        zipped = given.peek(2)[:2] == GZIP
        return io.TextIOWrapper(gzip.open(given) if zipped else given, encoding="utf-8-sig", errors="surrogateescape")
    path = Path(source).expanduser()
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline=newline)
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def parse(text: str, number: int) -> Row:
    """Return the row of one JSON object; whatever is wrong with the text is its `error`."""
    try:
        value: Any = json.loads(text)
        (json.dumps(value, ensure_ascii=False) if "\\u" in text else text).encode()  # an escape may be half of a pair
    except UnicodeEncodeError:
        readable = json.loads(json_line(value))  # its id and other fields may be whole
        error = "not UTF-8, or half of a surrogate pair; write UTF-8"
        return Row(number, readable if isinstance(readable, dict) else None, error)
    except (ValueError, RecursionError) as error:
        return Row(number, error=f"not JSON ({error}); write one JSON object a line")
    if not isinstance(value, dict):
        return Row(number, error='not a JSON object; write {"prompt": "..."}')
    if text.count("[") + text.count("{") > DEEPEST and is_deeper(value, DEEPEST):
        deep = [key for key, entry in value.items() if is_deeper(entry, DEEPEST - 1)]
        readable = {key: entry for key, entry in value.items() if key not in deep}
        return Row(number, readable, f"{deep[0]} is nested more than {DEEPEST} deep; make it flatter")
    return Row(number, value)


def is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects are nested in a JSON value more than `levels` deep."""
    inside = [value]
    for _ in range(levels):
        parts = (one.values() if isinstance(one, dict) else one for one in inside if isinstance(one, dict | list))
        inside = list(chain.from_iterable(parts))
    return any(isinstance(one, dict | list) for one in inside)


def json_rows(source: str) -> Iterator[Row]:
    """Yield the rows of a JSON file with an array of objects, one object or, in spite of its name, JSON Lines."""
    with open_lines(source) as file:
        text = file.read()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        yield from (parse(line, number) for number, line in enumerate(text.split("\n"), 1) if line.strip())
        return
    for number, entry in enumerate(value if isinstance(value, list) else [value], 1):
        yield parse(json.dumps(entry), number)


def csv_rows(source: str, key: str) -> Iterator[Row]:
    """Yield the rows after the line of names; every value is a text, and an empty one is None.

    A line such as ``sep=;`` in front says what separates columns. Otherwise, a `.tsv` has tabs, and a `.csv` has
    commas, or semicolons if its first line has semicolons and no comma.
    """
    csv.field_size_limit(2**31 - 1)  # the default is 128 KiB
    with open_lines(source, newline="") as file:
        head, before = file.readline(), 0  # the first line that is not empty, and how many are before it
        told = head.rstrip("\r\n")[4:] if head.lower().startswith("sep=") else ""  # as spreadsheets begin a table
        while head and (head.strip() == "" or (told and not before)):
            head, before = file.readline(), before + 1
        usual = "\t" if ending(Path(source)) == ".tsv" else "," if "," in head or ";" not in head else ";"
        delimiter = told if len(told) == 1 else usual
        lines = csv.reader(chain([head], file), delimiter=delimiter, strict=True)
        begin = before + 1  # the line where the next row begins; a row may have several
        try:
            names = next(lines, [])
            begin += lines.line_num
            refuse_twice(names, source, key)
            for number, cells in enumerate(filter(None, lines), 1):
                begin = before + lines.line_num + 1
                yield csv_row(names, cells, number)
        except csv.Error as error:
            reason = "a quote is not closed" if "end of data" in str(error) else error
            raise ValueError(f"{key}={source}, line {begin}: cannot be read ({reason})") from error


def refuse_twice(names: list[str], source: str, key: str) -> None:
    """Raise a ValueError if two columns of a table have the same name: one would hide the other."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{key}={source}: two columns are called {twice[0]!r}; give each a name of its own")


def csv_row(names: list[str], cells: list[str], number: int) -> Row:
    """Return one row of a table of texts."""
    error = None
    if len(cells) != len(names):
        columns = f"it has {len(cells)} columns, and the first line names {len(names)}"
        error = f"{columns}; quote texts that hold the separator"
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        error = error or "not UTF-8; save the table as UTF-8"
        cells = [cell.encode(errors="surrogateescape").decode(errors="replace") for cell in cells]
    return Row(number, {name: cell or None for name, cell in zip_longest(names, cells[: len(names)])}, error)


def hub_parts(source: str, key: str) -> tuple[str, list[str], str]:
    """Return the name, the configs (one empty text for the default one) and the split of an ``hf://`` source."""
    name, *rest = source.removeprefix(HUB).split(":")
    if not name or len(rest) not in (1, 2) or not all(rest):
        raise ValueError(f"{key}={source}: write hf://owner/name:split or hf://owner/name:config:split")
    return name, rest[0].split(",") if len(rest) == 2 else [""], rest[-1]


def hub_rows(source: str, key: str) -> Iterator[Row]:
    """Yield the rows of a dataset; several configs, separated by commas, follow each other."""
    name, configs, split = hub_parts(source, key)
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{key}={source}: {lacking('datasets', error, name='the datasets library')}") from error
    numbers = count(1)
    for config in configs:
        try:
            dataset = datasets.load_dataset(name, config or None, split=split)
        except Exception as error:  # the library lets through whatever its parts raise: network, format, names
            raise ValueError(
                f"{key}={source}: the dataset cannot be loaded ({error}); a local file will do too: {key}=FILE"
            ) from error
        for value in dataset:
            yield Row(next(numbers), value)


def parquet_rows(source: str, key: str) -> Iterator[Row]:
    """Yield the rows of a Parquet file."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ValueError(f"{key}={source}: {lacking('pyarrow', error)}") from error
    numbers = count(1)
    try:
        file = ParquetFile(Path(source).expanduser())
        refuse_twice(file.schema_arrow.names, source, key)
        short = {f.name: SHORT[kind] for f in file.schema_arrow if (kind := str(f.type)) in SHORT}
        for batch in file.iter_batches():
            try:
                found = [(value, "") for value in batch.to_pylist()]
            except NOT_HELD:
                found = [parquet_row(batch, index) for index in range(batch.num_rows)]
            for value, wrong in found:
                for name, precision in short.items():
                    value[name] = shortest(value[name], precision)
                number = next(numbers)
                yield Row(number, value, wrong or None)
    except ArrowException as error:
        raise ValueError(f"{key}={source}: cannot be read ({' '.join(str(error).split())})") from error


SHORT: dict[str, type[np.floating[Any]]] = {"halffloat": np.float16, "float": np.float32}
"""Arrow's types of numbers that Python would print in too many digits."""


def shortest(value: float | None, kind: type[np.floating[Any]]) -> float | None:
    """Return a number as the shortest decimal that stands for it: in fp32 0.1, not 0.10000000149011612."""
    return value if value is None else float(str(kind(value)))


NOT_HELD = (OverflowError, ValueError, LookupError)
"""Errors for values that Python cannot hold: texts not in UTF-8 (ValueError), years above 9999, unknown time zones."""


def parquet_row(batch: Any, index: int) -> tuple[dict[str, Any], str]:
    """Return the row with this index in a batch of Arrow's, and which of its values Python cannot hold, in words."""
    value, wrong = dict[str, Any](), []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            value[name] = column[index].as_py()
        except UnicodeDecodeError:
            value[name] = None
            wrong.append(f"not UTF-8 in {name!r}; write the table with texts in UTF-8")
        except NOT_HELD as error:
            value[name] = None
            kind = type(error).__name__
            wrong.append(f"{name!r} cannot be read ({kind}: {error}); leave the column out, or write it as texts")
    return value, "; ".join(wrong)
