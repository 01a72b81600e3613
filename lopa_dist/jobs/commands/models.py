"""`lopa-dist models`: the families that run, their presets, and what their numbers were compared with."""

from __future__ import annotations

from collections.abc import Iterator

from lopa_dist.config import CONF
from lopa_dist.models.compared import COMPARED, presets
from lopa_dist.models.families import FAMILIES, PATTERNS

Rows = list[tuple[str, str]]
NONE = "none"


def facts(family: str) -> Rows:
    """What is said of a family, by heading."""
    one, names = COMPARED[family], sorted(file.stem for file in (CONF / "model").glob("*.yaml"))
    difference = "" if one.difference is None else f", largest difference {one.difference:.0e}".replace("e-0", "e-")
    return [
        ("checkpoints", one.checkpoints),
        ("presets", ", ".join(presets(family, names)) or NONE),
        ("context", PATTERNS[FAMILIES[family].pattern].context),
        ("its authors' way", one.rule),
        ("logits", one.logits + difference),
        ("texts", one.texts or "not compared"),
        ("checkpoints that have run", one.run or NONE),
    ]


def lines() -> Iterator[str]:
    """The table as text, family by family."""
    for family in COMPARED:
        yield family
        width = max(len(heading) for heading, _ in facts(family))
        yield from (f"  {heading:{width}}  {fact}" for heading, fact in facts(family))


def markdown() -> str:
    """The table as docs/models.md has it."""
    headings = ["family", *(heading for heading, _ in facts(next(iter(COMPARED))))]
    found = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    for family in COMPARED:
        one = dict(facts(family))
        names = one["presets"]
        one["presets"] = names if names == NONE else ", ".join(f"`{name}`" for name in names.split(", "))
        one["context"] = f"`{one['context']}`"
        found.append(f"| `{family}` | " + " | ".join(one.values()) + " |")
    return "\n".join(found) + "\n"
