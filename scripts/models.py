"""Write the table of docs/models.md from `lopa_dist/models/compared.yaml`: ``python scripts/models.py``."""

from __future__ import annotations

import re
from pathlib import Path

from lopa_dist.jobs.commands.models import markdown

PAGE = Path(__file__).parent.parent / "docs" / "models.md"


def page() -> str:
    """Return the page with a new table."""
    found, count = re.subn(r"^\| family \|.*?\n(?!\|)", lambda _: markdown(), PAGE.read_text(), flags=re.M | re.S)
    assert count == 1, "no table in docs/models.md"
    return found


if __name__ == "__main__":
    PAGE.write_text(page())
