"""Which backend serves a call of the drop-in.

The order of preference is cuda, triton, flex for CUDA arrays; CPU arrays go to numpy.
"""
from __future__ import annotations

from typing import Any

from cupy_dma import backends
from cupy_dma.flash_dmattn.arguments import operand_of

ORDER = ("cuda", "triton", "flex", "numpy")


def get_available_backends() -> list[str]:
    """Those of the backends "cuda", "triton", "flex", "numpy" that can run here, in order of preference."""
    return [name for name in ORDER if backends.why_not(name) is None]


def choose_backend(backend: str | None, first: Any) -> str | None:
    """``backend``, or if it is None the one for arrays like ``first``; None leaves it to ``cupy_dma.attention``."""
    if backend is not None or operand_of(first, "query").device.kind != "cuda":
        return backend
    if backends.why_not("cuda") is None:
        return None
    return next((name for name in ("triton", "flex") if backends.why_not(name) is None), None)
