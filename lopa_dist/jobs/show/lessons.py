"""What a job has learned while it ran, in words."""

from __future__ import annotations

from typing import Any


def lesson_sentence(lesson: dict[str, Any]) -> str:
    """Return in words what came of a job's lesson, which is an entry of its report."""
    if not lesson["steps"]:
        return f"Drafts could not be learned: {lesson['problem']}."
    said = []
    if lesson["taken"]:
        said.append(f"The job went on with them, expected to be {lesson['gain']:.2f} times as fast.")
    elif not lesson["problem"]:
        how = "with what it had learned before" if lesson.get("adopted") else "without them"
        said.append(f"That would not have paid, so the job went on {how}.")
    if lesson["problem"]:
        problem = lesson["problem"]
        said.append(f"But {problem}." if lesson["taken"] else f"{problem[0].upper()}{problem[1:]}.")
    return (
        f"In {lesson['seconds']:.0f} s, masks learned to draft from {lesson['answers']} answers: of a chain, "
        f"{lesson['accepted']:.2f} drafts would be accepted in held-out answers, instead of "
        f"{lesson['accepted_before']:.2f}. {' '.join(said)}"
    )
