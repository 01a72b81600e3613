"""The commands of `lopa-dist` besides the job itself, such as `report` and `doctor`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import NoReturn

from lopa_dist.atomic import no_room
from lopa_dist.checks import UserError
from lopa_dist.encodable import visible


class Parser(argparse.ArgumentParser):
    """An argument parser that raises its errors as UserErrors of one line, which ends with the usage."""

    def error(self, message: str) -> NoReturn:
        """Raise a UserError."""
        raise UserError(f"{message}; {' '.join(self.format_usage().split())}")


def path(text: str) -> Path:
    """Return a path that an argument names; an empty one, as of an unset variable, would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; the current folder is .")
    return Path(text)


def report(options: argparse.Namespace) -> None:
    """`lopa-dist report FOLDER...`."""
    from lopa_dist.jobs.show.compare import compare

    folders: list[Path] = options.folders
    if len(folders) == 1:
        compare(folders[0], baseline=options.baseline, form=options.form)
        return
    here = Path.cwd()
    folders = [Path(os.path.abspath(folder)) for folder in folders]  # symbolic links stay as they are
    parent = Path(os.path.commonpath(folders))
    if parent == Path(parent.anchor):
        raise UserError(f"report: a page of several folders goes into the folder that contains them all, not {parent}")
    if here == parent or here in parent.parents:
        parent, folders = parent.relative_to(here), [folder.relative_to(here) for folder in folders]
    compare(parent, baseline=options.baseline, form=options.form, among=folders)


def table(options: argparse.Namespace) -> None:
    """`lopa-dist table RUN [--out FILE]`."""
    from lopa_dist.jobs.folder.apart import check_no_prompts
    from lopa_dist.jobs.show.run_state import is_run, state_of
    from lopa_dist.jobs.show.table import write_table
    from lopa_dist.jobs.show.where_it_began import report_where_it_began

    file = options.out or str(options.run / "results.csv")
    if options.out and (options.run / "report.json").exists():
        source = report_where_it_began(options.run)["task"].get("input")
        if source:
            check_no_prompts(options.out, source, f"--out {options.out}")
    try:
        count, columns, missing = write_table(options.run, file)
    except OSError as error:
        if no_room(error, ""):
            raise
        if options.out:
            why = f"cannot be written ({error.strerror or error})"
            raise UserError(f"--out {options.out}: {why}; name a file in a folder that exists") from error
        raise UserError(f"{options.run} cannot be written ({error.strerror}): name another file with --out") from error
    print(visible(f"{count} rows: {', '.join(columns)}\n{file}{missing}"))
    state = state_of(options.run) if is_run(options.run) else None
    if state and state.state != "complete":
        status = f"lopa-dist status {quote(str(options.run))}"
        expected = "?" if state.expected is None else f"{state.expected:,}"
        print(
            f"{state.state.upper()}: {state.done:,} of {expected} requests are done, and this table has those of "
            f"results.jsonl, which was last written when the job stopped in order; {status} has the command for the "
            "rest",
            file=sys.stderr,
        )


def status(options: argparse.Namespace) -> None:
    """`lopa-dist status FOLDER...`."""
    from rich.console import Console

    from lopa_dist.jobs.commands.status import status as look

    look(options.folders, Console(emoji=False))


def merge(options: argparse.Namespace) -> None:
    """`lopa-dist merge FOLDER`."""
    from lopa_dist.jobs.commands.shards import merge_shards
    from lopa_dist.jobs.folder.batch_output import NAME
    from lopa_dist.jobs.folder.results import ERRORS
    from lopa_dist.jobs.show.compare import compare
    from lopa_dist.jobs.show.where_it_began import where_it_began

    try:
        merged = merge_shards(options.folder)
    except PermissionError as error:
        raise UserError(f"merge: {error.filename or options.folder} cannot be written ({error.strerror})") from error
    errors = f", {merged['errors']:,} with errors ({options.folder / ERRORS})" if merged["errors"] else ""
    print(f"{merged['shards']} shards, {merged['requests']:,} requests{errors}: {options.folder / 'results.jsonl'}")
    if out := merged["task"].get("output"):
        print(f"task.output: {where_it_began(options.folder, out)}")
    if (options.folder / NAME).exists():
        print(f"in OpenAI's form: {options.folder / NAME}")
    compare(options.folder)


def trace(options: argparse.Namespace) -> None:
    """`lopa-dist trace RUN ID [--html FILE]`."""
    page = options.html
    if page and (page.is_dir() or not os.access(page.parent, os.W_OK)):
        raise UserError(f"--html {page}: cannot be written; name a file in a folder that exists")
    from rich.console import Console

    from lopa_dist.jobs.commands.trace import show, write_trace_page
    from lopa_dist.jobs.commands.trace import trace as generate_again

    # an id is UTF-8, even where the locale's arguments are not
    trace = generate_again(options.run, os.fsencode(options.id).decode("utf-8", "surrogateescape"))
    if page:
        write_trace_page(trace, page)  # first: whoever reads the output, such as head, may have seen enough
    show(trace, Console(emoji=False))
    if page:
        print(f"page: {page}")


def explain(options: argparse.Namespace) -> None:
    """`lopa-dist explain [KEY ...] [KEY=VALUE ...]`."""
    from lopa_dist.jobs.commands.explain import explain as explanation

    print(explanation(options.keys))


def models(options: argparse.Namespace) -> None:
    """`lopa-dist models`."""
    from lopa_dist.jobs.commands.models import lines

    print(*lines(), sep="\n")


def doctor(options: argparse.Namespace) -> None:
    """`lopa-dist doctor [KEY=VALUE ...]`; exit status 1 where a job would not run."""
    from rich.console import Console

    from lopa_dist.jobs.commands.doctor.doctor import doctor as examine

    if not examine(options.settings, Console(emoji=False)):
        raise SystemExit(1)


def learn(options: argparse.Namespace) -> None:
    """`lopa-dist learn RUN [KEY=VALUE ...]`."""
    from lopa_dist.jobs.commands.learn import learn as learn_from

    learn_from(options.run, options.settings)


def argument_parsers() -> dict[str, Parser]:
    """Return the parser of each command, by its name."""
    made: dict[str, Parser] = {}

    def command(run: Callable[[argparse.Namespace], None], description: str) -> Parser:
        name = run.__name__
        made[name] = Parser(prog=f"lopa-dist {name}", description=description, allow_abbrev=False)
        made[name].set_defaults(perform=run)
        return made[name]

    parser = command(
        report, "Compare runs in a table, a plot and a page, accuracy against speed; make the page of one."
    )
    parser.add_argument(
        "folders",
        type=path,
        nargs="+",
        metavar="FOLDER",
        help="a run folder, or one that has run folders at any depth; the page of several lies in their common folder",
    )
    parser.add_argument(
        "--baseline", metavar="RUN", help="compare with this run, by its name or settings: --baseline decode.drafts=0"
    )
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument(
        "--latex", dest="form", action="store_const", const="latex", default="", help="print the tables for a paper"
    )
    forms.add_argument("--markdown", dest="form", action="store_const", const="markdown", help="print them as Markdown")

    parser = command(table, "Write a run's results as a table with plain columns.")
    parser.add_argument("run", type=path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--out", metavar="FILE", help="a .csv or .parquet file, also s3://... (RUN/results.csv)")

    parser = command(
        status, "Tell how far runs are, which shards of an array are missing, and what to type for the rest."
    )
    parser.add_argument(
        "folders", type=path, nargs="+", metavar="FOLDER", help="a run folder, or one that has run folders at any depth"
    )

    parser = command(merge, "Join the shards of a job array into one result.")
    parser.add_argument("folder", type=path, metavar="FOLDER", help="the folder that has the runs of the array")

    parser = command(trace, "Show how a request was filled, step by step.")
    parser.add_argument("run", type=path, metavar="RUN", help="the folder of a finished run")
    parser.add_argument("id", metavar="ID", help="a custom_id of results.jsonl, or an index, which counts from 0")
    parser.add_argument("--html", type=path, metavar="FILE", help="also write the trace as a page")

    parser = command(
        explain, "Tell what settings mean, which values they take, what they are, and where a value came from."
    )
    parser.add_argument("keys", nargs="*", metavar="KEY", help="settings or sections (none: all), and overrides")

    parser = command(learn, "Learn to draft from the answers of a run of a causal model; no text depends on it.")
    parser.add_argument("run", type=path, metavar="RUN", help="the folder of a finished or stopped run")
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="KEY=VALUE",
        help="learn.minutes=20, learn.rank=64, parallel.*; model.device, model.path, task.input if they have moved",
    )

    command(models, "List the model families, their presets, and what their numbers were compared with.")

    parser = command(doctor, "Tell whether a job would run on this machine, what would slow it, and what to fix.")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of the job, such as model=...")
    return made


COMMANDS = ("report", "table", "status", "merge", "trace", "explain", "models", "doctor", "learn")


def perform(name: str, arguments: list[str]) -> None:
    """Run the command `name`; raise a UserError that ends with its usage if `arguments` are wrong."""
    options = argument_parsers()[name].parse_args(arguments)
    try:
        options.perform(options)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads the output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the last flush fails, too
        raise SystemExit(1) from None
