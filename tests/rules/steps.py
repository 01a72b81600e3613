"""The parts of a step, by the rule that a state's configuration asks for."""

from __future__ import annotations

from torch import Tensor

from lopa_dist.decode import HostState, Records, State, Winner
from lopa_dist.decode.state import Window
from lopa_dist.rows import ForwardBatch, SharedPrefixes
from lopa_dist.rows.lookahead import Lookahead
from lopa_dist.rows.row_maker import Structures
from lopa_dist.rows.share import ALONE, Share
from lopa_dist.rules import rule_for


def layout(
    state: State,
    host: HostState,
    share: Share = ALONE,
    prefixes: SharedPrefixes | None = None,
    structures: Structures | None = None,
) -> ForwardBatch:
    """As of `RowMaker`, of a masked model."""
    rows = rule_for(state.config).rows
    return rows.layout(state, host, share, prefixes, Lookahead(0), {} if structures is None else structures)


def unpack(state: State, batch: ForwardBatch, gathered: Tensor) -> Records:
    """As of `RowMaker`."""
    return rule_for(state.config).rows.unpack(state, batch, gathered)


def verify(state: State, records: Records) -> Winner:
    """As of `Rule`."""
    return rule_for(state.config).verify(state, records)


def spawn(state: State, winner: Winner, window: Window | None) -> None:
    """As of `Rule`."""
    rule_for(state.config).spawn(state, winner, window)
