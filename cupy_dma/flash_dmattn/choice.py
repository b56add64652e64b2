"""Which backend serves a call.

The order of choice is cuda, triton, flex for CUDA arrays, and numpy for arrays on the CPU.
"""
from __future__ import annotations

from typing import Any

from cupy_dma import backends
from cupy_dma.flash_dmattn.arguments import seen_as

ORDER = ("cuda", "triton", "flex", "numpy")


def get_available_backends() -> list[str]:
    """Names of the backends that can run here, of "cuda", "triton", "flex", "numpy", in the order of choice."""
    return [name for name in ORDER if backends.why_not(name) is None]


def serving(backend: str | None, first: Any) -> str | None:
    """``backend``, or where it is None the one for arrays like ``first``; None leaves it to ``cupy_dma.attention``."""
    if backend is not None or seen_as(first, "query").device.kind != "cuda":
        return backend
    if backends.why_not("cuda") is None:
        return None
    return next((name for name in ("triton", "flex") if backends.why_not(name) is None), None)
