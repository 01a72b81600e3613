"""The algorithm: tensors in, tensors out, no knowledge of models or ranks' communication."""

from lopa_dist.decode.advance import advance
from lopa_dist.decode.config import DecodeConfig
from lopa_dist.decode.layout import Batch, Lead, layout, unpack
from lopa_dist.decode.select import select
from lopa_dist.decode.state import Lengths, Records, State, Vocabulary

__all__ = [
    "Batch",
    "DecodeConfig",
    "Lead",
    "Lengths",
    "Records",
    "State",
    "Vocabulary",
    "advance",
    "layout",
    "select",
    "unpack",
]
