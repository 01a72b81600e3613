"""What was measured of a device is kept in the user's cache, in files named by all that it holds for."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lopa_dist.whole import whole

Subject = dict[str, Any]
"""All that a measurement depends on, JSON-able: another subject has another file."""


def cache_folder() -> Path:
    """`$LOPA_CACHE`, or lopa_dist in the user's cache folder."""
    if "LOPA_CACHE" in os.environ:
        return Path(os.environ["LOPA_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lopa_dist"


def machine(device: torch.device) -> Subject:
    """The device and the software that drives it."""
    processor = platform.processor() or platform.machine()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
        "torch": torch.__version__,
        "triton": installed("triton"),
    }


def installed(package: str) -> str | None:
    """A package's version, or null."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def file_of(kind: str, subject: Subject) -> Path:
    """Where a measurement of a kind is kept."""
    text = json.dumps(subject, sort_keys=True)
    return cache_folder() / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def keep(kind: str, subject: Subject, found: dict[str, Any]) -> Path:
    """Write a measurement, in place of an older one of the same; returns its file.

    A job that reads meanwhile finds the one or the other, whole.
    """
    file = file_of(kind, subject)
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole(file, f".{platform.node()}-{os.getpid()}") as partial:  # two may measure at once
        partial.write_text(json.dumps({"subject": subject} | found, indent=1) + "\n")
    return file


def kept(kind: str, subject: Subject) -> dict[str, Any] | None:
    """The measurement, or null where there is none."""
    file = file_of(kind, subject)
    try:
        return json.loads(file.read_text()) if file.exists() else None
    except ValueError as error:
        raise ValueError(f"{file} is not whole ({error}); remove it, and measure again") from error
