"""The five functions of a step, for masked models and for causal ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from lopa_dist.decode import causal
from lopa_dist.decode.advance import advance
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.lopa import spawn, verify
from lopa_dist.decode.state import HostState, Records, State, Window
from lopa_dist.decode.winner import Winner
from lopa_dist.rows import causal_rows
from lopa_dist.rows.forward_batch import ForwardBatch
from lopa_dist.rows.layout import Structures, layout, unpack
from lopa_dist.rows.prefill import SharedPrefixes


class Share(NamedTuple):
    """What decides, besides the state, which rows a rank runs in a forward."""

    rank: int  # of the branch group
    ranks: int
    prefixes: SharedPrefixes | None  # what prompts share; None if they share nothing
    lookahead: causal_rows.Lookahead  # of causal models
    structures: Structures  # of this batch's earlier steps, of masked models


class Rules(NamedTuple):
    """The parts of a step: lay out the rows, sort their records by sequence, verify, write tokens, look ahead."""

    layout: Callable[[State, HostState, Share], ForwardBatch]
    unpack: Callable[[State, ForwardBatch, Tensor], Records]
    verify: Callable[[State, Records], Winner]
    advance: Callable[[State, Winner], Window | None]
    spawn: Callable[[State, Winner, Window | None], None]


MASKED = Rules(
    lambda state, host, share: layout(state, host, share.rank, share.ranks, share.prefixes, share.structures),
    unpack, verify, advance, spawn,
)  # fmt: skip
CAUSAL = Rules(
    lambda state, host, share: causal_rows.layout(
        state, host, share.lookahead, share.prefixes, share.rank, share.ranks
    ),
    causal_rows.unpack, causal.verify, causal.advance, causal.spawn,
)  # fmt: skip


def rules_for(config: DecodeConfig) -> Rules:
    """Return the functions of a step in the context that `config` names."""
    return CAUSAL if config.causal else MASKED
