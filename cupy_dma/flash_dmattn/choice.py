"""Which backend serves a call: the original's flags, and ``flash_dmattn_func_auto``.

The order of choice is cuda, triton, flex for CUDA arrays, and numpy for arrays on the CPU.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


def flash_dmattn_func_auto(backend: str | None = None, **options: Any) -> Callable[..., Any]:
    """The attention function for this machine. It is returned, not called.

    Parameters
    ----------
    backend
        One of ``get_available_backends()``; None takes the best one for the arrays of each call: cuda, triton or flex
        for CUDA arrays, numpy for arrays on the CPU.
    **options
        Arguments that every call of the returned function shall have.

    Raises
    ------
    ValueError
        There is no backend of that name.
    RuntimeError
        It cannot run here; the message says why.
    """
    from cupy_dma.flash_dmattn.flash_dmattn_flex import flex_dmattn_func
    from cupy_dma.flash_dmattn.flash_dmattn_interface import flash_dmattn_func
    from cupy_dma.flash_dmattn.flash_dmattn_triton import triton_dmattn_func

    chosen: Callable[..., Any] = flash_dmattn_func
    if backend is not None:
        if not isinstance(backend, str):
            raise TypeError(f"backend must be a str or None, got {type(backend).__name__}")
        reason = backends.why_not(backend)
        if reason is not None:
            raise RuntimeError(f"backend={backend!r} cannot run here: {reason}; "
                               f"available: {', '.join(get_available_backends())}")
        own = {"triton": triton_dmattn_func, "flex": flex_dmattn_func}
        chosen = own.get(backend) or partial(flash_dmattn_func, backend=backend)
    return partial(chosen, **options) if options else chosen
