"""Key scores and their selection for jax arrays."""
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from cupy_dma import checks
from cupy_dma.arrays import Windows
from cupy_dma.calls.scores import recipe_of
from cupy_dma.jax.arguments import (
    Array,
    as_array,
    check_backend,
    checked_documents,
    in_bhnd,
    require_static,
    rows,
    stand_in,
)
from cupy_dma.jax.batching import alike
from cupy_dma.jax.derivatives import scored
from cupy_dma.jax.masks import IntervalMask, real_keys
from cupy_dma.jax.programs import run_program
from cupy_dma.jax.tasks import Task
from cupy_dma.masks.runs import NEVER
from cupy_dma.masks.selection import selection_hints
from cupy_dma.masks.windows import Window, narrowest, window_of


def key_scores(value: Array, dt_proj: Array, A: Array, *, dt_bias: Array | None = None, form: str = "exp",
               layout: str | None = None, backend: str | None = None) -> jax.Array:
    """``cupy_dma.key_scores`` of jax arrays, with gradients for ``value``, ``dt_proj``, ``A`` and ``dt_bias``.

    Parameters
    ----------
    value : float array ``(B, Lk, Hkv, D)``, or ``(B, Hkv, Lk, D)`` with ``layout="bhnd"``
    dt_proj : float array ``(Hkv, Hkv * D)``
    A : float array ``(Hkv,)``
    dt_bias : float array ``(Hkv,)``, optional
    form, layout, backend
        As for ``cupy_dma.key_scores``; static.

    Returns
    -------
    float32 array ``(B, Hkv, Lk)`` (float64 if ``value`` is float64).

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type, shape or value; raised when the function is traced.
    """
    require_static(form=form, layout=layout, backend=backend)
    turned = in_bhnd(key_scores, layout, {"value": value}, {"dt_proj": dt_proj, "A": A, "dt_bias": dt_bias,
                                                            "form": form, "backend": backend})
    if turned is not NotImplemented:
        return turned
    floats = {"value": rows(value, "value"), "dt_proj": as_array(dt_proj, "dt_proj"), "A": as_array(A, "A")}
    if dt_bias is not None:
        floats["dt_bias"] = as_array(dt_bias, "dt_bias")
    recipe_of(stand_in(floats["value"]), stand_in(floats["dt_proj"]), stand_in(floats["A"]),
              stand_in(floats.get("dt_bias")), form)
    check_backend(backend, floats["value"])
    return scored(Task("key_scores", backend, form), *alike(floats))


def top_w(scores: Array, window: Windows, *, keys: str = "prefix", padding: Array | None = None,
          documents: Array | None = None, backend: str | None = None) -> IntervalMask:
    """``cupy_dma.IntervalMask.top_w`` of jax arrays: the ``window`` highest-ranked keys.

    Parameters
    ----------
    scores : float array ``(B, Hkv, Lk)``
    window : int, or one int per kv head
        Keys kept per query, at least 1; static, as are ``keys`` and ``backend``.
    keys, backend
        As for ``cupy_dma.IntervalMask.top_w``.
    padding : bool array ``(1|B, Lk)``, or integers, optional
        True, or any integer but 0 = a real key.
    documents : int32 or int64 array or list, optional
        Cumulative lengths ``(documents + 1,)``, whose values are checked when the call runs on a CPU, or ids
        ``(1|B, Lk)``.

    Returns
    -------
    IntervalMask of shape ``(B, Hkv, Lk)``. It carries no gradient; the scores get theirs as a bias.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type, shape or value; raised when the function is traced.
    """
    require_static(window=window, keys=keys, backend=backend)
    ranked = jax.lax.stop_gradient(as_array(scores, "scores"))
    checks.choice(keys, "keys", ("prefix", "global"))
    if ranked.dtype.name not in checks.FLOATS:
        raise TypeError(f"scores must be {' or '.join(checks.FLOATS)}, got {ranked.dtype}")
    if ranked.ndim != 3:
        raise ValueError(f"scores must have shape (B, Hkv, Lk), got {ranked.shape}")
    windows = window_of(window, ranked.shape[1])
    check_backend(backend, ranked)
    others = candidates(padding, documents, ranked.shape[0], ranked.shape[2])
    hints = selection_hints(windows, ranked.shape[2], keys, "padding" in others, "documents" in others)
    if keeps_all(windows, keys, others, ranked.shape[2]):
        start = jnp.arange(ranked.shape[2], dtype=jnp.int32)[None, None]
        return IntervalMask._make(start, jnp.full(ranked.shape, NEVER, jnp.int32), hints)
    (given,) = alike({"scores": widened(ranked), **others})
    found = run_program(Task("top_w", backend, selection=(windows, keys)), given)
    return IntervalMask._make(found["start"], found["stop"], hints)


def candidates(padding: Any, documents: Any, batch: int, length: int) -> dict[str, Any]:
    """The checked ``padding`` and ``documents`` of a selection, those that are given."""
    found: dict[str, Any] = {}
    if padding is not None:
        real = found["padding"] = real_keys(padding)
        if real.shape[0] not in (1, batch) or real.shape[1] != length:
            raise checks.wrong_shape("padding", "(1|B, Lk)", ((1, batch), (length,)), real.shape)
    runs = checked_documents(documents, batch, length)
    return found if runs is None else {**found, "documents": runs}


def keeps_all(window: Window, keys: str, others: dict[str, Any], length: int) -> bool:
    """Whether a selection is plain causality."""
    return keys == "prefix" and narrowest(window) >= length and not others


def widened(scores: jax.Array) -> jax.Array:
    """16-bit scores as float32, which the kernels rank."""
    return scores.astype(jnp.float32) if scores.dtype.itemsize == 2 else scores
