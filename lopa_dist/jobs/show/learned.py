"""What a lesson of `lopa-dist learn` brought: its figures, in words, and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopa_dist.jobs.show.page import bars, write_page
from lopa_dist.overrides import typed

if TYPE_CHECKING:  # a page is written without torch
    from lopa_dist.learn.trainer import Lesson

PAGE = "learn.html"
FEW = 20  # with fewer held-out answers, figures say little


def figures(
    lesson: Lesson,
    before: dict[str, dict[str, float]],
    after: dict[str, dict[str, float]] | None,
    answers: int,
    measured: int,
) -> dict[str, Any]:
    """Return the content of `learn.json`; without `after`, which was not measured, nothing is said of it.

    `break_even_answers` is how many more answers pay for the learning, by the seconds per answer before and after, each
    at its fastest number of drafts; None if answers do not get faster, or if too few were held out to tell (`FEW`).
    """
    saved = 0.0
    if after and measured >= FEW:
        saved = min(entry["seconds"] for entry in before.values()) - min(entry["seconds"] for entry in after.values())

    def both(figure: str, digits: int) -> dict[str, dict[str, float | None]]:
        return {
            drafts: {
                "before": round(before[drafts][figure], digits),
                "after": round(after[drafts][figure], digits) if after else None,
            }
            for drafts in before
        }

    return {
        "answers": answers,
        "minutes": round(lesson.seconds / 60, 2),
        "processor_minutes_of_rank_0": round(lesson.processor_s / 60, 2),
        "steps": lesson.steps,
        "rows": lesson.rows,
        "held_out": {
            "answers": measured,
            "acceptance_before": lesson.before.shares,
            "acceptance": lesson.after.shares,
            "accepted_before": round(lesson.before.length, 3),
            "accepted": round(lesson.after.length, 3),
        },
        "tokens_a_forward": both("tpf", 3),
        "seconds_an_answer": both("seconds", 5),
        "break_even_answers": round(lesson.seconds / saved) if saved > 0 else None,
        "losses": [round(loss, 4) for loss in lesson.losses[:: max(1, len(lesson.losses) // 200)]],
    }


def in_words(learned: dict[str, Any], drafts: Path) -> str:
    """Return the outcome in words, and the settings that draft with it."""
    held_out, speed = learned["held_out"], learned["tokens_a_forward"]
    stopped = unmeasured(learned)
    by_drafts = ", ".join(
        f"{n}: {figure['before']:.2f} -> {shown(figure['after'], '.2f')}" for n, figure in speed.items() if n != "0"
    )
    pays = learned["break_even_answers"]
    few = held_out["answers"] < FEW
    so = f"it pays after {pays} more answers"
    if few:
        so = "too few answers were held out to tell whether it pays"
    elif pays is None:
        so = "it does not pay on this machine: answers are not made faster"
    if stopped:
        so = "it was told to stop before it could measure"
    measured = (
        f"of a chain of drafts, {held_out['accepted']:.2f} are accepted instead of {held_out['accepted_before']:.2f} "
        f"({held_out['answers']} held-out answers)\n"
        f"tokens per forward by drafts: {by_drafts}; {so}"
        if held_out["answers"]
        else "no answer was held out, so what it brings was not measured"
    )
    use = "to draft with it all the same" if pays is None and not stopped and not few else "draft with it"
    return (
        f"{learned['minutes']:.1f} minutes; {measured}\n"
        f"{use}: {typed('model.lora', drafts)} model.lora_rows=masks decode.drafts=8 (figures: {drafts / PAGE})"
    )


def unmeasured(learned: dict[str, Any]) -> bool:
    """Return whether the lesson was told to stop before it could measure what it brought."""
    return any(figure["after"] is None for figure in learned["tokens_a_forward"].values())


def shown(figure: float | None, form: str) -> str:
    """Return a figure in a format; a dash if it was not measured."""
    return "-" if figure is None else f"{figure:{form}}"


def write_learn_page(drafts: Path, model: str, learned: dict[str, Any]) -> None:
    """Write the page of a lesson into its folder `drafts`, from the content of `learn.json`."""
    held_out, depths = learned["held_out"], [str(i + 1) for i in range(len(learned["held_out"]["acceptance"]))]
    write_page(
        drafts / PAGE,
        PAGE,
        title=f"drafts that {model} has learned",
        learned=learned,
        unknown=unmeasured(learned) or held_out["answers"] < FEW,
        stopped=unmeasured(learned),
        charts=[
            bars("before", "draft of a chain", depths, held_out["acceptance_before"], ".0%"),
            bars("after", "draft of a chain", depths, held_out["acceptance"], ".0%"),
        ],
        rows=[
            (
                n, *(shown(speed[when], ".2f") for when in ("before", "after")),
                *(shown(seconds and 1000 * seconds, ".1f") for seconds in learned["seconds_an_answer"][n].values()),
            )
            for n, speed in learned["tokens_a_forward"].items()
        ],
    )  # fmt: skip
