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
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.products import choices, measure_products
from lopa_dist.engine.profile import COMPARED, Profile, measure, usual_window
from lopa_dist.engine.runners import Runners, merged
from lopa_dist.jobs.build import EngineBuilder
from lopa_dist.jobs.loading import choose_device, choose_dtype
from lopa_dist.jobs.measurements import Subject, file_of, keep, kept, machine
from lopa_dist.jobs.products import keep_times
from lopa_dist.kernels.attention import candidates
from lopa_dist.kernels.products import PRODUCTS, Choices
from lopa_dist.models.checkpoint import DTYPES
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.families import Native, native
from lopa_dist.models.files import find
from lopa_dist.models.revision import revision
from lopa_dist.models.transformer import Transformer
from lopa_dist.parallel.group import Group
from lopa_dist.parallel.launcher import World
from lopa_dist.parallel.mesh import Mesh

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
        "reproducible": config.engine.reproducible,
        "window": window,
        "compared": list(COMPARED),
    }


def profile_of(config: Config, device: torch.device, window: int, needed: bool) -> Profile | None:
    """The profile that a job with this configuration goes by; null where there is none and none is `needed`.

    Raises:
        ValueError: there is none; it says how to make it.
    """
    wanted = subject(config, device, window)
    found = kept(KIND, wanted)
    if found is not None:
        seconds, attention = ({int(rows): x for rows, x in found[key].items()} for key in ("seconds", "attention"))
        return Profile(seconds, found["window"], attention)
    if not needed:
        return None
    threads = f" and parallel.threads={wanted['threads']}, as each of its ranks has" if wanted["threads"] else ""
    raise ValueError(
        "decode.branches=auto and engine.max_rows=auto need a profile of this model with windows of "
        f"{window} rows on {wanted['device']}, and {file_of(KIND, wanted)} is not there: run lopa-dist profile once, "
        f"with the job's model.*, engine.* and decode.* options{threads} (about a minute), or give numbers"
    )


def in_flight(engine: EngineConfig, requests: int, replicas: int) -> int:
    """Sequences that a data replica has in flight at once: no more than its share of the requests."""
    return max(1, min(engine.max_sequences, -(-requests // replicas)))


def settled(config: Config, shape: ModelConfig, device: torch.device, group: Group, requests: int) -> Config:
    """The configuration with every ``auto`` of decode.* and engine.* replaced; the same on all ranks.

    `requests` are the job's, at least where they are too few for `engine.max_sequences` on every replica; those that
    an earlier attempt finished count, so that the job goes on as it began. Without a profile, ``engine.attention=auto``
    is what is likely best on the device.

    Raises:
        ValueError: branches or rows are to be chosen by a profile, and there is none.
    """
    options = native(shape, config.model.pattern)
    window, engine = usual_window(concrete(config.decode, options), shape.shift), config.engine
    possible = candidates(device, shape.head_dim, DTYPES[choose_dtype(config.model, device)])
    by_ranks = config.decode.verify == "agreement"  # then each branch rank has a branch, without a profile
    needed = engine.max_rows == "auto" or (isinstance(config.decode.branches, str) and not by_ranks)
    told: list[Any] = []
    if needed or (engine.attention == "auto" and len(possible) > 1):  # there is something to look up
        profile = profile_of(config, device, window, needed) if group.world.rank == 0 else None
        if profile is not None:
            told = list(followed(profile, config, options, group.mesh, requests))
        told = json.loads(group.agree("profile", json.dumps(told)))
    free, best, attention = told or (0, 0, possible[0])
    engine = replace(
        engine,
        max_rows=best if engine.max_rows == "auto" else engine.max_rows,
        attention=attention if engine.attention == "auto" else engine.attention,
    )
    branches = group.mesh.branch - 1 if by_ranks else free
    return replace(config, decode=concrete(config.decode, options, branches), engine=engine)


def followed(profile: Profile, config: Config, options: Native, mesh: Mesh, requests: int) -> tuple[int, int, str]:
    """The lookahead branches, rows of a step and attention that a profile says are best for a job."""
    sequences, most = in_flight(config.engine, requests, mesh.data), config.engine.max_rows
    free, best = profile.free_branches(sequences, mesh.branch), profile.best_rows()
    if config.decode.verify == "agreement":
        free = mesh.branch - 1
    if "auto" in (config.decode.branches, most):
        log.info(
            "by the profile, with %d in flight %d lookahead branches cost next to nothing; steps of %d rows are best",
            sequences, free, best,
        )  # fmt: skip
    rows = profile.rows(sequences, concrete(config.decode, options, free).branches, mesh.branch)
    if most is not None:
        rows = min(rows, best if isinstance(most, str) else most)
    return free, best, profile.attention_at(rows)


def make_profile(overrides: list[str]) -> None:
    """`lopa-dist profile [overrides]`: measure, keep, and say what follows."""
    config = composed(overrides)
    device = choose_device(config, World("python"))
    builder = EngineBuilder(config.model, device)
    model = builder.load()
    decode = concrete(config.decode, builder.native)
    engine, console = config.engine, Console()
    products: Choices = {}
    if Runners(model, decode, engine).static and not engine.reproducible:
        products = profile_products(config, model, device, console)
    found = measure(model, decode, engine, MOST_ROWS, BUDGET_S, products)
    about = subject(config, device, found.window)
    file = keep(KIND, about, asdict(found))
    table = Table("rows", "ms", "us a row", title=f"a forward of {config.model.path} on {about['device']}")
    for rows, seconds in found.seconds.items():
        table.add_row(str(rows), f"{1e3 * seconds:.2f}", f"{1e6 * seconds / rows:.1f}")
    console.print(table)
    by_rows = ", ".join(f"{name} near {rows} rows" for rows, name in found.attention.items())
    console.print(f"engine.attention=auto: {by_rows}")
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
