"""The gate of a SwiGLU feed-forward, behind one projection that makes gate and up together."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lopa_dist.kernels.dispatch import fused


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``: ``gate_up [R, 2 I]``, the gates first -> ``[R, I]``."""
    if fused(gate_up):
        from lopa_dist.kernels import rows_triton

        return rows_triton.swiglu(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
