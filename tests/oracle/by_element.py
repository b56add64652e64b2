"""Attention and its gradients, element by element, in float64.

A bound for a whole tensor, or for a norm over it, hides a single wrong pair of query and key. Here every element has
its own bound, derived from the terms of its sum: a factor of each term (P or dX) is rounded once to the type of the
inputs, the result is rounded once, and specification section 12 allows gradients three times that. Unlike
``reference.py`` this is vectorised, so it can check hundreds of shapes.
"""
from typing import Any, NamedTuple

import numpy as np

from tests.oracle import reference

FLOAT32_ROUNDINGS = 64  # of sums and logits that stay in float32, relative to their terms


class Bounded(NamedTuple):
    """The expected array, and how far each of its elements may be off."""

    exact: np.ndarray
    bound: np.ndarray

    def check(self, found: Any, name: str) -> None:
        found = np.asarray(found).astype(np.float64)
        assert found.shape == self.exact.shape, f"{name}: {found.shape}, not {self.exact.shape}"
        with np.errstate(invalid="ignore"):
            wrong = ~((np.abs(found - self.exact) <= self.bound) | (found == self.exact))
        if wrong.any():
            at = tuple(np.argwhere(wrong)[0])
            raise AssertionError(f"{name}: {wrong.sum()} of {wrong.size} elements are wrong, first at {at}: "
                                 f"{found[at]:.6g}, not {self.exact[at]:.6g} +- {self.bound[at]:.1g}")


class Problem:
    """Arrays ``(B, L, heads, D)``; ``seen`` (bool) and ``bias`` broadcast to ``(B, H, Lq, Lk)`` and may be per kv head;
    a bias may have the three axes of a key bias."""

    def __init__(self, query: Any, key: Any, value: Any, seen: Any = None, bias: Any = None, causal: bool = False,
                 scale: float | None = None, softcap: float = 0.0):
        self.kind, self.kv_heads, self.bias = query.dtype, key.shape[2], bias
        self.batch, queries, self.heads, head_dim = query.shape
        shape = self.batch, self.heads, queries, key.shape[1]
        self.q, self.k, self.v = (self._by_head(x) for x in (query, key, value))
        self.scale, self.softcap = head_dim ** -0.5 if scale is None else scale, softcap
        self.seen = reference.visible_pairs(shape, seen, causal)
        logits = self.scale * (self.q @ self.k.swapaxes(2, 3))
        self.slope = 1.0
        if softcap:
            capped = np.tanh(logits / softcap)
            logits, self.slope = softcap * capped, 1 - capped**2
        if bias is not None:
            logits = logits + reference.per_head(np.asarray(bias).astype(np.float64), shape)
        logits = np.where(self.seen, logits, -np.inf)
        most = logits.max(-1, initial=-np.inf, keepdims=True)
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = np.exp(logits - np.where(np.isfinite(most), most, 0))
            total = weights.sum(-1, keepdims=True)
            self.lse = (most + np.log(total))[..., 0]
            self.p = np.where(total > 0, weights / total, 0)

    def _by_head(self, x: Any) -> np.ndarray:
        x = np.asarray(x).astype(np.float64).swapaxes(1, 2)
        return np.repeat(x, self.heads // x.shape[1], axis=1)

    def _bounded(self, exact: np.ndarray, terms: np.ndarray, factors: np.ndarray, roundings: int = 3) -> Bounded:
        """``terms``: the sum of absolute terms. ``factors``: the sum of the factors that multiply roundings near 0."""
        unit = reference.one_rounding(1.0, self.kind)
        tiny = reference.one_rounding(0.0, self.kind)
        return Bounded(*(x.swapaxes(1, 2) for x in (
            exact, unit * (roundings * terms + np.abs(exact)) + roundings * tiny * (factors + 1))))

    def attention(self) -> tuple[Bounded, Bounded]:
        """``out`` and ``lse``."""
        size = 1 + np.abs(np.where(np.isfinite(self.lse), self.lse, 0))
        lse = Bounded(self.lse, FLOAT32_ROUNDINGS * 2.0**-24 * size)
        size = np.abs(self.v)
        return self._bounded(self.p @ self.v, self.p @ size, self.seen @ size, 2), lse

    def check_attention(self, out: Any, lse: Any) -> None:
        for expected, found, name in zip(self.attention(), (out, lse), ("out", "lse")):
            expected.check(found, name)

    def gradients(self, dout: Any, out: Any, dlse: Any = None) -> dict[str, Bounded]:
        """Gradients of ``query``, ``key``, ``value`` and a bias, if there is one, from the given ``out``."""
        do, o = self._by_head(dout), self._by_head(out)
        own = 0.0 if dlse is None else np.asarray(dlse, np.float64)[..., None]
        p, v, q, k = self.p, self.v, self.q, self.k
        ds = p * (do @ v.swapaxes(2, 3) - ((do * o).sum(-1, keepdims=True) - own))
        factor = np.abs(do) @ np.abs(v).swapaxes(2, 3) + (np.abs(do * o)).sum(-1, keepdims=True) + np.abs(own)
        size = p * factor
        dx, dx_size = self.scale * self.slope * ds, abs(self.scale) * self.slope * size
        turned = [x.swapaxes(2, 3) for x in (dx, dx_size, p, self.seen)]
        found = {"query": self._bounded(dx @ k, dx_size @ np.abs(k), self.seen @ np.abs(k))}
        for name, weights, sizes, x in (("key", turned[0], turned[1], q), ("value", turned[2], turned[2], do)):
            found[name] = self._bounded(*(self._grouped(y) for y in (weights @ x, sizes @ np.abs(x),
                                                                     turned[3] @ np.abs(x))))
        if self.bias is not None:
            flushed = self.seen * 2.0**-126 * (1 + factor)  # kernels flush numbers below 2^-126 to zero: p and ds
            exact, terms, lost = (reference.summed_like(x, self.bias.shape) for x in (ds, size, flushed))
            unit, tiny = (reference.one_rounding(x, self.bias.dtype) for x in (1.0, 0.0))
            found["bias"] = Bounded(exact, FLOAT32_ROUNDINGS * 2.0**-24 * terms + lost + unit * np.abs(exact) + tiny)
        return found

    def check_gradients(self, found: Any, dout: Any, out: Any, dlse: Any = None) -> None:
        """``found``: ``AttentionGradients``; a gradient of None is not checked."""
        for name, expected in self.gradients(dout, out, dlse).items():
            if getattr(found, name) is not None:
                expected.check(getattr(found, name), f"d{name}")

    def _grouped(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(self.batch, self.kv_heads, -1, *x.shape[2:]).sum(2)
