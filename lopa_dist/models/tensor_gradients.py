"""Backward passes for tensor parallelism: of an all-gather, and of an input that every rank reads.

After a gather, all ranks compute the same. So each rank has the gradient of the whole gathered tensor, and returns the
slice for its own part. Every rank's columns of a split projection read the whole input, and contribute to its gradient.
These contributions are summed over ranks, as by the operator f of Megatron-LM (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lopa_dist.parallel.communicator import Communicator


class Gather(torch.autograd.Function):
    """Every rank's part: ``[..., part]`` -> ``[..., whole]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        """Gather the parts."""
        ctx.comm = comm
        return comm.all_gather(x).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of this rank's part."""
        width = gradient.shape[-1] // ctx.comm.size
        return gradient.narrow(-1, ctx.comm.rank * width, width), None


class ReadByAll(torch.autograd.Function):
    """A tensor that is equal on all ranks, from which each computes something else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        """Return x as it is."""
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the sum of all ranks' gradients."""
        return ctx.comm.sum(gradient.float()).to(gradient.dtype), None


def gathered(x: Tensor, comm: Communicator) -> Tensor:
    """Return ``[..., part]`` of every rank as ``[..., whole]``, also if gradients are needed."""
    if x.requires_grad and torch.is_grad_enabled():
        return Gather.apply(x, comm)  # type: ignore[no-untyped-call]
    return comm.all_gather(x).movedim(0, -2).flatten(-2)


def read_by_all(x: Tensor, comm: Communicator) -> Tensor:
    """Return x, from which every rank computes its part of a tensor that is gathered later."""
    return x if comm.size == 1 else ReadByAll.apply(x, comm)  # type: ignore[no-untyped-call]
