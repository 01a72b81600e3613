"""A run's figures, as `report.json` and in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from lopa_dist.atomic import write_lines
from lopa_dist.config import Config, ModelOptions, TaskConfig
from lopa_dist.decode import DecodeConfig
from lopa_dist.engine.config import EngineConfig
from lopa_dist.jobs.folder.attempt_record import AttemptRecord
from lopa_dist.jobs.folder.results import AGAIN
from lopa_dist.jobs.show.metrics import wilson

UNCONFINED = "The model's programs were run unconfined, only with limits (task.allow_code_execution=unconfined)."

INVALID = "in the wrong format"
UNJUDGED = "{} answers: judging failed, so they are left out of the accuracy; the same command tries again"


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Write `report.json` into `folder`; the file is always complete or not there."""
    write_lines(folder / "report.json", [json.dumps(report, indent=2), "\n"])


def read_report(file: Path) -> dict[str, Any]:
    """Return what a `report.json` has.

    Raises:
        ValueError: it is incomplete, or no report.
    """
    try:
        report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is incomplete ({error}); start its job again, which rewrites it") from error
    if not isinstance(report, dict):
        raise ValueError(f"{file} is not the report of a job; start its job again, which makes it anew")
    return report


def why_no_results(folder: Path, otherwise: str, below: bool = False) -> str:
    """Return why a folder lacks what a finished job leaves: its job has begun but not ended, or else `otherwise`.

    Args:
        folder: of a run.
        otherwise: what to say where no job has begun.
        below: whether a job may also have begun in a folder below it, at any depth.
    """
    if not any(folder.glob("**/journal" if below else "journal")):
        return f"{folder}: {otherwise}"
    return f"{folder}: not finished; `lopa-dist status {quote(str(folder))}` says how it goes on"


def check_results(folder: Path) -> None:
    """Raise a ValueError that says what to do unless a folder has the report and the results of a job."""
    if not (folder / "report.json").exists():
        raise ValueError(why_no_results(folder, "no report.json; name the folder of a finished run"))
    if not (folder / "results.jsonl").exists():
        raise ValueError(f"{folder}: its results.jsonl is gone; {AGAIN}")


def typed_settings(folder: Path) -> dict[str, str]:
    """Return the settings among the words that were typed for a run, by their keys."""
    return dict(word.partition("=")[::2] for word in typed_words(folder) if not word.startswith(("-", "hydra.")))


def typed_words(folder: Path) -> list[str]:
    """Return the settings that were typed for the last attempt in `folder`; empty where Hydra did not start it."""
    record = AttemptRecord.last(folder / "journal")
    file = folder / ".hydra" / "overrides.yaml"
    if record and record.words is not None:
        words = record.words
    else:
        words = yaml.safe_load(file.read_text(encoding="utf-8")) or [] if file.exists() else []
    # a sweep writes a backslash before each colon, which needs none, outside of quotes
    return [word if {"'", '"'} & {*word} else word.replace("\\:", ":") for word in words]


def config_of(report: dict[str, Any]) -> Config:
    """Return the configuration that a report was made with; those of ranks, logging and the like are the defaults.

    Raises:
        ValueError: this version does not know some of its settings, or needs others.
    """
    try:
        return Config(
            model=ModelOptions(**report["model"]),
            task=TaskConfig(**report["task"]),
            decode=DecodeConfig(**report["decode"]),
            engine=EngineConfig(**report["engine"]),
            seed=report["seed"],
        )
    except (TypeError, KeyError) as error:
        version, made = report.get("versions", {}).get("lopa_dist", "of another version"), report.get("made") or {}
        raise ValueError(
            f"this lopa_dist does not know its settings ({error}): it was made with lopa_dist {version}"
            f"{' on ' + made['date'][:10] if made.get('date') else ''}; use that version, or run the job again"
        ) from error


def figures(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names of a report's figures, and the figures in words."""
    scored = "masks" in report
    yield "requests", f"{report['requests']} ({report['errors']} with errors)"
    if report.get("unjudged"):
        yield "not judged", UNJUDGED.format(report["unjudged"])
    if "accuracy" in report:
        yield "accuracy (95 % confidence)", with_interval(report)
    yield from ((f"accuracy, {key.removeprefix('accuracy_')}", f"{report[key]:.1%}") for key in report if is_rule(key))
    for part, values in report.get("metrics", {}).items():  # as the task's own library names them
        yield from ((f"{part}: {name}", f"{value:.4g}") for name, value in values.items())
    if tries := report.get("tries"):
        yield (
            "answers that must be JSON",
            f"{tries['answers'] - tries['invalid']} of {tries['answers']} are, in {tries['tries']} tries; "
            f"{tries['failed_tokens']} tokens were thrown away, whose forwards are counted",
        )
    if cut := report.get("cut"):
        limit = "decode.max_new_tokens, or max_tokens of their lines"
        yield "answers cut at their limit", f"{cut} of {report['requests'] - report['errors']} ({limit})"
    if scored:
        yield "tokens scored", f"{report['completion_tokens']}"
    else:
        yield "completion tokens", f"{report['completion_tokens']} (up to the first EOS)"
        if "prompt_tokens" in report:
            total, reused = report["prompt_tokens"]["total"], report["prompt_tokens"]["reused"]
            yield "prompt tokens", f"{total}, of which {reused} had been computed for another request"
    if report.get("chat_template") is False:
        yield "prompts", "go in as they are, without a chat template"
    yield "forwards", f"{report['forwards']} ({'one a mask' if scored else 'prefill included'})"
    if not scored:
        yield "tokens per forward (TPF)", f"{report['tpf']:.2f}"
    if report.get("rows_per_token"):
        yield "window rows per token", f"{report['rows_per_token']:.1f} (rows of branches and drafts included)"
    speed = report["tokens_per_s"]
    yield "tokens/s of the job", f"{speed['job']:.1f}"
    if "latency_s" in report:
        yield "tokens/s of a request", f"mean {speed['mean']:.1f}, top-10 {speed['top10']:.1f}, max {speed['max']:.1f}"
        yield "latency", ", ".join(f"{name} {s:.3f} s" for name, s in report["latency_s"].items())
    wall, decoding = f"{report['wall_s']:.1f} s", f"{report['decode_s']:.1f} s"
    if (attempts := report.get("attempts", 1)) > 1:
        yield "wall time", f"{wall} in the last of {attempts} attempts; decoding took {decoding} in all of them"
    else:
        yield "wall time", f"{wall}, of which decoding {decoding}"


def duration(seconds: float) -> str:
    """Return a time as people write it: seconds below a minute, else minutes or hours."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def is_rule(key: str) -> bool:
    """Return whether a report's `key` is the accuracy by another rule of reading answers."""
    return key.startswith("accuracy_") and key != "accuracy_95"


def judged(report: dict[str, Any]) -> int:
    """Return the number of answers that the accuracy counts; for older reports, that of requests without errors."""
    return int(report.get("judged", report["requests"] - report["errors"]))


def problems(report: dict[str, Any]) -> int:
    """Return on how many problems a run was judged: several samples of a prompt are one problem."""
    older = max(1, judged(report) // int(report.get("task", {}).get("samples", 1)))
    return int(report.get("problems", older))


def prompts(report: dict[str, Any]) -> int:
    """Return how many prompts a run has answered: fewer than its requests where some got several samples."""
    older = report["requests"] // int(report.get("task", {}).get("samples", 1))
    return int(report.get("prompts", older if "problems" not in report else report["requests"]))


def draws(report: dict[str, Any]) -> bool:
    """Return whether a run's tokens are drawn by its seed.

    Reports of earlier versions do not say if prompts of a batch have temperatures of their own: they may.
    """
    return bool(report.get("draws", report["decode"].get("temperature") or report["task"]["name"] == "batch"))


def has_samples(report: dict[str, Any]) -> bool:
    """Return whether some prompts got several answers."""
    return prompts(report) < report["requests"]


def accuracy_interval(report: dict[str, Any]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the accuracy; several samples of a prompt count as one problem."""
    return wilson(report["accuracy"], problems(report))


def with_interval(report: dict[str, Any]) -> str:
    """Return the accuracy and its 95 % confidence interval, in percent."""
    low, high = accuracy_interval(report)
    return f"{report['accuracy']:.1%} ({100 * low:.1f} to {100 * high:.1f})"


def attempts_sentence(report: dict[str, Any]) -> str:
    """Return a sentence on which attempts the figures are of; empty if there was only one attempt."""
    if report.get("attempts", 1) < 2:
        return ""
    return (
        f"Attempts: {report['attempts']}. What is counted, and tokens per second, is of all of them; times of steps, "
        "bytes and the wall time are of the last one."
    )


OF_SOURCE = {"masks": "masks", "text": "the job's texts", "own": "the request's own text"}
"""The names of sources of drafts in sentences."""


def drafts_sentence(report: dict[str, Any]) -> str:
    """Return in words how many drafts were accepted, and what that means; empty where the report has no drafts."""
    if "drafts" not in report:
        return ""
    drafts, wins = report["drafts"], report.get("branch", {}).get("wins", [])  # forwards by the branch that won
    chains = {int(length): count for length, count in drafts.get("chains", {}).items()}
    verified = sum(length * count for length, count in chains.items()) / max(1, sum(chains.values()))
    number = (
        f"chosen in every step, {verified:.1f} on average" if drafts["m"] == "auto" else f"{drafts['m']} per branch"
    )
    share = f" ({drafts['accepted_share']:.0%} of those verified)" if "accepted_share" in drafts else ""
    others = sum(wins[1:]) / max(1, sum(wins))
    tree = f" In {others:.0%} of the forwards with branches, one that holds second choices won." if sum(wins) else ""
    sources = ", ".join(
        f"{one['accepted']:,} of {one['verified']:,} from {OF_SOURCE[source]}"
        for source, one in drafts.get("sources", {}).items()
    )
    if by_branches := drafts.get("accepted_from_branches"):
        sources += f"; {by_branches:,} from lookahead branches that won"
    came = f" Accepted by source: {sources}." if sources else ""
    return (
        f"Drafts: {number}; {drafts['accepted_per_forward']:.2f} accepted per forward{share}.{came} A draft is "
        f"accepted if the model, in the context of the drafts before it, predicts the same token.{tree} "
        "Accepted with all before it, by depth:"
    )
