"""Triton's interpreter, mended where it is wrong or does not take this NumPy."""
from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np


def mend() -> None:
    """Scalars may stand in ``range`` (they are arrays of one number, which NumPy 2.4 no longer makes an int of);
    float32 is rounded to bfloat16, not cut; products of bfloat16 are those of its values, not of its bits."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    patch, dot, cast = interpreter._patch_lang_tensor, builder.create_dot, builder.cast_impl

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(handle.data.view(ml_dtypes.bfloat16).astype(np.float32), tl.float32)

    def mended_cast(self: Any, src: Any, target: Any) -> Any:
        if target.scalar == tl.bfloat16 and src.dtype.scalar == tl.float32:
            return interpreter.TensorHandle(src.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)
        if target.scalar == tl.float32 and src.dtype.scalar == tl.bfloat16:
            return widened(src)
        return cast(self, src, target)

    def mended_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    interpreter._patch_lang_tensor = patched
    builder.create_dot, builder.cast_impl = mended_dot, mended_cast
