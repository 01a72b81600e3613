"""`lopa-dist models`: the families that run, their presets, and what their numbers were compared with."""

from __future__ import annotations

from collections.abc import Iterator

from lopa_dist.config import CONF
from lopa_dist.models.compared import COMPARED, presets
from lopa_dist.models.families import FAMILIES, PATTERNS

NONE = "none"


def facts(family: str) -> dict[str, str]:
    """What is said of a family, by heading."""
    entry, names = COMPARED[family], sorted(file.stem for file in (CONF / "model").glob("*.yaml"))
    difference = "" if entry.difference is None else f", largest difference {entry.difference:.0e}".replace("e-0", "e-")
    return {
        "checkpoints": entry.checkpoints,
        "presets": ", ".join(presets(family, names)) or NONE,
        "context": PATTERNS[FAMILIES[family].pattern].context,
        "its authors' way": entry.rule,
        "logits": entry.logits + difference,
        "texts": entry.texts or "not compared",
        "checkpoints that have run": entry.run or NONE,
    }


def lines() -> Iterator[str]:
    """The table as text, family by family."""
    for family in COMPARED:
        yield family
        width = max(map(len, facts(family)))
        yield from (f"  {heading:{width}}  {fact}" for heading, fact in facts(family).items())


def markdown() -> str:
    """The table as docs/models.md has it."""
    headings = ["family", *facts(next(iter(COMPARED)))]
    rows = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    for family in COMPARED:
        cells = facts(family)
        names = cells["presets"]
        cells["presets"] = names if names == NONE else ", ".join(f"`{name}`" for name in names.split(", "))
        cells["context"] = f"`{cells['context']}`"
        rows.append(f"| `{family}` | " + " | ".join(cells.values()) + " |")
    return "\n".join(rows) + "\n"
