"""Profiles of models on devices, kept in the user's cache: made by `lopa-dist profile`, read where jobs say auto."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from lopa_dist.config import Config
from lopa_dist.engine.profile import Profile
from lopa_dist.jobs.device import choose_dtype
from lopa_dist.models.files import find, revision
from lopa_dist.whole import whole

Subject = dict[str, Any]
"""All that a profile depends on, JSON-able: another subject has another file."""


def subject(config: Config, device: torch.device, window: int) -> Subject:
    """Return what a profile holds for: a model in its precision on a device, with windows of so many rows."""
    processor = platform.processor() or platform.machine()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
        "torch": torch.__version__,
        "triton": installed("triton"),
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "model": revision(find(config.model.path)),
        "lora": config.model.lora and revision(find(config.model.lora, "model.lora")),
        "lora_rows": config.model.lora_rows,
        "dtype": choose_dtype(config.model, device),
        "quantization": config.model.quantization,
        "attention": config.engine.attention,
        "graphs": config.engine.graphs,
        "reproducible": config.engine.reproducible,
        "window": window,
    }


def installed(package: str) -> str | None:
    """Return a package's version; None: it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def profile_of(config: Config, device: torch.device, window: int) -> Profile:
    """Return the profile that a job with this configuration goes by.

    Raises:
        ValueError: there is none; it says how to make it.
    """
    wanted = subject(config, device, window)
    found = kept(wanted)
    if found is not None:
        return found
    threads = f" and parallel.threads={wanted['threads']}, as each of its ranks has" if wanted["threads"] else ""
    raise ValueError(
        "decode.branches=auto, decode.one_block_from=auto and engine.max_rows=auto need a profile of this model with "
        f"windows of {window} rows on {wanted['device']}, and {file_of(wanted)} is not there: run lopa-dist profile "
        f"once, with the job's model.*, engine.* and decode.* options{threads} (about a minute), or give numbers"
    )


def cache_folder() -> Path:
    """Return `$LOPA_CACHE`, or lopa_dist in the user's cache folder."""
    if "LOPA_CACHE" in os.environ:
        return Path(os.environ["LOPA_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lopa_dist"


def file_of(subject: Subject) -> Path:
    """Return where the profile of a subject is kept."""
    text = json.dumps(subject, sort_keys=True)
    return cache_folder() / f"profile-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def keep(subject: Subject, profile: Profile) -> Path:
    """Write a profile, in place of an older one of the same subject; returns its file.

    A job that reads meanwhile finds the one or the other, whole.
    """
    file = file_of(subject)
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole(file, f".{platform.node()}-{os.getpid()}") as partial:  # two may measure at once
        partial.write_text(json.dumps({"subject": subject} | asdict(profile), indent=1) + "\n")
    return file


def kept(subject: Subject) -> Profile | None:
    """Return the profile of a subject; None: there is none."""
    file = file_of(subject)
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not whole ({error}); remove it, and measure again") from error
    return Profile({int(rows): seconds for rows, seconds in found["seconds"].items()}, found["window"])
