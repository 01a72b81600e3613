"""A checkpoint's files: where they are, what identifies them, and how they are read without unpickling."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from lopa_dist.hub import why_not_on_hub

ASSETS = Path(__file__).parent.parent / "assets"
SHIPPED = ("embedded", "lists", "causal", "causal_lists")
"""The checkpoints in the package, by the names of their folders."""
EMBEDDED = ASSETS / "embedded"
PROBES, PROBE_BYTES = 64, 65_536
TENSOR_PROBE_BYTES, MOST_PROBED = 4096, 512  # bytes read of a large tensor; the most large tensors probed in a file
REVISION = re.compile(r"[0-9a-f]{16}(-[0-9a-f]{8})?(\+[0-9a-f]{16}(-[0-9a-f]{8})?)?")
MOST_HEADER_BYTES = 100_000_000  # as in the safetensors library


class CheckpointError(ValueError):
    """The error for a checkpoint that cannot be used; the message says why and what to do."""


def find(path: str, key: str = "model.path") -> Path:
    """Return the folder of `path`: one of `SHIPPED`, a local folder, or a hub id (downloaded, safetensors only).

    Raises:
        CheckpointError: there is none; the message begins with `key`, the option that named it.
    """
    folder = local(path, key)
    if folder is not None:
        if not folder.is_dir():
            raise CheckpointError(f"{key}={path}: no such folder")
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        if isinstance(error, LocalEntryNotFoundError) and (why := why_not_there(path)):
            raise CheckpointError(f"{key}={path}: {why}") from error
        raise CheckpointError(
            f"{key}={path}: neither a folder here nor a model that the Hugging Face hub gave out ({error})"
        ) from error


def local(path: str, key: str = "model.path") -> Path | None:
    """Return the folder that `path` names on this machine, even if it does not exist; None if it can only be a hub id.

    Raises:
        CheckpointError: it is nearly one of `SHIPPED`, so the hub should not be asked; the message has `key`.
    """
    if path in SHIPPED:
        return ASSETS / path
    folder = Path(os.path.expanduser(path))  # pathlib's raises an error where there is no such user
    if folder.is_dir() or folder.is_absolute() or path.startswith("."):
        return folder
    if "/" not in path and (near := get_close_matches(path.lower(), SHIPPED, 1, 0.8)):
        raise CheckpointError(
            f"{key}={path}: neither a folder nor a checkpoint of the package; did you mean {near[0]}?"
        )
    return None


def in_cache(path: str, file: str) -> Path | None:
    """Return the folder of a hub id's `file` if it was downloaded before, else None."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, file)
    return Path(cached).parent if isinstance(cached, str) else None


def why_not_there(path: str) -> str:
    """Return why a checkpoint is not available here, and after a semicolon what to do; empty if it is."""
    if (folder := local(path)) is not None:
        return "" if folder.is_dir() else f"model.path={path}: no such folder; name one, or a hub id"
    if in_cache(path, "config.json") is not None:
        return ""
    remedy = f"where there is a network, run `hf download {path}`, with HF_HOME on a disk that this machine sees, too"
    return why_not_on_hub("model", path, remedy)


def repository(folder: Path) -> str:
    """Return a checkpoint's name: its repository if it is in the hub's cache, else its folder's name."""
    folder = folder.absolute()
    # a snapshot in the cache is models--owner--name/snapshots/commit
    cached = [part for part in folder.parts[:-2] if part.startswith("models--")]
    return cached[-1].removeprefix("models--").replace("--", "/") if cached else folder.name


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        CheckpointError: it cannot be read; the message names the file.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return raw


def unsupported(raw: dict[str, Any], only: dict[str, Any]) -> str | None:
    """Return a message about the first option whose value differs from that in `only`; None if there is none."""
    for key, value in only.items():
        if key in raw and raw[key] != value and (raw[key] or value):  # null, false and {} count as equal
            return f"{key}={raw[key]!r} is not supported, only {value!r}"
    return None


def read_json_if_there(file: Path) -> dict[str, Any]:
    """Return what `read_json` returns, or an empty object if there is no such file."""
    return read_json(file) if file.exists() else {}


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, single or sharded."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{index}: no weight_map with names of files in it")
        names = sorted(set(weight_map.values()))
        if (folder / "model.safetensors").exists() and "model.safetensors" not in names:
            raise CheckpointError(
                f"{folder}: has model.safetensors, and {index.name} for other files; programs differ in which they "
                "take: remove the outdated one"
            )
    else:
        names = ["model.safetensors"]
    missing = [n for n in names if not (folder / n).exists()]
    if missing:
        hint = " (pickle checkpoints are refused: convert to safetensors)" if list(folder.glob("*.bin")) else ""
        raise CheckpointError(f"{folder}: {', '.join(missing)} missing{hint}; fetch the checkpoint again")
    return [folder / n for n in names]


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file mapped into memory: a tensor is read when it is asked for."""
    try:
        with safe_open(file, "pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise CheckpointError(f"{file}: damaged or incomplete ({error}); fetch it again") from error


def revision(folder: Path) -> str:
    """Return a hash of a checkpoint's content: JSON and text files whole, large weights by probes.

    The first 16 hex digits hash all files; of a safetensors file above 4 MiB, its size and 64 evenly spread probes. If
    there is such a file, a hyphen and 8 more digits follow, which hash each small tensor in it, and the beginnings of
    up to 512 large ones, evenly spread. The revision is the same for a copy elsewhere, and differs after training,
    merging or converting, also if only norms or biases were trained.
    """
    digest, of_tensors = hashlib.sha256(), hashlib.sha256()
    large = False
    for file in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".txt", ".jinja", ".safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            if file.suffix != ".safetensors" or size <= PROBES * PROBE_BYTES:
                digest.update(content.read())
                continue
            large = True
            for i in range(PROBES):
                content.seek((size - PROBE_BYTES) * i // (PROBES - 1))
                digest.update(content.read(PROBE_BYTES))
            for first, count in tensor_probes(tensors_in(content)):
                content.seek(first)
                of_tensors.update(content.read(count))
    return digest.hexdigest()[:16] + f"-{of_tensors.hexdigest()[:8]}" * large


def tensor_probes(tensors: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return where to read, and how many bytes: all of each small tensor, and the beginnings of large ones.

    If there are very many large tensors, as in mixtures of experts, only some of them, evenly spread, are read.
    """
    small = [(first, last - first) for first, last in tensors if last - first <= PROBE_BYTES]
    large = [first for first, last in tensors if last - first > PROBE_BYTES]
    spread = large[:: -(-len(large) // MOST_PROBED)] if large else []
    return sorted([*small, *((first, TENSOR_PROBE_BYTES) for first in spread)])


def tensors_in(content: BinaryIO) -> list[tuple[int, int]]:
    """Return where each tensor of a safetensors file begins and ends, in bytes; empty if the file is damaged."""
    content.seek(0)
    length = int.from_bytes(content.read(8), "little")
    try:
        header = json.loads(content.read(length)) if length <= MOST_HEADER_BYTES else {}
        places = [tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"]
        begin = 8 + length
        size = content.seek(0, os.SEEK_END)
        found = sorted((begin + int(first), begin + int(last)) for first, last in places)
        return found if all(begin <= first <= last <= size for first, last in found) else []
    except (ValueError, TypeError, KeyError, AttributeError):  # loading says more of it
        return []


def without_tensors(revision: str) -> str:
    """Return a revision as an earlier version wrote it."""
    return re.sub(r"-[0-9a-f]{8}(?=\+|$)", "", revision) if REVISION.fullmatch(revision) else revision


def same_revision(one: str | None, other: str | None) -> bool:
    """Return whether two revisions may be of the same content.

    Revisions that earlier versions wrote lack the part after the hyphen; then only the first parts are compared.
    ``A+B`` is a checkpoint A with an adapter B that was merged into it.
    """
    if one is None or other is None:
        return one is other
    if not (REVISION.fullmatch(one) and REVISION.fullmatch(other)):
        return one == other
    parts = [tuple(part.partition("-") for part in text.split("+")) for text in (one, other)]
    return len(parts[0]) == len(parts[1]) and all(
        a[0] == b[0] and (a[2] == b[2] or not (a[2] and b[2])) for a, b in zip(*parts, strict=True)
    )
