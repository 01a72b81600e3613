"""The figures of a run, counted honestly, and beside them the same as the reference counts them."""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from lopa_dist import __version__
from lopa_dist.config import Config
from lopa_dist.engine.draft_kinds import SOURCES
from lopa_dist.jobs.folder.merged import Merged
from lopa_dist.jobs.folder.packed import Columns
from lopa_dist.jobs.folder.results import kind_of_error
from lopa_dist.tasks.task import Item, Score

if TYPE_CHECKING:  # figures are shown without torch, which takes seconds to import
    from lopa_dist.engine.request import Generation
    from lopa_dist.engine.statistics import Statistics
    from lopa_dist.parallel.group import Group

PACKAGES = ("torch", "transformers", "hydra-core", "wandb")  # whose versions are in the report
ALSO = "also."  # prefix of the columns of `Figures.also`
TRIES = ("tries", "failed_tokens", "invalid")  # counts for answers that must have a format
MOST_REASONS = 8  # the most reasons of failures in a report
LONGEST_REASON = 160  # the most characters of a reason
LEAST = 5  # the fewest answers of a group whose accuracy is reported


@dataclass(frozen=True)
class Figures:
    """What the report needs of one request."""

    tokens: int
    forwards: int
    seconds: float
    first_step_seconds: float
    filled: int
    correct: bool | None
    also: dict[str, bool] = field(default_factory=dict)  # whether it is right by other rules of reading it
    probability: float | None = None  # geometric mean of its tokens' probabilities, where asked for
    tries: dict[str, int] = field(default_factory=dict)  # of an answer that must have a format (`TRIES`)
    cut: bool | None = None  # whether the answer ended at its limit of tokens; None where a text was scored

    @classmethod
    def of(cls, g: Generation, score: Score | None, item: Item) -> Figures:
        """Return the figures of a finished request."""
        tries = {}
        if item.response_format is not None:
            tries = {"tries": g.tries, "failed_tokens": g.failed_tokens, "invalid": int(bool(g.invalid))}
        return cls(
            tokens=len(g.tokens),
            forwards=g.forwards,
            seconds=g.seconds,
            first_step_seconds=g.first_step_seconds,
            filled=g.filled,
            correct=score.correct if score else None,
            also=dict(score.also) if score else {},
            probability=math.exp(mean([token.logprob for token in g.written])) if g.written else None,
            tries=tries,
            cut=None if g.likelihoods is not None else g.finish_reason == "length",
        )


def build_report(
    config: Config,
    merged: Merged,
    errors: int,
    statistics: Statistics,
    traffic: Mapping[str, int],
    group: Group,
    wall_s: float,
) -> dict[str, Any]:
    """Return the `report.json` of a job: what `counted` returns, and what only the last attempt knows.

    Steps and times are of the last attempt (`statistics`, `traffic`, `wall_s`), but `decode_s` is of all attempts.
    """
    steps, world = max(1, statistics.steps), group.world
    own = {"python": platform.python_version(), "lopa_dist": __version__}
    return counted(config, merged, errors, generation_s(merged), wall_s) | {
        "step_ms": statistics.milliseconds(),
        "steps": statistics.steps,
        "comm_bytes_per_step": {what: amount / steps for what, amount in traffic.items()},
        "world": {"size": world.size, **asdict(group.mesh), "backend": group.backend, "launcher": world.launcher},
        "versions": own | {package: version(package) for package in PACKAGES},
    }


def counted(config: Config, merged: Merged, errors: int, decode_s: float, wall_s: float) -> dict[str, Any]:
    """Return the figures of `report.json` that follow from the finished requests, and the settings.

    Requests of all attempts are counted; each has the forwards of the attempt that finished it.

    `completion_tokens` end at the first EOS. Each pass of a sequence through the model is a forward, prefill included.
    `rows` are those computed for windows, with the rows of branches and drafts. A request's time runs from admission
    to finish. `reference_counting` counts as the LoPA code does: with filler, one more forward per sample, and without
    the time of the first step.

    Args:
        config: of the job.
        merged: the finished requests.
        errors: how many requests could not run, or failed.
        decode_s: seconds of generation.
        wall_s: seconds of wall time.
    """
    figures, work = merged.figures, merged.work
    tokens, forwards, seconds, filled = (figures[name] for name in ("tokens", "forwards", "seconds", "filled"))
    later = seconds - figures["first_step_seconds"]
    rates = tokens / np.maximum(seconds, 1e-9)
    report: dict[str, Any] = {"schema": 1, "requests": len(figures) + errors, "errors": errors}
    if len(merged.prompts.all) < report["requests"]:
        report["prompts"] = len(merged.prompts.all)
    if merged.unjudged:
        report["unjudged"] = merged.unjudged
    correct = figures.known("correct")
    if len(correct):
        report |= {"accuracy": mean(correct), "judged": len(correct), "problems": len(merged.prompts.judged)}
    for name in sorted(name for name in figures.columns if name.startswith(ALSO)):
        report[f"accuracy_{name.removeprefix(ALSO)}"] = mean(figures.known(name))
    if len(correct):
        report["accuracy_95"] = [*wilson(mean(correct), report["problems"])]
    if len(cut := figures.known("cut")):
        report["cut"] = int(cut.sum())
    if groups := reliability(figures):
        report["reliability"] = groups
    if len(answers := figures.known("tries.tries")):
        tries = {name: int(figures.known(f"tries.{name}").sum()) for name in TRIES}
        report["tries"] = tries | {"answers": len(answers)}
    report |= {
        "completion_tokens": int(tokens.sum()),
        "prompt_tokens": {"total": work.prompt_tokens, "reused": work.prompt_reused},
        "forwards": int(forwards.sum()),
        "tpf": ratio(tokens.sum(), forwards.sum()),
        "tokens_per_s": {
            "mean": mean(rates),
            "max": float(rates.max(initial=0.0)),
            "top10": mean(np.sort(rates)[-10:]),
            "job": ratio(tokens.sum() if merged.generated is None else merged.generated, decode_s),
        },
        "latency_s": {f"p{q}": float(np.percentile(seconds, q)) if len(seconds) else 0.0 for q in (50, 90, 99)},
        "reference_counting": {
            "tokens": int(filled.sum()),
            "forwards": int(forwards.sum() + len(figures)),
            "tpf": ratio(filled.sum(), forwards.sum() + len(figures)),
            "tokens_per_s": mean((filled / np.where(later > 0, later, 1))[later > 0]),
        },
    }
    branches = max(config.decode.max_branches, 1 + max(work.wins, default=0))  # earlier attempts may have had more
    wins = [work.wins.get(j, 0) for j in range(branches)]
    report["branch"] = {"k": config.decode.branches, "wins": wins}
    if work.accepted_with:
        accepted_with = [work.accepted_with.get(j, 0) / max(1, sum(wins)) for j in range(len(wins))]
        report["branch"] |= {"accepted_with": accepted_with} if any(accepted_with) else {}
    if work.proposed:
        report["drafts"] = {
            "m": config.decode.drafts,
            "accepted_per_forward": work.accepted_per_forward(),
            "accepted_share": work.accepted_share(),
            "acceptance": work.acceptance(),  # shares, by depth
            "chains": {str(length): count for length, count in sorted(work.proposed.items())},  # forwards, by drafts
        }
    if work.verified_from:
        report["drafts"]["sources"] = {
            name: {"verified": work.verified_from[number], "accepted": work.accepted_from[number]}
            for number, name in enumerate(SOURCES)
        }
        if by_branches := work.drafts_accepted - sum(work.accepted_from.values()):  # in place of the chain's drafts
            report["drafts"]["accepted_from_branches"] = by_branches
    return report | {
        "rows": work.rows,
        "rows_per_token": ratio(work.rows, tokens.sum()),
        **{section: asdict(getattr(config, section)) for section in ("model", "task", "decode", "engine", "parallel")},
        "seed": config.seed,
        "decode_s": decode_s,
        "wall_s": wall_s,
    }


def failures(lines: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many requests failed for each reason (`kind_of_error`), the most frequent first."""
    reasons = Counter(
        kind_of_error(str(line["error"]))[:LONGEST_REASON] for line in lines if line["finish_reason"] == "error"
    )
    return dict(reasons.most_common(MOST_REASONS))


def generation_s(merged: Merged) -> float:
    """Return the seconds of generation in all attempts together, each up to the last entry that it wrote."""
    figures, replicas = merged.figures, merged.replicas
    attempts = np.append(figures["attempt"], [replica["attempt"] for replica in replicas])
    seconds = np.append(figures["at"], [replica["at"] for replica in replicas])
    return sum(float(seconds[attempts == attempt].max()) for attempt in set(attempts.tolist()))


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval of a share of `count`; it also holds if all of a few are right."""
    z, count = 1.96, max(1, count)
    middle = share + z**2 / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    scale = 1 + z**2 / count
    low, high = max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)
    return min(low, share), max(high, share)  # rounding may put it outside where all or none are right


def reliability(figures: Columns) -> list[dict[str, float]]:
    """Return the share of right answers in up to ten equal groups by probability; empty where that is not known."""
    probability, correct = figures["probability"], figures["correct"]
    judged = np.flatnonzero(~np.isnan(probability + correct))
    ranked = judged[np.argsort(probability[judged], kind="stable")]
    groups = np.array_split(ranked, min(10, len(ranked) // LEAST)) if len(ranked) >= LEAST else []
    return [{"probability": mean(probability[g]), "accuracy": mean(correct[g]), "answers": len(g)} for g in groups]


def mean(values: Any) -> float:
    """Return the mean; 0 if there are no values."""
    return float(np.mean(values)) if len(values) else 0.0


def ratio(a: float, b: float) -> float:
    """Return the quotient ``a / b``; 0 if b is 0."""
    return float(a / b) if b else 0.0
