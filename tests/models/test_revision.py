"""The revision of a checkpoint: the same for a copy, another after any change that matters."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lopa_dist.models.files import EMBEDDED, PROBE_BYTES, PROBES, revision


def test_a_copy_has_the_same_and_a_change_another(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(EMBEDDED, copy)
    assert revision(copy) == revision(EMBEDDED)
    (copy / "notes.md").write_text("not part of it")
    assert revision(copy) == revision(EMBEDDED)
    config = copy / "config.json"
    config.write_text(config.read_text().replace('"rope_theta": 10000', '"rope_theta": 10001'))
    assert revision(copy) != revision(EMBEDDED)


@pytest.mark.parametrize("where", [0, 1, 2])
def test_large_weights_are_probed_from_end_to_end(tmp_path: Path, where: int) -> None:
    size = 2 * PROBES * PROBE_BYTES
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(size))
    before = revision(tmp_path)
    with file.open("r+b") as content:
        content.seek((0, size // 2, size - 1)[where] // PROBE_BYTES * PROBE_BYTES if where < 2 else size - 1)
        content.write(b"\1" * (2 * PROBE_BYTES if where == 1 else 1))
        content.truncate(size)
    assert revision(tmp_path) != before
