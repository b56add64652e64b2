"""Policies that evict once, at the end of a prompt: SnapKV, Expected Attention, and scores as kvpress defines them.

All return the stops of keys, int32 ``(B, Hkv, N)`` as ``policies.evictions`` does: ``prompt`` for keys that go,
2**31 - 1 for the ``budget`` keys of the prompt that stay and for all later ones.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cupy_dma import checks
from cupy_dma.arrays import Array, Library, Operand, describe
from cupy_dma.masks.interval import NEVER


def snapkv(query: Array, key: Array, budget: int, prompt: int, *, window: int = 32, pool: int = 5,
           scale: float | None = None) -> Any:
    """SnapKV (arXiv 2404.14469): at the end of a prompt, keep its last ``window`` keys and those that their queries
    attend to most.

    Parameters
    ----------
    query, key
        As for ``evictions``; at least the prompt's.
    budget : int
        Keys of the prompt that are kept, at least ``window``.
    prompt : int
        Its tokens, at least ``window``. Later keys stay.
    window : int
        How many last tokens of the prompt vote.
    pool : int
        A key has the most votes of the ``pool`` keys around it; odd.
    scale : float, optional
        As for ``evictions``.

    Returns
    -------
    int32 array ``(B, Hkv, N)``, as for ``evictions``: ``prompt`` for keys that go.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type, shape or value.
    """
    q, k = queries_and_keys(query, key)
    window, pool = checks.whole(window, "window", 1), checks.whole(pool, "pool", 1)
    prompt, budget = checks.whole(prompt, "prompt", window), checks.whole(budget, "budget", window)
    (batch, length, heads, size), kv_heads = q.shape, k.shape[2]
    if pool % 2 == 0 or prompt > length:
        raise ValueError(f"pool must be odd and prompt at most N={length}, got pool={pool} and prompt={prompt}")
    library, xp, device = k.library, k.library.xp, k.device
    with library.on(device):
        scale = size ** -0.5 if scale is None else checks.real(scale, "scale")
        before = prompt - window
        queries = wide(q)[:, before:prompt].reshape(batch, window, kv_heads, heads // kv_heads, size)
        logits = xp.einsum("bqhgd,bkhd->bhgqk", queries, wide(k)[:, :prompt]) * scale
        place = library.arange(0, prompt, device)
        logits = xp.where(place[None] <= place[before:, None], logits, -float("inf"))
        weights = xp.exp(logits - xp.amax(logits, -1)[..., None])
        votes = (weights / weights.sum(-1)[..., None]).sum((2, 3))[:, :, :before]
        padded = library.full((batch, kv_heads, before + pool - 1), -float("inf"), kind_of(k), device)
        padded[:, :, pool // 2:pool // 2 + before] = votes
        pooled = padded[:, :, :before]
        for i in range(1, pool):
            pooled = xp.maximum(pooled, padded[:, :, i:i + before])
        return _evicted(k, pooled, budget, prompt)


def expected_attention(query: Array, key: Array, value: Array | None, budget: int, prompt: int, *,
                       rotation: Array | None = None, sinks: int = 4, epsilon: float = 0.0,
                       covariance: bool = True, scale: float | None = None) -> Any:
    """Expected Attention (Devoto, Jeblick and Jegou 2025, arXiv 2510.00636): at the end of a prompt, keep the keys that
    future queries are expected to attend to, if these are Gaussian like those of the prompt.

    With mean ``mu`` and covariance ``C`` of the prompt's queries behind the sinks, and the average rotation ``R`` of
    the positions to come, a key ``k_j`` with value ``v_j`` scores::

        z_j = exp(scale * (R mu) . k_j + scale^2 / 2 * k_j . (R C R^T) k_j)        E exp(scale * q . k_j)
        s_j = (z_j / (z_0 + z_1 + ...) + epsilon) * |v_j|                          mean over the heads of a group

    Parameters
    ----------
    query, key
        As for ``evictions``; at least the prompt's. With a ``rotation``, queries before, and keys after they are
        rotated.
    value : float array ``(B, N, Hkv, Dv)`` of key's type, library and device; or None: their norms do not count.
    budget : int
        Keys of the prompt that are kept, at least ``sinks``.
    prompt : int
        Its tokens, more than ``sinks``. Later keys stay.
    rotation : array ``(D, D)``, optional
        ``R``, as from ``average_rotation``. Default: none, for queries without rotary positions.
    sinks : int
        First keys, which stay and count for no statistics.
    epsilon : float
        At least 0: the higher, the more the norms of values count.
    covariance : bool
        False: only the mean of the queries counts.
    scale : float, optional
        As for ``evictions``.

    Returns
    -------
    int32 array ``(B, Hkv, N)``, as for ``snapkv``

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type, shape or value.

    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 1, 40, 1, 8))
    >>> stop = dma.policies.expected_attention(query, key, value, 12, prompt=30)
    >>> int((stop == 30).sum())
    18
    """
    q, k = queries_and_keys(query, key)
    sinks, epsilon = checks.whole(sinks, "sinks", 0), checks.real(epsilon, "epsilon", 0.0)
    prompt, budget = checks.whole(prompt, "prompt", sinks + 1), checks.whole(budget, "budget", max(sinks, 1))
    (batch, length, heads, size), kv_heads = q.shape, k.shape[2]
    _check_prompt(prompt, length)
    v = None if value is None else _value(value, k)
    turn = np.eye(size) if rotation is None else _host(rotation, "rotation")
    if turn.shape != (size, size):
        raise ValueError(f"rotation must have shape (D, D) = {(size, size)}, got {turn.shape}")
    covariance = checks.flag(covariance, "covariance")
    library, xp = k.library, k.library.xp
    with library.on(k.device):
        scale = size ** -0.5 if scale is None else checks.real(scale, "scale")
        turn = library.from_numpy(turn.astype(kind_of(k)), k.device)
        queries = wide(q)[:, sinks:prompt].reshape(batch, prompt - sinks, kv_heads, heads // kv_heads, size) @ turn.T
        keys = wide(k)[:, sinks:prompt]
        mean = queries.mean(1)
        logits = xp.einsum("bhgd,bkhd->bhgk", mean, keys) * scale
        if covariance:
            off = queries - mean[:, None]
            spread = xp.einsum("bqhgd,bqhge->bhgde", off, off) / (prompt - sinks)
            seen = xp.einsum("bhgde,bkhe->bhgkd", spread, keys)
            logits = logits + xp.einsum("bhgkd,bkhd->bhgk", seen, keys) * (scale ** 2 / 2)
        weights = xp.exp(logits - xp.amax(logits, -1)[..., None])
        found = (weights / weights.sum(-1)[..., None]).mean(2)
        if v is not None:
            norms = xp.sqrt((wide(v)[:, sinks:prompt] ** 2).sum(-1))
            found = (found + epsilon) * norms.swapaxes(1, 2)
        scores = library.full((batch, kv_heads, prompt), float("inf"), kind_of(k), k.device)
        scores[:, :, sinks:] = found
        return _evicted(k, scores, budget, prompt)


def average_rotation(size: int, first: int, count: int = 512, base: float = 10000.0) -> np.ndarray:
    """The mean of the rotary matrices of positions ``first, ..., first + count - 1``, for ``expected_attention``.

    Parameters
    ----------
    size : int
        ``D``, even.
    first : int
        The first position to come: the length of the prompt.
    count : int
        How many of them.
    base : float
        Of the rotary positions, which rotate halves, as in Llama.

    Returns
    -------
    float64 NumPy array ``(D, D)``

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or value.

    >>> dma.policies.average_rotation(2, first=0, count=1)
    array([[ 1., -0.],
           [ 0.,  1.]])
    """
    size, first = checks.whole(size, "size", 2), checks.whole(first, "first", 0)
    count, base = checks.whole(count, "count", 1), checks.real(base, "base")
    if size % 2 or base <= 0:
        raise ValueError(f"size must be even and base above 0, got size={size} and base={base}")
    half = size // 2
    angle = np.arange(first, first + count)[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.diag(np.cos(angle).mean(0)), np.diag(np.sin(angle).mean(0))
    return np.block([[cos, -sin], [sin, cos]])


def from_press(press: Any, key: Array, value: Array, budget: int, prompt: int, *, module: Any = None,
               hidden_states: Any = None, attentions: Any = None, kwargs: Mapping[str, Any] | None = None,
               sinks: int = 0, recent: int = 0) -> Any:
    """Evict by scores in the convention of kvpress: at the end of a prompt, keep the keys with the highest ones.

    Parameters
    ----------
    press
        An object with a method ``score``, such as a ``ScorerPress`` of kvpress, or a function, that takes
        ``(module, hidden_states, keys, values, attentions, kwargs)``, with ``keys (B, Hkv, prompt, D)`` and ``values
        (B, Hkv, prompt, Dv)``, and returns scores ``(B, Hkv, prompt)``.
    key, value : float array ``(B, N, Hkv, D)`` and ``(B, N, Hkv, Dv)`` of one type, library and device
        At least the prompt's. Presses of kvpress need torch tensors.
    budget : int
        Keys of the prompt that are kept, at least 1.
    prompt : int
        Its tokens, at least 1. Later keys stay.
    module, hidden_states, attentions, kwargs
        Passed on, ``kwargs`` as a dict; what a press reads of them depends on it.
    sinks, recent : int
        How many first and last keys of the prompt stay whatever their scores, together at most ``budget``.

    Returns
    -------
    int32 array ``(B, Hkv, N)``, as for ``snapkv``

    Raises
    ------
    TypeError, ValueError
        An argument, or what the press returns, has the wrong type, shape or value.

    Notes
    -----
    ``IntervalMask.from_stop`` makes the mask. A ``GatedCache`` that gets ``log_gate`` 0 for keys that stay and -inf for
    others, and 0 for all later tokens, stores the same keys.

    >>> key, value = np.random.default_rng(0).standard_normal((2, 1, 6, 1, 8))
    >>> def small_keys(module, hidden_states, keys, values, attentions, kwargs):
    ...     return -(keys ** 2).sum(-1)
    >>> dma.policies.from_press(small_keys, key, value, 2, prompt=4)[0, 0] == 4
    array([False,  True,  True, False, False, False])
    """
    k = _rows(key, "key")
    v = _value(value, k)
    score = getattr(press, "score", press)
    if not callable(score):
        raise TypeError(f"press must be a function or have a method score, got {type(press).__name__}")
    sinks, recent = checks.whole(sinks, "sinks", 0), checks.whole(recent, "recent", 0)
    prompt, budget = checks.whole(prompt, "prompt", 1), checks.whole(budget, "budget", max(sinks + recent, 1))
    (batch, length, kv_heads, _), library = k.shape, k.library
    _check_prompt(prompt, length)
    with library.on(k.device):
        keys, values = (library.export(x.array[:, :prompt].swapaxes(1, 2)) for x in (k, v))
        given = describe(score(module, hidden_states, keys, values, attentions, dict(kwargs or {})), "scores")
        checks.require_same_device((k, given))
        checks.one_of_types(given, checks.FLOATS)
        if given.shape != (batch, kv_heads, prompt):
            raise ValueError(f"press must return scores of shape (B, Hkv, prompt) = {(batch, kv_heads, prompt)}, got "
                             f"{given.shape}")
        scores = library.full(given.shape, float("inf"), kind_of(given), k.device)
        scores[:, :, sinks:prompt - recent] = wide(given)[:, :, sinks:prompt - recent]
        return _evicted(k, scores, budget, prompt)


def _evicted(k: Operand, scores: Any, budget: int, prompt: int) -> Any:
    """Stops for the keys ``k``: of the first ``prompt`` those with the lowest ``scores (B, Hkv, ...)`` go."""
    library, (batch, length, kv_heads) = k.library, k.shape[:3]
    stop = library.full((batch, kv_heads, length), NEVER, "int32", k.device)
    if budget < prompt:
        gone = library.xp.argsort(scores, -1)[:, :, :prompt - budget]
        b, h = (library.astype(library.arange(0, n, k.device), "int64") for n in (batch, kv_heads))
        stop[b[:, None, None], h[:, None], gone] = prompt
    return library.export(stop)


def queries_and_keys(query: Any, key: Any) -> tuple[Operand, Operand]:
    """The checked arrays ``(B, N, H, D)`` and ``(B, N, Hkv, D)``."""
    q, k = _rows(query, "query"), _rows(key, "key")
    checks.require_same_device((k, q))
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(f"query must have shape (B, N, H, D) and key (B, N, Hkv, D), H a multiple of Hkv, got "
                         f"{q.shape} and {k.shape}")
    return q, k


def kind_of(operand: Operand) -> str:
    """The type to compute with."""
    return "float64" if operand.dtype == "float64" else "float32"


def wide(operand: Operand) -> Any:
    """The array in that type."""
    library: Library = operand.library
    return library.astype(operand.array, kind_of(operand))


def _rows(array: Any, name: str) -> Operand:
    found = describe(array, name)
    checks.one_of_types(found, checks.FLOATS)
    if found.ndim != 4:
        raise ValueError(f"{name} must have shape (B, N, H, D), got {found.shape}")
    return found


def _value(value: Any, k: Operand) -> Operand:
    v = _rows(value, "value")
    checks.require_same_device((k, v))
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"value must have shape (B, N, Hkv, Dv) = {(*k.shape[:3], 'Dv')}, got {v.shape}")
    return v


def _host(array: Any, name: str) -> np.ndarray:
    given = describe(array, name)
    return given.library.to_numpy(given.array)


def _check_prompt(prompt: int, length: int) -> None:
    if prompt > length:
        raise ValueError(f"prompt must be at most N={length}, got {prompt}")
