"""The algorithm: tensors in, tensors out, no knowledge of models or ranks' communication."""

from lopa_dist.decode.advance import advance
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.forward_batch import ForwardBatch
from lopa_dist.decode.layout import layout, unpack
from lopa_dist.decode.lopa import spawn, verify
from lopa_dist.decode.prefill import SharedPrefixes
from lopa_dist.decode.state import FAILED, Admitted, HostState, Records, State, Vocabulary
from lopa_dist.decode.winner import Winner

__all__ = [
    "FAILED",
    "Admitted",
    "DecodeConfig",
    "ForwardBatch",
    "HostState",
    "Records",
    "SharedPrefixes",
    "State",
    "Vocabulary",
    "Winner",
    "advance",
    "layout",
    "spawn",
    "unpack",
    "verify",
]
