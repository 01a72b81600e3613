"""Profiles of models on devices: made by `lopa-dist profile`, kept in the user's cache, read where jobs say auto."""

from __future__ import annotations

import json
import logging
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lopa_dist.config import Config, composed, concrete
from lopa_dist.engine.products import choices, measure_products
from lopa_dist.engine.profile import Profile, measure, usual_window
from lopa_dist.engine.runners import Runners, merged
from lopa_dist.jobs.loading import choose_device, choose_dtype, load
from lopa_dist.jobs.measurements import Subject, file_of, keep, kept, machine
from lopa_dist.jobs.products import keep_times
from lopa_dist.kernels.attention import candidates
from lopa_dist.kernels.products import PRODUCTS, Choices
from lopa_dist.models.families import Native, native
from lopa_dist.models.files import find
from lopa_dist.models.revision import revision
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.communicator import Solo
from lopa_dist.parallel.group import Group
from lopa_dist.parallel.launcher import World

log = logging.getLogger("lopa_dist")

KIND = "profile"
BUDGET_S = 20.0  # for the forwards
PRODUCTS_BUDGET_S = 20.0
MOST_ROWS = 4096  # of both: larger steps are prefills


def subject(config: Config, device: torch.device, window: int) -> Subject:
    """What a profile holds for: a model in its precision on a device, with windows of so many rows."""
    lora = config.model.lora and revision(find(config.model.lora, "model.lora"))
    return machine(device) | {
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "model": revision(find(config.model.path)),
        "lora": lora,
        "dtype": choose_dtype(config.model, device),
        "quantization": config.model.quantization,
        "attention": config.engine.attention,
        "graphs": config.engine.graphs,
        "window": window,
    }


def profile_of(config: Config, device: torch.device, window: int, needed: bool) -> Profile | None:
    """The profile that a job with this configuration goes by; null where there is none and none is `needed`.

    Raises:
        ValueError: there is none; it says how to make it.
    """
    wanted = subject(config, device, window)
    found = kept(KIND, wanted)
    if found is not None:
        return Profile({int(rows): s for rows, s in found["seconds"].items()}, found["window"], found["attention"])
    if not needed:
        return None
    raise ValueError(
        "decode.branches=auto and engine.max_rows=auto need a profile of this model with windows of "
        f"{window} rows on {wanted['device']}, and {file_of(KIND, wanted)} is not there: run lopa-dist profile once, "
        "with the job's model.*, engine.* and decode.* options (about a minute), or give numbers"
    )


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
    window = usual_window(concrete(config.decode, native))
    profile = profile_of(config, device, window, needed) if group.world.rank == 0 else None
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
    engine, console = config.engine, Console()
    products: Choices = {}
    if Runners(model, decode, engine.attention, engine.graphs, Solo()).static:
        products = profile_products(config, model, device, console)
    found = measure(model, decode, engine.attention, engine.graphs, MOST_ROWS, BUDGET_S, products)
    about = subject(config, device, found.window)
    file = keep(KIND, about, asdict(found))
    table = Table("rows", "ms", "us a row", title=f"a forward of {config.model.path} on {about['device']}")
    for rows, seconds in found.seconds.items():
        table.add_row(str(rows), f"{1e3 * seconds:.2f}", f"{1e6 * seconds / rows:.1f}")
    console.print(table)
    console.print(f"engine.attention=auto: {found.attention}")
    console.print(f"engine.max_rows=auto: {found.best_rows()}")
    for sequences in sorted({1, 4, engine.max_sequences}):
        branches = found.free_branches(sequences, 1)
        console.print(f"decode.branches=auto with {sequences} in flight on one rank: {branches}")
    console.print(f"kept in {file}")


def profile_products(config: Config, model: Transformer, device: torch.device, console: Console) -> Choices:
    """Measure the products of a model that is not quantised, keep the times, and say how often each way is fastest."""
    times = measure_products(merged(model), MOST_ROWS, PRODUCTS_BUDGET_S)
    if times:
        wins = Counter(one.fastest for one in times)
        ways = ", ".join(f"{way} {wins[way]}" for way in PRODUCTS)
        console.print(f"fastest for {len(times)} products of {times[0].rows} to {times[-1].rows} rows: {ways}")
        console.print(f"kept in {keep_times(config.model, model.config, device, times)}")
    return choices(times)
