"""Profiles of models on devices: made by `lopa-dist profile`, kept in the user's cache, read by jobs that ask for auto."""

from __future__ import annotations

import json
import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from lopa_dist.config import CONF, Config, concrete
from lopa_dist.engine.profile import Profile, measure
from lopa_dist.jobs.loading import choose_device, choose_dtype, load
from lopa_dist.models.families import native
from lopa_dist.models.files import find
from lopa_dist.models.revision import revision
from lopa_dist.parallel.launcher import World

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
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
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
        return version(package) if find_spec(package) else None
    except PackageNotFoundError:
        return None


def stored() -> list[dict[str, Any]]:
    """All profiles in the cache."""
    return [json.loads(file.read_text()) for file in sorted(cache_folder().glob("profile-*.json"))]


def profile_of(config: Config, device: torch.device) -> Profile:
    """The profile that a job with this configuration goes by.

    Raises:
        ValueError: there is none; it says how to make it.
    """
    wanted = subject(config, device)
    for found in stored():
        if found["subject"] == wanted:
            return Profile({int(rows): s for rows, s in found["seconds"].items()}, found["window"])
    raise ValueError(
        f"auto needs a profile of this model on {wanted['device']}, and there is none in {cache_folder()}: run "
        "lopa-dist profile once, with the job's model.* and engine.* options (half a minute)"
    )


def profile_command(arguments: list[str]) -> None:
    """`lopa-dist profile [overrides]`: measure, keep, and say what follows."""
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config = OmegaConf.to_object(compose("config", arguments))
    assert isinstance(config, Config)
    device = choose_device(config, World("python"))
    model = load(config.model, device, warn=True)
    decode = concrete(config.decode, native(model.config, config.model.pattern))
    found = measure(model, decode, config.engine.attention, config.engine.graphs, MOST_ROWS, BUDGET_S)
    told = {"subject": subject(config, device), "window": found.window, "seconds": found.seconds}
    same = [
        file
        for file in cache_folder().glob("profile-*.json")
        if json.loads(file.read_text())["subject"] == told["subject"]
    ]
    file = same[0] if same else cache_folder() / f"profile-{len(stored())}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(told, indent=1) + "\n")
    name = subject(config, device)["device"]
    table = Table("rows", "ms", "us a row", title=f"a forward of {config.model.path} on {name}")
    for rows, seconds in found.seconds.items():
        table.add_row(str(rows), f"{1e3 * seconds:.2f}", f"{1e6 * seconds / rows:.1f}")
    console = Console()
    console.print(table)
    console.print(f"engine.max_rows=auto: {found.best_rows()}")
    for sequences in (1, 4, config.engine.max_sequences):
        branches = found.free_branches(sequences, 1)
        console.print(f"decode.branches=auto with {sequences} in flight on one rank: {branches}")
    console.print(f"kept in {file}")
