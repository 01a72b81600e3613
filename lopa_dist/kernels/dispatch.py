"""Which form of a primitive runs: the Triton kernel on a GPU, C on a CPU in fp32 or bf16, or plain torch."""

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

TRITON = find_spec("triton") is not None  # it comes with torch's CUDA builds for Linux; CPU builds lack it
OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}  # of every launch: Triton's default is to change, and with it bits
# primitives that have a Triton form
KERNELS = ("attention", "rotation", "norm", "swiglu", "head", "vgemm", "experts", "fp8")
_by_torch: ContextVar[frozenset[str]] = ContextVar("_by_torch", default=frozenset())


@contextmanager
def by_torch(kernels: frozenset[str]) -> Iterator[None]:
    """Run these of `KERNELS` in their torch form, on a GPU too, for as long as the context lasts."""
    token = _by_torch.set(kernels)
    try:
        yield
    finally:
        _by_torch.reset(token)


def fused(x: Tensor, kernel: str) -> bool:
    """Whether the Triton form of one of `KERNELS` runs: on CUDA, where nothing is differentiated or `by_torch`."""
    if not (TRITON and x.is_cuda) or kernel in _by_torch.get():
        return False
    return not (torch.is_grad_enabled() and x.requires_grad)


def in_c(x: Tensor, *others: Tensor | None) -> bool:
    """Whether an operation on tensors runs in C now: where it can, and nothing is differentiated or `by_torch`.

    All must be of one dtype, as they are not under `torch.autocast`.
    """
    if torch.is_grad_enabled() or _by_torch.get() or not suits_c(x):
        return False
    return all(other is None or other.dtype == x.dtype for other in others)


def suits_c(x: Tensor) -> bool:
    """Whether operations on a tensor can run in C (`native`): on a CPU in fp32 or bf16, with a C compiler."""
    return x.device.type == "cpu" and not isinstance(native.found(x.dtype), str)


def sum_in_fp32() -> None:
    """Let the GPU's library add up products of bf16 and fp16 in fp32 alone.

    By default it may split a long sum and round its parts to the products' precision. How it splits follows the shape,
    so a row's bits would depend on the batch, and be less exact than those of our kernels.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a GPU is the current one; on a CPU, one that does nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; a few for tensors on a CPU, which only the interpreter runs kernels on."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one block may have; for tensors on a CPU those of an H100."""
    if device.type != "cuda":
        return 227 * 1024
    properties: Any = torch.cuda.get_device_properties(device)  # its type lacks the field
    return int(properties.shared_memory_per_block_optin)


@cache
def hopper(device: torch.device) -> bool:
    """Whether a GPU has Hopper's matrix instructions; tensors on a CPU count as if theirs had.

    Consumer cards of compute capability 12 have not.
    """
    return device.type != "cuda" or (9, 0) <= torch.cuda.get_device_capability(device) < (12, 0)
