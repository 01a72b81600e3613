"""The revision of a checkpoint: the same for a copy, another after any change that matters."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lopa_dist.models.files import EMBEDDED, PROBE_BYTES, PROBES, revision, same_revision, without_tensors


def test_a_copy_has_the_same_and_a_change_another(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(EMBEDDED, copy)
    assert revision(copy) == revision(EMBEDDED)
    (copy / "notes.md").write_text("not part of it")
    assert revision(copy) == revision(EMBEDDED)
    config = copy / "config.json"
    config.write_text(config.read_text().replace('"rope_theta": 10000', '"rope_theta": 10001'))
    assert revision(copy) != revision(EMBEDDED)


def test_each_tensor_of_large_weights_counts(tmp_path: Path) -> None:
    """Training may change norms or biases alone, which stand between the evenly spread probes."""
    size = PROBES * PROBE_BYTES // 4
    names = [f"{place}.{kind}" for place in range(8) for kind in ("bias", "weight")]  # as they are sorted in the file
    tensors = {name: torch.zeros(size // 8 if name.endswith("weight") else 8) for name in names}
    found = set()
    for changed in [None, *names]:
        now = {name: tensor + (name == changed) for name, tensor in tensors.items()}
        save_file(now, tmp_path / "model.safetensors")
        found.add(revision(tmp_path))
    assert (tmp_path / "model.safetensors").stat().st_size > PROBES * PROBE_BYTES
    assert len(found) == 1 + len(names)
    assert all(re.fullmatch(r"[0-9a-f]{16}-[0-9a-f]{8}", one) for one in found)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("a", "a", True), ("a", "b", False), ("a-1", "a-1", True), ("a-1", "a-2", False), ("a-1", "a", True),
        ("a", "a-1", True), ("a-1", "b", False), ("a+c", "a", False), ("a-1+c", "a+c", True), ("a-1+c", "a-1+d", False),
        (None, None, True), (None, "a", False),
    ],
)  # fmt: skip
def test_a_revision_of_an_earlier_version_has_no_part_of_tensors(
    one: str | None, other: str | None, same: bool
) -> None:
    length = dict.fromkeys("abcd", 16) | dict.fromkeys("12", 8)  # of the digits that a character stands for

    def spelt(text: str | None) -> str | None:
        return text and "".join(name * length.get(name, 1) for name in text)

    assert same_revision(spelt(one), spelt(other)) == same_revision(spelt(other), spelt(one)) == same


def test_what_is_no_revision_is_compared_as_it_is() -> None:
    assert not same_revision("/x/lora", "/x/lora-v2")
    assert same_revision("/x/lora", "/x/lora")


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


def test_a_revision_without_its_part_of_tensors() -> None:
    short, adapted = "a" * 16, f"{'a' * 16}+{'b' * 16}"
    assert without_tensors(f"{short}-{'1' * 8}") == without_tensors(short) == short
    assert without_tensors(f"{short}-{'1' * 8}+{'b' * 16}-{'2' * 8}") == adapted
    assert without_tensors("/x/lora-v2") == "/x/lora-v2"
