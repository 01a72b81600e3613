"""`lopa-dist profile`: measure a model on this device, keep the profile, and say what follows."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from lopa_dist.config import composed
from lopa_dist.engine.profile import measure
from lopa_dist.jobs.build import EngineBuilder
from lopa_dist.jobs.device import choose_device
from lopa_dist.jobs.profiles import keep, subject
from lopa_dist.jobs.resolve import resolve_decode
from lopa_dist.parallel.launcher import World

BUDGET_S = 20.0
FEW = 4  # sizes: with fewer, most of t(M) is a guess
MOST_ROWS = 4096  # of a forward: larger steps are prefills


def make_profile(overrides: list[str]) -> None:
    """Measure the model of these overrides, keep its profile, and print both."""
    config = composed(overrides)
    device = choose_device(config, World("python"))
    builder = EngineBuilder(config.model, device)
    model = builder.load()
    decode = resolve_decode(config.decode, builder.pattern)
    engine, console = config.engine, Console()
    found = measure(model, decode, engine, MOST_ROWS, BUDGET_S)
    about = subject(config, device, found.window)
    file = keep(about, found)
    table = Table("rows", "ms", "us a row", title=f"a forward of {config.model.path} on {about['device']}")
    for rows, seconds in found.seconds.items():
        table.add_row(str(rows), f"{1e3 * seconds:.2f}", f"{1e6 * seconds / rows:.1f}")
    console.print(table)
    if len(found.seconds) < FEW:
        console.print(
            f"Sizes measured in {BUDGET_S:g} s: {len(found.seconds)}, too few to go by. Does something else keep this "
            "machine busy? Then measure again when it is quiet."
        )
    console.print(f"engine.max_rows=auto: {found.best_rows()}")
    a_rank = decode.block_size * decode.max_branches
    console.print(f"decode.one_block_from=auto on one rank: {found.one_block_from(a_rank)}")
    for sequences in sorted({1, 4, engine.max_sequences}):
        branches = found.free_branches(sequences, 1)
        console.print(f"decode.branches=auto with {sequences} in flight on one rank: {branches}")
    console.print(f"kept in {file}")
