"""The page of a run, `report.html`: headline, figures, charts, some answers, settings and the command."""

from __future__ import annotations

import shlex
import textwrap
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

from lopa_dist import __version__
from lopa_dist.code_hash import code_hash
from lopa_dist.config import Config
from lopa_dist.jobs.folder.packed import Columns
from lopa_dist.jobs.folder.results import results
from lopa_dist.jobs.setup.settings import settings_of, shown
from lopa_dist.jobs.show.lessons import lesson_sentence
from lopa_dist.jobs.show.made_on import made_sentence
from lopa_dist.jobs.show.page import Bars, bars, histogram, write_page
from lopa_dist.jobs.show.report import (
    INVALID,
    UNCONFINED,
    accuracy_interval,
    attempts_sentence,
    config_of,
    drafts_sentence,
    duration,
    figures,
    typed_words,
)
from lopa_dist.jobs.show.where_it_began import task_where_it_began
from lopa_dist.tasks.hashed_items import HashedItems
from lopa_dist.tasks.registry import make_again
from lopa_dist.tasks.task import Item

NAME = "report.html"
LOOKED_AT = 1000  # the first results, of which some are shown
OF_A_KIND = 3  # the most answers shown of each kind: right, wrong, without a verdict, or errors
FEW_LINES = 280  # characters of three lines of the page
LONGEST_EXPECTED = 120  # the most characters of an expected answer
LONGEST = 2000  # the most characters of a question or an answer
VERDICTS = {True: "right", False: "wrong", None: ""}
SECTIONS = ("model", "task", "decode", "engine", "seed")  # of settings in a report
LAUNCHERS = {
    "python": "lopa-dist",
    "torchrun": "torchrun --nproc-per-node {} -m lopa_dist",
    "mpirun": "mpirun -n {} lopa-dist",
    "srun": "srun --ntasks {} lopa-dist",
}


def write_run_page(folder: Path, report: dict[str, Any], questions: dict[str, str]) -> Path:
    """Write the page of a run into its folder, and return the file.

    Args:
        folder: of the run.
        report: its `report.json`.
        questions: those of the first requests, by custom_id.
    """
    try:
        config = config_of(report | {"task": task_where_it_began(folder, report["task"])})
    except ValueError as error:
        raise ValueError(f"{folder / 'report.json'}: {error}") from error
    vars(config.task).update(report["task"])  # the page has the files as they were given
    rows = setting_rows(config)
    return write_page(
        folder / NAME,
        "run.html",
        title=f"{report['task']['name']} with {report['model']['path']}",
        stopped=stopped(report),
        made=made_sentence(report),
        headline=headline(report),
        tiles=tiles(report),
        drafts=drafts_sentence(report),
        lessons=[lesson_sentence(lesson) for lesson in report.get("lessons", [])],
        acceptance=acceptance(report),
        failures=list(report.get("failures", {}).items()),
        charts=list(charts(folder, report)),
        figures=figures(report),
        attempts=attempts_sentence(report),
        warnings=warnings(report),
        answers=some_answers(folder, questions),
        looked_at=LOOKED_AT,
        changed=[row for row in rows if row[1] != row[2]],
        settings=rows,
        command=command(folder, report),
        versions=", ".join(f"{name} {version}" for name, version in report.get("versions", {}).items()),
    )


def questions_of(items: Iterable[Item]) -> dict[str, str]:
    """Return the questions that a page may show, by custom_id, without the few-shot examples that all share."""
    return {item.custom_id: short(question(item)) for item in islice(items, LOOKED_AT)}


def question(item: Item) -> str:
    """Return an item's prompt, or its last message of a chat, without few-shot examples."""
    text = item.messages[-1].get("content") if item.messages else item.prompt
    return text.removeprefix(item.prefix) if isinstance(text, str) else ""  # an item with an error may have any


def questions_again(report: dict[str, Any]) -> dict[str, str]:
    """Return the questions of a finished run, read from its input again; none where that is gone or has changed."""
    try:
        return {} if has_changed(report) else questions_of(item for _, item in items_again(report))
    except (ValueError, OSError):
        return {}


def has_changed(report: dict[str, Any]) -> bool | None:
    """Return whether the input of a finished run has changed since; all of it is read again.

    None where that is not known: another version of lopa_dist, or other code, may read an input differently.

    Raises:
        ValueError: the input cannot be read again.
        OSError: likewise.
    """
    if report.get("versions", {}).get("lopa_dist") != __version__ or "whole_input" not in report:
        return None
    items = HashedItems(make_again(config_of(report).task).items())
    deque(items, maxlen=0)
    if items.digest() == report["whole_input"]:
        return False
    return True if (report.get("made") or {}).get("code") == code_hash() else None


def items_again(report: dict[str, Any]) -> Iterator[tuple[int, Item]]:
    """Return the items of a finished run and their places in the whole input, which is read again.

    Raises:
        ValueError: the input cannot be read again.
        OSError: likewise.
    """
    task = report["task"]
    first, step = (task["shard"], task["shards"]) if "shard" in task else (0, 1)  # merged shards have no `shard`
    return islice(enumerate(make_again(config_of(report).task).items()), first, None, step)


def short(text: str) -> str:
    """Return a text, cut after `LONGEST` characters."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} [{len(text) - LONGEST} more characters]"


def stopped(report: dict[str, Any]) -> str:
    """Return in words how much of a stopped job is done; empty for a complete one."""
    expected = report.get("expected", report["requests"])
    return f"{report['requests']:,} of {expected:,} requests are done" if report["requests"] < expected else ""


def headline(report: dict[str, Any]) -> str:
    """Return in words what ran and what came out."""
    invalid = report.get("tries", {}).get("invalid", 0)
    counts = (report["errors"], "with errors"), (invalid, INVALID)
    parts = [f"{count} {said}" for count, said in counts if count]
    failed = f" ({', '.join(parts)})" if parts else ""
    unjudged = f", of which {report['unjudged']} could not be judged" if report.get("unjudged") else ""
    words = f"{report['requests']} requests{failed}{unjudged}, {way(report)}: "
    if "accuracy" in report:
        low, high = accuracy_interval(report)
        words += f"{report['accuracy']:.1%} of the answers are right (95 % confidence: {low:.1%} to {high:.1%}), at "
    if "masks" not in report:
        words += f"{report['tpf']:.2f} tokens per forward pass"
        if report.get("rows_per_token"):
            words += f" and {report['rows_per_token']:.1f} rows of the model computed per token"
        words += ". "
    words += f"{report['tokens_per_s']['job']:.0f} tokens per second, "
    if report.get("attempts", 1) > 1:
        words += f"{duration(job_s(report))} of generation in {report['attempts']} attempts"
    else:
        words += f"{report['wall_s']:.1f} s of wall time"
    if world := report.get("world"):
        ranks = f"on {world['size']} ranks, started by {world['launcher']}"
        words += " in one process" if world["size"] == 1 else f" {ranks}"
    return f"{words}."


def way(report: dict[str, Any]) -> str:
    """Return in words how the answers were decoded, or the texts scored."""
    if (masks := report.get("masks")) is not None:
        return "scored exactly" if masks == 1 else f"scored by up to {masks} masks of each text or block"
    decode = report["decode"]
    if own := [f"your own {key} ({decode[key]})" for key in ("rule", "fill") if decode.get(key)]:
        return f"decoded with {' and '.join(own)}"
    branches = f"{decode['branches']} lookahead branch{'' if decode['branches'] == 1 else 'es'} beside the anchor"
    if decode.get("context") == "causal":
        if not decode["drafts"]:
            return "decoded one token at a time"
        many = "as many drafts as are fastest" if decode["drafts"] == "auto" else f"{decode['drafts']} drafts"
        return f"decoded with exact lookahead ({many}): the same text as one token at a time"
    if decode["verify"] == "agreement":
        beside = f", {branches}" if decode["branches"] else ""
        return f"decoded with verified lookahead ({decode['drafts']} drafts per branch{beside})"
    return f"decoded with {branches}" if decode["branches"] else "decoded without lookahead"


def warnings(report: dict[str, Any]) -> list[str]:
    """Return warnings of what makes answers worse, or the machine less safe, than a reader of the figures may think."""
    unconfined = [UNCONFINED] if report["task"].get("allow_code_execution") == "unconfined" else []
    return [*report.get("warnings", []), *unconfined]


def tiles(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the figures that people ask for first: how many of their own prompts are done, or a benchmark's outcome."""
    if "accuracy" in report:
        yield "accuracy", f"{report['accuracy']:.1%}"
    seconds = job_s(report)
    if report["task"]["name"] == "batch":
        done, expected = report["requests"] - report["errors"], report.get("expected", report["requests"])
        yield "done", f"{done:,}" if done == expected else f"{done:,} of {expected:,}"
        yield "failed", f"{report['errors']:,}"
        if invalid := report.get("tries", {}).get("invalid"):
            yield INVALID, f"{invalid:,}"
        yield "requests per hour", f"{done / max(seconds, 1e-9) * 3600:,.0f}"
    else:
        if "masks" not in report:
            yield "tokens per forward", f"{report['tpf']:.2f}"
        if report.get("rows_per_token"):
            yield "rows per token", f"{report['rows_per_token']:.1f}"
    yield "tokens per second", f"{report['tokens_per_s']['job']:.0f}"
    yield "time" if report.get("attempts", 1) == 1 else f"time of {report['attempts']} attempts", duration(seconds)


def job_s(report: dict[str, Any]) -> float:
    """Return the seconds of a job: its wall time, or for several attempts those of generation in all of them."""
    return float(report["decode_s"] if report.get("attempts", 1) > 1 else report["wall_s"])


def acceptance(report: dict[str, Any]) -> Bars | None:
    """Return a chart of the share of drafts that were accepted, by depth; None where none were verified."""
    if not (shares := report.get("drafts", {}).get("acceptance")):
        return None
    depths = [str(depth) for depth in range(1, len(shares) + 1)]
    return bars("Drafts accepted with all before them", "depth in the chain of drafts", depths, shares, ".0%")


def charts(folder: Path, report: dict[str, Any]) -> Iterator[Bars]:
    """Yield the other bar charts, each where there is something to show."""
    if groups := report.get("reliability"):
        sure, right = ([group[name] for group in groups] for name in ("probability", "accuracy"))
        which = "geometric mean of the tokens' probabilities, in groups of equally many answers"
        yield bars("Answers that are right, by how sure the model was", which, [f"{p:.3f}" for p in sure], right, ".0%")
    done = Columns()
    for line in results(folder):
        if "tpf" in line:
            done.append({name: line[name] for name in ("tpf", "latency_s")})
    if len(done):
        yield histogram("Requests by tokens per forward", "tokens per forward, from this number on", done["tpf"])
        yield histogram("Requests by latency", "seconds, from this number on", done["latency_s"])
    wins = report.get("branch", {}).get("wins", [])
    if sum(wins):
        names = ["anchor", *map(str, range(1, len(wins)))]
        yield bars("Which branch won", "branch", names, [won / sum(wins) for won in wins], ".0%")
    if accepted := report.get("branch", {}).get("accepted_with"):
        axis = "branches beside the anchor, in the forwards of this run that had a choice"
        names = [str(j) for j in range(len(accepted))]
        yield bars("Drafts accepted per forward, had only so many branches run", axis, names, accepted, ".2f")
    phases = {phase: ms for phase, ms in report.get("step_ms", {}).items() if phase != "total"}
    if any(phases.values()):  # an attempt that only judges answers again makes no step
        last = " in the last attempt" if report.get("attempts", 1) > 1 else ""
        yield bars(
            f"Where a step's time goes{last}", "milliseconds per step", list(phases), list(phases.values()), ".2f"
        )


def some_answers(folder: Path, questions: dict[str, str]) -> list[dict[str, str]]:
    """Return a few answers of each kind (`answer`), with their questions."""
    kinds: dict[str, list[dict[str, str]]] = {"wrong": [], "right": [], "": [], "error": []}
    for line in islice(results(folder), LOOKED_AT):
        verdict = "error" if line["finish_reason"] == "error" else VERDICTS[line.get("correct")]
        if len(kinds[verdict]) < OF_A_KIND:
            kinds[verdict].append(answer(line, verdict, questions.get(line["custom_id"], "")))
    return list(chain.from_iterable(kinds.values()))


def answer(line: dict[str, Any], verdict: str, question: str) -> dict[str, str]:
    """Return what the page shows of a line of results: its verdict, question, text and details."""
    details = []
    if line.get("extracted") is not None:
        details.append(f"read as {short_line(line['extracted'])}")
    if line.get("expected") is not None and line.get("correct") is False:
        details.append(f"expected {short_line(line['expected'])}")
    if "usage" in line:
        details.append(f"{line['usage']['completion_tokens']} tokens in {line['usage']['forwards']} forwards")
    details += filter(None, [line.get("reason"), line.get("unjudged")])
    if line["finish_reason"] == "invalid":
        details.append(line["error"])
    text = line["error"] if verdict == "error" else line["text"]
    shown = {
        "custom_id": line["custom_id"],
        "verdict": verdict,
        "question": question,
        "begins": begins(question),
        "text": short(text),
    }
    return shown | {"details": ", ".join(details)}


def short_line(text: str) -> str:
    """Return a text on one line, cut if it is long: what was read or expected may be a whole program."""
    return textwrap.shorten(text, LONGEST_EXPECTED, placeholder=" \u2026")


def begins(text: str) -> str:
    """Return the first lines of a long text, which unfolds on the page; empty for a short text."""
    return "" if len(text) <= FEW_LINES else f"{' '.join(text[:FEW_LINES].split())} \u2026"


def setting_rows(config: Config) -> list[tuple[str, str, str, str]]:
    """Return each setting of a run with its value, its default and its meaning."""
    return [
        (setting.key, shown(attrgetter(setting.key)(config)), shown(setting.default), setting.meaning)
        for setting in settings_of()
        if setting.key.split(".")[0] in SECTIONS
    ]


def command(folder: Path, report: dict[str, Any]) -> str:
    """Return the command line of a run, for a shell; empty where it was not started by Hydra, which records it."""
    if not (folder / ".hydra").exists():
        return ""
    start = LAUNCHERS[report["world"]["launcher"]].format(report["world"]["size"])
    return f"{start} {shlex.join(typed_words(folder))}".strip()
