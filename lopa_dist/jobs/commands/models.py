"""`lopa-dist models`: the families that can run, their presets, and what their numbers were compared with."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lopa_dist.models import families
from lopa_dist.models.families import FAMILIES, PATTERNS
from lopa_dist.setting_keys import CONF

NONE = "none"


@cache
def compared() -> dict[str, dict[str, Any]]:
    """Return the table of `models/compared.yaml`, by family."""
    table: Any = OmegaConf.to_container(OmegaConf.load(Path(families.__file__).with_name("compared.yaml")))
    return dict(table)


def presets(family: str) -> list[str]:
    """Return the names of a family's presets."""
    names = sorted(file.stem for file in (CONF / "model").glob("*.yaml"))
    patterns = compared()[family].get("presets", [])
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]


def facts(family: str) -> dict[str, str]:
    """Return what the table says of a family, by heading."""
    row = compared()[family]
    return {
        "checkpoints": row["checkpoints"],
        "presets": ", ".join(presets(family)) or NONE,
        "context": PATTERNS[FAMILIES[family].pattern].context,
        "its authors' way": row["rule"],
        "logits": row["logits"],
        "texts": row.get("texts", "not compared"),
        "checkpoints that have run": row.get("run", NONE),
    }


def lines() -> Iterator[str]:
    """Yield the lines of the table as text, family by family."""
    for family in compared():
        yield family
        width = max(map(len, facts(family)))
        yield from (f"  {heading:{width}}  {fact}" for heading, fact in facts(family).items())


def markdown() -> str:
    """Return the table as docs/models.md has it."""
    headings = ["family", *facts(next(iter(compared())))]
    rows = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    for family in compared():
        row = facts(family)
        row["presets"] = ", ".join(f"`{name}`" for name in presets(family)) or NONE
        row["context"] = f"`{row['context']}`"
        rows.append(f"| `{family}` | " + " | ".join(row.values()) + " |")
    return "\n".join(rows) + "\n"
