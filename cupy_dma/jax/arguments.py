"""Arguments of the functions for jax arrays, checked when they are traced.

The checks are the shared ones of ``calls/``. They look at shapes and types only, so they get NumPy stand-ins of the
same shapes and types, without values and without memory.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from cupy_dma import backends, checks
from cupy_dma.arrays import Device, Operand, library_named
from cupy_dma.calls.layout import is_bnhd

Array: TypeAlias = "jax.Array | np.ndarray"  # what functions take; they return jax.Array

_AXES = {"query": "(B, Lq, H, D)", "key": "(B, Lk, Hkv, D)", "value": "(B, Lk, Hkv, D)"}


def as_array(x: Any, name: str) -> jax.Array:
    """The argument as a jax array. TypeError unless it is one, or a NumPy array."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(f"{name} must be a jax.Array or numpy.ndarray, got {type(x).__module__}.{type(x).__qualname__}")
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        raise TypeError(f"{name} must be an array of numbers, got {x.dtype}")
    return jnp.asarray(x)


def optional_array(x: Any, name: str) -> jax.Array | None:
    return None if x is None else as_array(x, name)


def rows(x: Any, name: str) -> jax.Array:
    """``query``, ``key`` or ``value``. ValueError, with a hint about ``vmap``, unless it has four axes."""
    array = as_array(x, name)
    if array.ndim != 4:
        hint = ""
        if array.ndim == 3:
            hint = (f"; a function under jax.vmap needs a batch axis of its own, such as that of {name}[None], and "
                    f"only a batch axis can be mapped: heads, positions and head dims belong to one call")
        raise ValueError(f"{name} must have shape {_AXES[name]}, got {array.shape}{hint}")
    return array


def stand_in(x: jax.Array | None) -> np.ndarray | None:
    """A NumPy stand-in of the same shape and type. Its values must not be read, except a single row of booleans."""
    if x is None:
        return None
    if x.dtype == jnp.bool_ and x.ndim > 1 and x.shape[-2] == 1:
        return np.zeros(x.shape, np.bool_)
    strides = [x.dtype.itemsize]
    for size in reversed(x.shape[1:]):
        strides.append(strides[-1] * size)
    base = np.zeros(1, x.dtype)
    return np.lib.stride_tricks.as_strided(base, x.shape, strides[::-1] if x.ndim else (), writeable=False)


def is_traced(*values: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in values)


def require_static(**options: Any) -> None:
    """TypeError for an option whose value is unknown until a traced function runs."""
    for name, value in options.items():
        if isinstance(value, (jax.Array, jax.core.Tracer)):
            what = "a traced value" if is_traced(value) else "an array"
            raise TypeError(f"{name} must be a Python value, known when the function is traced, got {what}; under "
                            f"jax.jit name it in static_argnames or close over it")


def on_gpu() -> bool:
    """Whether jax computes on a GPU by default."""
    device: Any = jax.config.jax_default_device
    return (jax.default_backend() if device is None else getattr(device, "platform", device)) in ("gpu", "cuda")


def check_backend(backend: Any, x: jax.Array) -> None:
    """If a backend is named, raise what ``backends.choose`` raises for arrays on jax's default platform."""
    if backend is not None:
        backends.choose(backend, (Operand("query", None, library_named("numpy"), x.shape, (), x.dtype.name,
                                          Device("cuda" if on_gpu() else "cpu", 0), 0),))


def in_bhnd(function: Callable[..., Any], layout: Any, arrays: dict[str, Any], options: dict[str, Any]) -> Any:
    """``function`` of arrays ``(B, H, N, D)``; its first result is transposed back if it has four axes. NotImplemented
    if the layout is ``"bnhd"``."""
    if is_bnhd(layout):
        return NotImplemented
    turned = {name: jnp.swapaxes(_four_axes(x, name), 1, 2) for name, x in arrays.items()}
    try:
        found = function(**turned, **options, layout="bnhd")
    except ValueError as error:
        raise ValueError(f"{error} (layout='bhnd': shapes are shown with axes 1 and 2 swapped)") from error
    if isinstance(found, tuple):
        return jnp.swapaxes(found[0], 1, 2), *found[1:]
    return jnp.swapaxes(found, 1, 2) if found.ndim == 4 else found


def _four_axes(x: Any, name: str) -> jax.Array:
    array = as_array(x, name)
    if array.ndim != 4:
        raise ValueError(f"{name} must have shape (B, heads, N, D) with layout='bhnd', got {array.shape}")
    return array


def checked_documents(documents: Any, batch: int, length: int) -> jax.Array | None:
    """``documents`` of ``top_w``: integers ``(n + 1,)`` or ``(1|B, Lk)``. Values are checked when the call runs."""
    if documents is None:
        return None
    if isinstance(documents, (list, tuple)):
        documents = checks.integer_list(documents, "documents")
    array = as_array(documents, "documents")
    if array.dtype.name not in checks.INTEGERS:
        raise TypeError(f"documents must be {' or '.join(checks.INTEGERS)}, got {array.dtype}")
    if array.ndim not in (1, 2) or array.shape == (0,):
        raise ValueError(f"documents must be cumulative lengths (documents + 1,) or ids (B, Lk), got shape "
                         f"{array.shape}")
    if array.ndim == 2 and (array.shape[0] not in (1, batch) or array.shape[1] != length):
        raise checks.wrong_shape("documents", "(1|B, Lk)", ((1, batch), (length,)), array.shape)
    return array
