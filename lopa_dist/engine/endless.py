"""A sequence that never ends is an error, not a job that never ends."""

from __future__ import annotations

import numpy as np

from lopa_dist.checks import UserError
from lopa_dist.decode.edit import MOST_CHECKS
from lopa_dist.decode.state import HostState

MORE = 64  # forwards that any sequence may take beyond those of its positions


def check_ends(after: HostState) -> None:
    """Raise a UserError if a sequence has taken more forwards than any rule of ours needs.

    Each of our own rules fills a position or completes a block in every forward, except that a block without masks may
    be checked `MOST_CHECKS` times.

    Args:
        after: what the host knows after a step.
    """
    most = (MOST_CHECKS + 2) * after.limit + MORE
    if (after.step > most).any():
        slot = int(np.argmax(after.step - most))
        raise UserError(
            f"an answer of at most {after.limit[slot]} tokens does not end: it has taken {after.step[slot]} forwards. "
            "In every forward, a rule of your own (decode.rule, decode.fill) must fill a masked position, or leave "
            "that to the step. If you use no such rule, please report this"
        )
