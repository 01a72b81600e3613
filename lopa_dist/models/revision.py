"""What tells two checkpoints apart, without reading all of a large one."""

from __future__ import annotations

import hashlib
from pathlib import Path

PROBES, PROBE_BYTES = 64, 65_536


def revision(folder: Path) -> str:
    """A hash of a checkpoint's content: its JSON and text files whole, its weights by size and evenly spread probes.

    16 hex digits. The same for a copy elsewhere; different after training, merging or converting.
    """
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".txt", ".jinja", ".safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            if file.suffix != ".safetensors" or size <= PROBES * PROBE_BYTES:
                digest.update(content.read())
                continue
            for i in range(PROBES):
                content.seek((size - PROBE_BYTES) * i // (PROBES - 1))
                digest.update(content.read(PROBE_BYTES))
    return digest.hexdigest()[:16]
