"""Profiles of models on devices: made by `lopa-dist profile`, kept in the user's cache, read where jobs say auto."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace

import torch
from rich.console import Console
from rich.table import Table

from lopa_dist.config import Config, composed, concrete
from lopa_dist.engine.config import EngineConfig
from lopa_dist.engine.profile import Profile, measure, usual_window
from lopa_dist.jobs.build import EngineBuilder
from lopa_dist.jobs.loading import choose_device, choose_dtype
from lopa_dist.jobs.measurements import Subject, file_of, keep, kept, machine
from lopa_dist.kernels.attention import suited
from lopa_dist.models.config import ModelConfig
from lopa_dist.models.families import native
from lopa_dist.models.files import find
from lopa_dist.models.revision import revision
from lopa_dist.parallel.group import Group
from lopa_dist.parallel.launcher import World

log = logging.getLogger("lopa_dist")

KIND = "profile"
BUDGET_S = 20.0
MOST_ROWS = 4096  # of a forward: larger steps are prefills


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
    }


def profile_of(config: Config, device: torch.device, window: int) -> Profile:
    """The profile that a job with this configuration goes by.

    Raises:
        ValueError: there is none; it says how to make it.
    """
    wanted = subject(config, device, window)
    found = kept(KIND, wanted)
    if found is not None:
        return Profile({int(rows): x for rows, x in found["seconds"].items()}, found["window"])
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
    an earlier attempt finished count, so that the job goes on as it began.

    Raises:
        ValueError: branches or rows are to be chosen by a profile, and there is none.
    """
    options, engine, mesh = native(shape, config.model.pattern), config.engine, group.mesh
    by_ranks = config.decode.verify == "agreement"  # then each branch rank has a branch, without a profile
    branches, rows = mesh.branch - 1 if by_ranks else 0, engine.max_rows
    if rows == "auto" or (isinstance(config.decode.branches, str) and not by_ranks):
        window, told = usual_window(concrete(config.decode, options), shape.shift), [0, 0]
        if group.world.rank == 0:
            profile, sequences = profile_of(config, device, window), in_flight(engine, requests, mesh.data)
            told = [profile.free_branches(sequences, mesh.branch), profile.best_rows()]
            log.info(
                "by the profile, with %d in flight %d lookahead branches cost next to nothing; steps of %d rows are "
                "best", sequences, *told,
            )  # fmt: skip
        free, best = json.loads(group.store.broadcast("profile", json.dumps(told)))
        branches, rows = branches if by_ranks else free, best if rows == "auto" else rows
    attention = suited(device, shape.head_dim) if engine.attention == "auto" else engine.attention
    engine = replace(engine, max_rows=rows, attention=attention)
    return replace(config, decode=concrete(config.decode, options, branches), engine=engine)


def make_profile(overrides: list[str]) -> None:
    """`lopa-dist profile [overrides]`: measure, keep, and say what follows."""
    config = composed(overrides)
    device = choose_device(config, World("python"))
    builder = EngineBuilder(config.model, device)
    model = builder.load()
    decode = concrete(config.decode, builder.native)
    engine, console = config.engine, Console()
    found = measure(model, decode, engine, MOST_ROWS, BUDGET_S)
    about = subject(config, device, found.window)
    file = keep(KIND, about, asdict(found))
    table = Table("rows", "ms", "us a row", title=f"a forward of {config.model.path} on {about['device']}")
    for rows, seconds in found.seconds.items():
        table.add_row(str(rows), f"{1e3 * seconds:.2f}", f"{1e6 * seconds / rows:.1f}")
    console.print(table)
    console.print(f"engine.max_rows=auto: {found.best_rows()}")
    for sequences in sorted({1, 4, engine.max_sequences}):
        branches = found.free_branches(sequences, 1)
        console.print(f"decode.branches=auto with {sequences} in flight on one rank: {branches}")
    console.print(f"kept in {file}")
