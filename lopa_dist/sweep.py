"""A sweep's points before the first of them starts: each is a configuration, and must be one that can be used."""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from lopa_dist.checks import UserError
from lopa_dist.config import check_files, composed
from lopa_dist.tasks.rows import check

SHOWN = 8  # points that a message names


def check_points(arguments: Sequence[str]) -> None:
    """Raise a UserError that names the points of a sweep that cannot run.

    Args:
        arguments: of the command line. What belongs to Hydra (launchers, folders) does not count; where another sweeper
            chooses the points, they are not known yet.
    """
    own = [a for a in arguments if not a.startswith("-") and not a.startswith(("hydra", "launcher="))]
    if any(a.startswith("hydra/sweeper") for a in arguments):
        return
    overrides = OverridesParser.create().parse_overrides(own)
    [points] = BasicSweeper.split_arguments(overrides, None)
    swept = {o.get_key_element() for o in overrides if o.is_sweep_override()}
    refused = []
    for point in points:
        try:
            config = composed(list(point))
            check_files(config)
            if config.task.input:
                check(config.task.input)
        except ValueError as error:
            refused.append(f"{' '.join(o for o in point if o.split('=')[0] in swept)}: {error}")
    if not refused:
        return
    if len(refused) == len(points) and len({text.split(": ", 1)[1] for text in refused}) == 1:
        raise UserError(refused[0].split(": ", 1)[1])
    more = [f"and {len(refused) - SHOWN} more"] if len(refused) > SHOWN else []
    lines = "\n  ".join([*refused[:SHOWN], *more])
    raise UserError(
        f"{len(refused)} of {len(points)} points cannot run, so none has started:\n  {lines}\n"
        "Sweep over the others: two sweeps with one hydra.sweep.dir have one table"
    )
