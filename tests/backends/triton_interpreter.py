"""Patches for Triton's interpreter, where it is wrong or incompatible with this NumPy."""
from typing import Any

import ml_dtypes
import numpy as np


def patch() -> None:
    """Scalars work in ``range`` (they are one-element arrays, which NumPy 2.4 no longer converts to int); float32 is
    rounded to bfloat16, not truncated; MMAs of bfloat16 multiply its values, not its bits."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    patch_tensor, dot, cast = interpreter._patch_lang_tensor, builder.create_dot, builder.cast_impl

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle(handle.data.view(ml_dtypes.bfloat16).astype(np.float32), tl.float32)

    def patched_cast(self: Any, src: Any, target: Any) -> Any:
        if target.scalar == tl.bfloat16 and src.dtype.scalar == tl.float32:
            return interpreter.TensorHandle(src.data.astype(ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)
        if target.scalar == tl.float32 and src.dtype.scalar == tl.bfloat16:
            return widened(src)
        return cast(self, src, target)

    def patched_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    interpreter._patch_lang_tensor = patched
    builder.create_dot, builder.cast_impl = patched_dot, patched_cast
