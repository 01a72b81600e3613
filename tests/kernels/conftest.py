"""Repairs of Triton's interpreter, without which it cannot run our kernels, or not with the same bits on every CPU."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    def numbers(handle: Any, dtype: Any) -> np.ndarray:
        """A matrix's elements as `dtype`; the interpreter keeps bfloat16 and fp8 as integers."""
        if handle.dtype.scalar == tl.float8e4nv:
            return torch.from_numpy(handle.data).view(torch.float8_e4m3fn).float().numpy().astype(dtype)
        if handle.dtype.scalar == tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32).astype(dtype)
        return handle.data.astype(dtype)

    def dot(self: Any, a: Any, b: Any, sums: Any, *rest: Any) -> Any:
        """Every element is added up in the order of its columns, in no way that depends on the shape, as on a GPU.

        The interpreter's own product is numpy's, whose library (BLAS) chooses an order by the matrix's shape and the
        CPU: a row would then have other bits in a taller tile, whatever the kernel does.
        """
        dtype = sums.data.dtype
        left, right = numbers(a, dtype), numbers(b, dtype)
        product = np.zeros_like(sums.data)
        for k in range(left.shape[1]):
            product += left[:, k, None] * right[k]
        return interpreter.TensorHandle(product + sums.data, sums.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot

    if triton.__version__.startswith("3.6."):
        patch_lang_tensor = interpreter._patch_lang_tensor

        def patched(tensor: Any, scope: Any) -> None:
            """NumPy 2.4 makes no number of an array of one element any more: a loop's bound that was loaded."""
            patch_lang_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

        interpreter._patch_lang_tensor = patched
