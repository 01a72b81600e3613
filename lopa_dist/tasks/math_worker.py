"""math-verify in a separate process: it limits its time by alarms, which need a main thread."""

from __future__ import annotations

import logging
from typing import Any

from lopa_dist.tasks.worker import serve


def judge(question: tuple[str, str]) -> dict[str, Any]:
    """Whether a text's answer equals the reference's, and the answer as text; both are parsed for up to 5 s."""
    from math_verify import parse, verify

    reference, text = question
    try:
        answer, gold = parse(text), parse(reference)
        return {"correct": bool(verify(gold, answer)), "extracted": str(answer[-1]) if answer else None}
    except Exception as error:  # sympy's have nothing in common
        return {"correct": False, "extracted": None, "reason": f"math-verify: {type(error).__name__}: {error}"[:200]}


if __name__ == "__main__":
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of every text that it cannot read
    serve(judge)
