"""Repairs of Triton's interpreter, without which it cannot run our kernels, or not with the same bits on every CPU."""

from __future__ import annotations

import os
from dataclasses import replace
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

    launch = interpreter.GridExecutor.__call__
    prepared: set[int] = set()  # modules whose `triton.language` the interpreter has made its own in this launch

    def launched(self: Any, *given: Any, **named: Any) -> Any:
        prepared.clear()
        return launch(self, *given, **named)

    def called(self: Any, *given: Any, **named: Any) -> Any:
        """Call a function of a kernel. The interpreter prepares its module at each call, a quarter of its time."""
        if (module := id(self.fn.__globals__)) not in prepared:
            prepared.add(module)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*given, **named)

    interpreter.GridExecutor.__call__ = launched
    interpreter.InterpretedFunction.__call__ = called
    builder = interpreter.interpreter_builder  # another quarter: no integer of small tests overflows
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter.InterpreterBuilder.create_dot = dot

    if triton.__version__.startswith("3.6."):
        patch_lang_tensor = interpreter._patch_lang_tensor

        def patched(tensor: Any, scope: Any) -> None:
            """NumPy 2.4 makes no number of an array of one element any more: a loop's bound that was loaded."""
            patch_lang_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

        interpreter._patch_lang_tensor = patched
