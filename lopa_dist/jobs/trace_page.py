"""A trace as a page of its own: the answer, coloured by the step that filled each token, and a slider through time."""

from __future__ import annotations

from pathlib import Path

from lopa_dist.jobs.page import write_page
from lopa_dist.jobs.trace import BONUS, LOOKAHEAD, Trace


def write_trace_page(found: Trace, file: Path) -> None:
    """Write the page."""
    order = found.order
    kinds = {position: kind for step in found.steps for position, kind in step.filled.items()}
    data = {
        "prompt": found.prompt,
        "tokens": [
            {"text": text, "step": order.get(i, 0), "kind": kinds[i] if kinds.get(i) in (LOOKAHEAD, BONUS) else ""}
            for i, text in enumerate(found.texts)
        ],
        "steps": [
            {
                "branches": s.branches,
                "winner": s.winner,
                "end": s.end,
                "filled": len(s.filled),
                "drafts": s.drafts,
                "accepted": s.accepted,
                "rejected": s.rejected[1] if s.rejected else "",
            }
            for s in found.steps
        ],
    }
    write_page(file, "trace.html", custom_id=found.custom_id, steps=len(found.steps), data=data)
