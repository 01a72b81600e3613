"""Gradients through a model that tensor ranks split: of what they gather, and of what they all read.

Behind a gather, all ranks compute the same, so each has the whole gradient of what was gathered, and keeps that of its
own part. A projection that is split by columns reads a whole input, of whose gradient each rank finds the part that its
own columns give: there they are added up: f of Megatron-LM (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lopa_dist.parallel.communicator import Communicator


class Gather(torch.autograd.Function):
    """``[..., part]`` of every rank -> ``[..., whole]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        """Gather the parts."""
        ctx.comm = comm
        return comm.all_gather(x).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the own part."""
        width = gradient.shape[-1] // ctx.comm.size
        return gradient.narrow(-1, ctx.comm.rank * width, width), None


class ReadByAll(torch.autograd.Function):
    """The same on every rank, each of which computes something else of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        """Return it."""
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the sum of what all ranks found."""
        return ctx.comm.sum(gradient.float()).to(gradient.dtype), None


def gathered(x: Tensor, comm: Communicator) -> Tensor:
    """Return ``[..., part]`` of every rank as ``[..., whole]``, also where gradients are asked for."""
    if x.requires_grad and torch.is_grad_enabled():
        return Gather.apply(x, comm)  # type: ignore[no-untyped-call]
    return comm.all_gather(x).movedim(0, -2).flatten(-2)


def read_by_all(x: Tensor, comm: Communicator) -> Tensor:
    """Return x, of which every rank computes a part of what is gathered later."""
    return x if comm.size == 1 else ReadByAll.apply(x, comm)  # type: ignore[no-untyped-call]
