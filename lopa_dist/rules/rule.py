"""What a rule of decoding is: the parts of a step in which rules differ, as one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lopa_dist.decode.advance import advance
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.state import Records, State, Window
from lopa_dist.decode.winner import Winner, anchor_alone
from lopa_dist.rows.row_maker import RowMaker
from lopa_dist.rows.window_rows import WindowRows

WINDOWS = WindowRows()
"""The rows of windows with nothing after them."""


def anchor_only(state: State, winner: Winner, window: Window | None) -> None:
    """Let the next forward run the anchor alone; the arguments are those of `Rule.spawn`."""
    state.branches.copy_(state.done == 0)


def in_words(config: DecodeConfig) -> str:
    """Return in words how far windows look ahead, and in which context."""
    branches = f"{config.branches} lookahead branches" if config.branches else ""
    drafts = f"{config.drafts} drafts{' per branch' if branches else ''}" if config.drafts else ""
    ahead = " and ".join(filter(None, [branches, drafts])) or "no lookahead"
    return f"{ahead}, context {config.context} in blocks of {config.block_size}"


@dataclass(frozen=True)
class Rule:
    """A rule of decoding. With the default functions, it fills masks without lookahead.

    A step lays out its rows (`rows`), runs the model over them, and sorts the records by sequence and branch; then it
    calls the three functions. All of it works on tensors of all sequences at once, and nothing may depend on the rank,
    the batch or its order.
    """

    name: str

    verify: Callable[[State, Records], Winner] = anchor_alone
    """Choose the branch that wins for each sequence, and the tokens that it contributes.

    Its arguments are the state from which the forward was laid out, and the records, ``[S, K, W]`` over
    `State.window`."""

    spawn: Callable[[State, Winner, Window | None], None] = anchor_only
    """Make the branches of the next forward, in `State.branches` and where the rows look for them (`State.edits`).

    Its arguments are the state after the step, the winner, and the window from `advance`."""

    advance: Callable[[State, Winner], Window | None] = advance
    """Write the winner's tokens, fill, and move the frontiers; rules of masked models share D2F's function."""

    rows: RowMaker = WINDOWS
    """Lays out the rows."""

    words: Callable[[DecodeConfig], str] = in_words
    """Describe the decoding, for a job's first lines."""

    serves: Callable[[DecodeConfig], bool] = lambda config: False
    """Whether this is the rule that the `decode` config asks for; a rule of the user's own is named there instead."""
