"""What tells apart two checkouts of one version."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path


@cache
def code_hash() -> str:
    """Return a hash of the package's code: its version does not tell whether somebody has edited the files."""
    package, found = Path(__file__).parent, hashlib.sha256()
    for file in sorted(file for ending in ("*.py", "*.c") for file in package.rglob(ending)):
        found.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:12]
