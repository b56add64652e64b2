"""Operands as NumPy arrays on the host, and results back in the caller's library and on its device."""
from __future__ import annotations

from typing import Any

import numpy as np

from cupy_dma.arrays import Operand, numpy_dtype


def widened(dtype: str) -> np.dtype:
    """The type in which ``dtype`` is computed."""
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def host(operand: Operand) -> np.ndarray:
    """The operand as a NumPy array of the operand's shape; a view if it is in host memory."""
    return operand.library.to_numpy(operand.array).reshape(operand.shape)


def deliver(result: np.ndarray, like: Operand) -> Any:
    """The result as an array of ``like``'s library and device."""
    return like.library.from_numpy(result, like.device)


def rounded(result: np.ndarray | None, like: Operand) -> Any:
    """A gradient in the type, library and device of its argument; None stays None."""
    return None if result is None else deliver(result.astype(numpy_dtype(like.dtype), copy=False), like)
