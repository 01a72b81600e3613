"""Profiles of models on devices: made by `lopa-dist profile`, kept in the user's cache, read where jobs say auto."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lopa_dist.config import Config, composed, concrete
from lopa_dist.engine.profile import Profile, measure
from lopa_dist.jobs.loading import choose_device, choose_dtype, load
from lopa_dist.kernels.attention import candidates
from lopa_dist.models.families import Native, native
from lopa_dist.models.files import find
from lopa_dist.models.revision import revision
from lopa_dist.parallel.group import Group
from lopa_dist.parallel.launcher import World

log = logging.getLogger("lopa_dist")

BUDGET_S = 20.0
MOST_ROWS = 4096


def cache_folder() -> Path:
    """Where profiles are kept: `$LOPA_CACHE`, or lopa_dist in the user's cache folder."""
    if "LOPA_CACHE" in os.environ:
        return Path(os.environ["LOPA_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lopa_dist"


def subject(config: Config, device: torch.device) -> dict[str, Any]:
    """What a profile holds for: a model in its precision on a device, with this software."""
    lora = config.model.lora and revision(find(config.model.lora, "model.lora"))
    processor = platform.processor() or platform.machine()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "model": revision(find(config.model.path)),
        "lora": lora,
        "dtype": choose_dtype(config.model, device),
        "quantization": config.model.quantization,
        "attention": config.engine.attention,
        "graphs": config.engine.graphs,
        "torch": torch.__version__,
        "triton": installed("triton"),
    }


def installed(package: str) -> str | None:
    """A package's version, or null."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def file_of(subject: dict[str, Any]) -> Path:
    """Where a profile is kept."""
    text = json.dumps(subject, sort_keys=True)
    return cache_folder() / f"profile-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def profile_of(config: Config, device: torch.device, needed: bool) -> Profile | None:
    """The profile that a job with this configuration goes by; null where there is none and none is `needed`.

    Raises:
        ValueError: there is none; it says how to make it.
    """
    wanted = subject(config, device)
    file = file_of(wanted)
    if not file.exists():
        if not needed:
            return None
        raise ValueError(
            f"decode.branches=auto and engine.max_rows=auto need a profile of this model on {wanted['device']}, and "
            f"{file} is not there: run lopa-dist profile once, with the job's model.* and engine.* options (half a "
            "minute), or give numbers"
        )
    found = json.loads(file.read_text())
    return Profile({int(rows): s for rows, s in found["seconds"].items()}, found["window"], found["attention"])


def settled(config: Config, native: Native, device: torch.device, group: Group) -> Config:
    """The configuration with every ``auto`` of decode.* and engine.* replaced; the same on all ranks.

    Without a profile, ``engine.attention=auto`` stays what is likely best on the device.

    Raises:
        ValueError: branches or rows are to be chosen by a profile, and there is none.
    """
    branches, rows = config.decode.branches, config.engine.max_rows
    needed = "auto" in (branches, rows)
    if not needed and (config.engine.attention != "auto" or len(candidates(device)) == 1):  # nothing to look up
        return replace(config, decode=concrete(config.decode, native))
    told: list[Any] = []
    profile = profile_of(config, device, needed) if group.world.rank == 0 else None
    if profile is not None:
        free = profile.free_branches(config.engine.max_sequences, group.mesh.branch)
        told = [free, profile.best_rows(), profile.attention]
        if needed:
            log.info(
                "by the profile, %d lookahead branches cost next to nothing and steps of %d rows are best", *told[:2]
            )
    told = json.loads(group.agree("profile", json.dumps(told)))
    if not told:
        return replace(config, decode=concrete(config.decode, native))
    free, best, attention = told
    engine = replace(
        config.engine,
        max_rows=best if rows == "auto" else rows,
        attention=attention if config.engine.attention == "auto" else config.engine.attention,
    )
    return replace(config, decode=concrete(config.decode, native, free), engine=engine)


def make_profile(overrides: list[str]) -> None:
    """`lopa-dist profile [overrides]`: measure, keep, and say what follows."""
    config = composed(overrides)
    device = choose_device(config, World("python"))
    model = load(config.model, device, warn=True)
    decode = concrete(config.decode, native(model.config, config.model.pattern))
    found = measure(model, decode, config.engine.attention, config.engine.graphs, MOST_ROWS, BUDGET_S)
    about = subject(config, device)
    file = file_of(about)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"subject": about} | asdict(found), indent=1) + "\n")
    table = Table("rows", "ms", "us a row", title=f"a forward of {config.model.path} on {about['device']}")
    for rows, seconds in found.seconds.items():
        table.add_row(str(rows), f"{1e3 * seconds:.2f}", f"{1e6 * seconds / rows:.1f}")
    console = Console()
    console.print(table)
    console.print(f"engine.attention=auto: {found.attention}")
    console.print(f"engine.max_rows=auto: {found.best_rows()}")
    for sequences in sorted({1, 4, config.engine.max_sequences}):
        branches = found.free_branches(sequences, 1)
        console.print(f"decode.branches=auto with {sequences} in flight on one rank: {branches}")
    console.print(f"kept in {file}")
