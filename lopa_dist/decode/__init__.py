"""The rules: which tokens a step proves, fills and drafts. Tensors in, tensors out; no models, no ranks, no rows."""

from lopa_dist.decode.advance import advance
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.lopa import spawn, verify
from lopa_dist.decode.state import FAILED, Admitted, HostState, Records, State, Vocabulary
from lopa_dist.decode.winner import Winner

__all__ = [
    "FAILED",
    "Admitted",
    "DecodeConfig",
    "HostState",
    "Records",
    "State",
    "Vocabulary",
    "Winner",
    "advance",
    "spawn",
    "verify",
]
