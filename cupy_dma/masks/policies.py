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

``snapkv`` evicts once, at the end of a prompt. A rank of your own is a function of a ``Step``.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from cupy_dma import checks
from cupy_dma.arrays import Array, Library, Operand, describe
from cupy_dma.masks.interval import NEVER


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
    q, k = _checked(query, key)
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
        queries, keys = _wide(q), _wide(k)
        scale = size ** -0.5 if scale is None else checks.real(scale, "scale")
        b, h = (library.astype(library.arange(0, n, device), "int64") for n in (batch, kv_heads))
        b = b[:, None]
        stop = library.full((batch, kv_heads, length), NEVER, "int32", device)
        held = library.full((batch, kv_heads, budget, size), 0, _kind(k), device)
        position = library.full((batch, kv_heads, budget), -1, "int64", device)
        totals = library.full((batch, kv_heads, budget), 0, _kind(k), device)
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
                rank = library.astype(policy(Step(xp, weights, totals, held, position)), _kind(k))
                stays = (position < sinks) | (position > i - recent)
                slot = xp.argmin(xp.where(stays, float("inf"), rank), -1)
                stop[b, h, position[b, h, slot]] = i + 1
        return library.export(stop)


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
    q, k = _checked(query, key)
    window, pool = checks.whole(window, "window", 1), checks.whole(pool, "pool", 1)
    prompt, budget = checks.whole(prompt, "prompt", window), checks.whole(budget, "budget", window)
    (batch, length, heads, size), kv_heads = q.shape, k.shape[2]
    if pool % 2 == 0 or prompt > length:
        raise ValueError(f"pool must be odd and prompt at most N={length}, got pool={pool} and prompt={prompt}")
    library, xp, device = k.library, k.library.xp, k.device
    with library.on(device):
        scale = size ** -0.5 if scale is None else checks.real(scale, "scale")
        before = prompt - window
        queries = _wide(q)[:, before:prompt].reshape(batch, window, kv_heads, heads // kv_heads, size)
        logits = xp.einsum("bqhgd,bkhd->bhgqk", queries, _wide(k)[:, :prompt]) * scale
        place = library.arange(0, prompt, device)
        logits = xp.where(place[None] <= place[before:, None], logits, -float("inf"))
        weights = xp.exp(logits - xp.amax(logits, -1)[..., None])
        votes = (weights / weights.sum(-1)[..., None]).sum((2, 3))[:, :, :before]
        padded = library.full((batch, kv_heads, before + pool - 1), -float("inf"), _kind(k), device)
        padded[:, :, pool // 2:pool // 2 + before] = votes
        pooled = padded[:, :, :before]
        for i in range(1, pool):
            pooled = xp.maximum(pooled, padded[:, :, i:i + before])
        stop = library.full((batch, kv_heads, length), NEVER, "int32", device)
        if budget < prompt:
            gone = xp.argsort(pooled, -1)[:, :, :prompt - budget]
            b, h = (library.astype(library.arange(0, n, device), "int64") for n in (batch, kv_heads))
            stop[b[:, None, None], h[:, None], gone] = prompt
        return library.export(stop)


def _checked(query: Any, key: Any) -> tuple[Operand, Operand]:
    q, k = describe(query, "query"), describe(key, "key")
    checks.require_same_device((k, q))
    for operand in (q, k):
        checks.one_of_types(operand, checks.FLOATS)
        if operand.ndim != 4:
            raise ValueError(f"{operand.name} must have shape (B, N, H, D), got {operand.shape}")
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(f"query must have shape (B, N, H, D) and key (B, N, Hkv, D), H a multiple of Hkv, got "
                         f"{q.shape} and {k.shape}")
    return q, k


def _kind(operand: Operand) -> str:
    return "float64" if operand.dtype == "float64" else "float32"


def _wide(operand: Operand) -> Any:
    library: Library = operand.library
    return library.astype(operand.array, _kind(operand))
