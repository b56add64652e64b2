"""``flash_dmattn_func_auto``: the attention function for a backend."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from cupy_dma.backends import why_not
from cupy_dma.flash_dmattn.choice import get_available_backends
from cupy_dma.flash_dmattn.flash_dmattn_flex import flex_dmattn_func
from cupy_dma.flash_dmattn.flash_dmattn_interface import flash_dmattn_func
from cupy_dma.flash_dmattn.flash_dmattn_triton import triton_dmattn_func


def flash_dmattn_func_auto(backend: str | None = None, **options: Any) -> Callable[..., Any]:
    """The attention function for this machine. It is returned, not called.

    Parameters
    ----------
    backend
        One of ``get_available_backends()``; None takes the best one for the arrays of each call: cuda, triton or flex
        for CUDA arrays, numpy for CPU arrays.
    **options
        Arguments to apply to every call of the returned function.

    Raises
    ------
    ValueError
        There is no backend of that name.
    RuntimeError
        The backend cannot run here; the message says why.
    """
    chosen: Callable[..., Any] = flash_dmattn_func
    if backend is not None:
        if not isinstance(backend, str):
            raise TypeError(f"backend must be a str or None, got {type(backend).__name__}")
        reason = why_not(backend)
        if reason is not None:
            raise RuntimeError(f"backend={backend!r} cannot run here: {reason}; "
                               f"available: {', '.join(get_available_backends())}")
        own = {"triton": triton_dmattn_func, "flex": flex_dmattn_func}
        chosen = own.get(backend) or partial(flash_dmattn_func, backend=backend)
    return partial(chosen, **options) if options else chosen
