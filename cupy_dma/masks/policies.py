"""Eviction policies of KV caches, as the stops of keys: what each of them drops, for comparisons at equal kept rows.

    stop = policies.evictions(query, key, 64, "h2o")                  int32 (B, Hkv, N)
    mask = IntervalMask.from_stop(stop, window=64)
    out  = attention(query, key, value, mask=mask)                    what generation with that cache computes

A cache with room for ``budget`` keys evicts one at every step once it is full: the one with the lowest rank. Ranks:

    streaming   the position: the oldest key goes, after ``sinks``            StreamingLLM (arXiv 2309.17453)
    h2o         the attention to the key so far, in sum                       H2O (2306.14048), with ``recent`` half the
                                                                              budget
    tova        the attention of the present query to the key                 TOVA (2401.06104)
    knorm       minus the key's norm                                          L2 norm (2406.11430)
    keydiff     minus the key's cosine with the mean of the kept directions   KeyDiff (2504.15364)

A rank of your own is a function of a ``Step``. ``snapkv``, ``expected_attention`` and ``from_press`` (scores in the
convention of kvpress) evict once, at the end of a prompt: ``prompt_policies.py``.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from cupy_dma import checks
from cupy_dma.arrays import Array
from cupy_dma.masks.interval import NEVER
from cupy_dma.masks.prompt_policies import (
    average_rotation,
    expected_attention,
    from_press,
    kind_of,
    queries_and_keys,
    snapkv,
    wide,
)

__all__ = ["POLICIES", "Step", "average_rotation", "evictions", "expected_attention", "from_press", "snapkv"]


class Step(NamedTuple):
    """What a policy sees when a cache is full: slots in any order, all of them filled."""

    xp: Any  # the namespace of the arrays' library
    weights: Any  # (B, Hkv, budget): attention of the present token's queries to each key, summed over their heads
    totals: Any  # the same of all tokens since the key came
    key: Any  # (B, Hkv, budget, D), float32 or float64
    position: Any  # int64 (B, Hkv, budget)


def _directions(step: Step) -> Any:
    return step.key / step.xp.sqrt((step.key ** 2).sum(-1))[..., None]


def _keydiff(step: Step) -> Any:
    unit = _directions(step)
    return -(unit * unit.mean(-2)[..., None, :]).sum(-1)


POLICIES: dict[str, Callable[[Step], Any]] = {
    "streaming": lambda step: step.position,
    "h2o": lambda step: step.totals,
    "tova": lambda step: step.weights,
    "knorm": lambda step: -(step.key ** 2).sum(-1),
    "keydiff": _keydiff,
}


def evictions(query: Array, key: Array, budget: int, policy: str | Callable[[Step], Any], *, sinks: int = 0,
              recent: int = 0, scale: float | None = None) -> Any:
    """Simulate a cache that evicts, token by token, and say until when each key was kept.

    Parameters
    ----------
    query : float array ``(B, N, H, D)``
    key : float array ``(B, N, Hkv, D)`` of query's type, library and device
    budget : int
        The most keys that a query sees, at least 1. When there are as many, one goes.
    policy
        ``"streaming"``, ``"h2o"``, ``"tova"``, ``"knorm"``, ``"keydiff"``, or a function of a ``Step`` that returns
        ranks ``(B, Hkv, budget)``, the lowest of which goes.
    sinks, recent : int
        How many first and last tokens never go, together less than ``budget``.
    scale : float, optional
        Of the logits; default ``1 / sqrt(D)``.

    Returns
    -------
    int32 array ``(B, Hkv, N)`` for ``IntervalMask.from_stop``
        The first position that does not see the key, 2**31 - 1 if it stays.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type, shape or value.

    Notes
    -----
    Of equal ranks the key in the lower slot goes. A step is a few array operations on ``budget`` keys per kv head, in
    float32 at least.

    >>> query, key = np.random.default_rng(0).standard_normal((2, 1, 6, 1, 8))
    >>> dma.policies.evictions(query, key, 3, "streaming", sinks=1)[0, 0]
    array([2147483647,          3,          4,          5,          6,
           2147483647], dtype=int32)
    """
    q, k = queries_and_keys(query, key)
    budget, sinks = checks.whole(budget, "budget", 1), checks.whole(sinks, "sinks", 0)
    recent = checks.whole(recent, "recent", 0)
    if sinks + recent >= budget:
        raise ValueError(f"sinks + recent must be less than budget={budget}, got {sinks} + {recent}")
    if isinstance(policy, str):
        checks.choice(policy, "policy", tuple(POLICIES))
        policy = POLICIES[policy]
    (batch, length, heads, size), kv_heads = q.shape, k.shape[2]
    library, xp, device = k.library, k.library.xp, k.device
    with library.on(device):
        queries, keys = wide(q), wide(k)
        scale = size ** -0.5 if scale is None else checks.real(scale, "scale")
        b, h = (library.astype(library.arange(0, n, device), "int64") for n in (batch, kv_heads))
        b = b[:, None]
        stop = library.full((batch, kv_heads, length), NEVER, "int32", device)
        held = library.full((batch, kv_heads, budget, size), 0, kind_of(k), device)
        position = library.full((batch, kv_heads, budget), -1, "int64", device)
        totals = library.full((batch, kv_heads, budget), 0, kind_of(k), device)
        slot = library.full((batch, kv_heads), 0, "int64", device)
        for i in range(length):
            held[b, h, slot], position[b, h, slot], totals[b, h, slot] = keys[:, i], i, 0
            filled = min(i + 1, budget)
            logits = xp.einsum("bhgd,bhkd->bhgk", queries[:, i].reshape(batch, kv_heads, heads // kv_heads, size),
                               held[:, :, :filled]) * scale
            weights = xp.exp(logits - xp.amax(logits, -1)[..., None])
            weights = (weights / weights.sum(-1)[..., None]).sum(2)
            totals[:, :, :filled] = totals[:, :, :filled] + weights
            slot = slot + 1
            if filled == budget:
                rank = library.astype(policy(Step(xp, weights, totals, held, position)), kind_of(k))
                stays = (position < sinks) | (position > i - recent)
                slot = xp.argmin(xp.where(stays, float("inf"), rank), -1)
                stop[b, h, position[b, h, slot]] = i + 1
        return library.export(stop)
