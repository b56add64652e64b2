"""Triton's interpreter, mended where it is wrong or does not take this NumPy."""
from __future__ import annotations

from typing import Any

import numpy as np


def mend() -> None:
    """Scalars may stand in ``range`` (they are arrays of one number, which NumPy 2.4 no longer makes an int of), and
    products of bfloat16 are those of its values, not of its bits."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def mended_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = mended_dot
