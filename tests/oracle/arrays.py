"""Converts arrays of any library to NumPy."""
from typing import Any

import numpy as np

from cupy_dma.arrays import library_named


def host(array: Any) -> Any:
    """None stays None."""
    if array is None or isinstance(array, np.ndarray):
        return array
    return library_named("torch" if type(array).__module__.startswith("torch") else "cupy").to_numpy(array)
