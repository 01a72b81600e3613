"""Two repairs of Triton's interpreter, without which it cannot run our kernels."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        """Bfloat16 as fp32: the interpreter keeps it as integers, and would multiply those."""
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *rest)

    interpreter.InterpreterBuilder.create_dot = dot

    if triton.__version__.startswith("3.6."):
        patch_lang_tensor = interpreter._patch_lang_tensor

        def patched(tensor: Any, scope: Any) -> None:
            """NumPy 2.4 makes no number of an array of one element any more: a loop's bound that was loaded."""
            patch_lang_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

        interpreter._patch_lang_tensor = patched
