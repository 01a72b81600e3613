"""Which form of an operation runs: the Triton kernel on a GPU, C on a CPU in fp32 or bf16, or plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lopa_dist.kernels import native

TRITON = find_spec("triton") is not None  # part of torch's CUDA builds for Linux, not of CPU builds
OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}  # for every launch: Triton's default will change, and bits with it
# the operations that have a Triton form
KERNELS = ("attention", "rotation", "norm", "swiglu", "head", "vgemm", "experts", "fp8")
_by_torch: ContextVar[frozenset[str]] = ContextVar("_by_torch", default=frozenset())


@contextmanager
def by_torch(kernels: frozenset[str]) -> Iterator[None]:
    """Run the operations `kernels`, some of `KERNELS`, in their torch form within this context, even on a GPU."""
    token = _by_torch.set(kernels)
    try:
        yield
    finally:
        _by_torch.reset(token)


def fused(x: Tensor, kernel: str) -> bool:
    """Return whether `kernel`, one of `KERNELS`, runs as a Triton kernel on `x`.

    It does on CUDA, unless `x` needs a gradient or `by_torch` names the kernel.
    """
    if not (TRITON and x.is_cuda) or kernel in _by_torch.get():
        return False
    return not (torch.is_grad_enabled() and x.requires_grad)


def in_c(x: Tensor, *others: Tensor | None) -> bool:
    """Return whether an operation on these tensors runs in C now.

    It does where C can (`suits_c`), unless gradients are enabled or `by_torch` names any kernel. All tensors must have
    one dtype, which is not so under `torch.autocast`.
    """
    if torch.is_grad_enabled() or _by_torch.get() or not suits_c(x):
        return False
    return all(other is None or other.dtype == x.dtype for other in others)


def dense(*tensors: Tensor | None) -> bool:
    """Return whether the numbers of each tensor are adjacent, as operations in C expect them."""
    return all(tensor is None or tensor.is_contiguous() for tensor in tensors)


def suits_c(x: Tensor) -> bool:
    """Return whether operations on a tensor can run in C (`native`): on a CPU, in fp32 or bf16, with a C compiler."""
    return x.device.type == "cpu" and not isinstance(native.found(x.dtype), str)


def sum_in_fp32() -> None:
    """Make the GPU's library accumulate products of bf16 and fp16 in fp32 only.

    By default it may split a long sum and round the partial sums to the products' precision. How it splits depends on
    the shape, so a row's bits would depend on the batch, and be less exact than those of our kernels.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a GPU is the current device; on a CPU, one that does nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def processors(device: torch.device) -> int:
    """Return a GPU's number of streaming multiprocessors; 4 for a CPU, where only the interpreter runs kernels."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one block may use; for a CPU, those of an H100."""
    if device.type != "cuda":
        return 227 * 1024
    properties: Any = torch.cuda.get_device_properties(device)  # its type lacks the field
    return int(properties.shared_memory_per_block_optin)


@cache
def hopper(device: torch.device) -> bool:
    """Return whether a GPU has compute capability 9; true for a CPU.

    There a warp has whole rows of a product's tile, whatever the tile's height, so sums along a row are made in one
    order. On Blackwell (10), who has which numbers depends on the height.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9
