"""Histories for the decode cache: random tokens, the oracle's results for all of them, and a cache that gets them in
pieces. Shared by NumPy, torch, CuPy and the emulator (``convert`` is the fixture of that name)."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

import cupy_dma as dma
from cupy_dma.arrays import library_named, numpy_dtype
from cupy_dma.cache.storage import fake_quantized
from cupy_dma.masks.interval import NEVER
from cupy_dma.masks.windows import widest
from tests.oracle import reference
from tests.oracle.arrays import host

SCORES = ("ties", "distinct", "increasing", "decreasing", "equal", "nan", "zeros", "all_nan")


def draw_scores(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """float32 ``(..., n)``."""
    n = shape[-1]
    made: dict[str, Callable[[], Any]] = {
        "ties": lambda: rng.integers(-4, 4, shape) / 4,
        "distinct": lambda: rng.standard_normal(shape),
        "increasing": lambda: np.broadcast_to(np.arange(n) / n, shape),
        "decreasing": lambda: np.broadcast_to(-np.arange(n) / n, shape),
        "equal": lambda: np.ones(shape),
        "nan": lambda: np.where(rng.random(shape) < 0.1, np.nan, rng.integers(-4, 4, shape)),
        "zeros": lambda: np.where(rng.random(shape) < 0.5, 0.0, -0.0),
        "all_nan": lambda: np.full(shape, np.nan),
        "hidden": lambda: rng.choice([-np.inf, -1.0, 0.5, 2.0], shape),
        "infinite": lambda: rng.choice([-np.inf, -1.0, 1.0, np.inf, np.nan], shape),
    }
    return np.ascontiguousarray(made[kind](), np.float32)


@dataclass(frozen=True)
class History:
    """``length`` tokens of ``batch`` sequences, and which of them a cache must keep."""

    length: int = 40
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    value_dim: int | None = None
    dtype: str = "float32"
    window: int | tuple[int, ...] = 7
    sinks: int = 0
    recent: int = 0
    scores: str = "ties"
    softcap: float = 0.0
    bias_delay: int = 0
    scale: float | None = None
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)  # of the cache

    def __str__(self) -> str:
        return "-".join(f"{x.name}={getattr(self, x.name)}" for x in fields(self) if getattr(self, x.name) != x.default
                        and x.name != "options") or "usual"

    @cached_property
    def data(self) -> dict[str, np.ndarray]:
        rng, kind = np.random.default_rng(self.seed), numpy_dtype(self.dtype)
        b, n, g = self.batch, self.length, self.kv_heads

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(kind)

        found = {"query": normal(b, n, self.heads, self.head_dim), "key": normal(b, n, g, self.head_dim),
                 "value": normal(b, n, g, self.value_dim or self.head_dim),
                 "scores": draw_scores(self.scores, (b, g, n), rng)}
        storage = self.options.get("storage")
        return found if storage is None else found | {name: stored(found[name], storage) for name in ("key", "value")}

    @cached_property
    def mask(self) -> np.ndarray:
        """bool ``(B, Hkv, L, L)``, by the definition."""
        p, j = np.arange(self.length)[:, None], np.arange(self.length)
        besides = (j <= p) & ((j < self.sinks) | (j > p - self.recent))
        return reference.top_w_dense(self.data["scores"], self.window) | besides

    def cache(self, convert: Callable[[np.ndarray], Any] = np.asarray, **options: Any) -> dma.DynamicCache:
        options = {"like": convert(self.data["query"][:1, :1]), "sinks": self.sinks, "recent": self.recent,
                   **self.options, **options}
        return dma.DynamicCache(self.batch, self.kv_heads, self.window, self.head_dim, self.value_dim, self.dtype,
                                **options)

    def tokens(self, begin: int, end: int, convert: Callable[[np.ndarray], Any] = np.asarray) -> list[Any]:
        """query, key, value and scores of the tokens from ``begin`` to ``end``."""
        x = self.data
        return [convert(np.ascontiguousarray(part)) for part in (
            *(x[name][:, begin:end] for name in ("query", "key", "value")), x["scores"][:, :, begin:end])]

    @property
    def call(self) -> dict[str, Any]:
        """Arguments of ``extend`` that only this kind of cache takes."""
        return {"bias_delay": self.bias_delay}

    def run(self, cache: dma.DynamicCache, lengths: Iterable[int], convert: Any = np.asarray,
            begin: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Call ``extend`` with pieces of these lengths from token ``begin`` on; returns out and lse of all tokens."""
        found = []
        for n in lengths:
            results = cache.extend(*self.tokens(begin, begin + n, convert), scale=self.scale, softcap=self.softcap,
                                   return_lse=True, **self.call)
            found.append([host(x) for x in results])
            begin += n
        outs, lses = zip(*found)
        return np.concatenate(outs, 1), np.concatenate(lses, 2)

    def oracle(self, *, tf32: bool = False) -> list[tuple[np.ndarray, np.ndarray]]:
        """For out and for lse: the reference and the plain same-precision computation."""
        x, size = self.data, max(self.head_dim, self.value_dim or self.head_dim)
        wide = [np.concatenate((x[name], np.zeros((*x[name].shape[:3], size - x[name].shape[3]), x[name].dtype)), 3)
                for name in ("query", "key", "value")]
        scale = self.head_dim ** -0.5 if self.scale is None else self.scale
        arguments = (*wide, self.mask, x["scores"], False, scale, self.softcap, None, self.bias_delay)
        pairs = list(zip(reference.attention(*arguments), reference.same_precision_attention(*arguments, tf32=tf32)))
        dv = x["value"].shape[3]
        return [tuple(part[..., :dv] for part in pairs[0]), pairs[1]]  # type: ignore[list-item]

    def check(self, out: np.ndarray, lse: np.ndarray, *, begin: int = 0, tf32: bool = False) -> None:
        """Check section 12 for the tokens from ``begin`` on, and the types."""
        (ref, plain), (ref_lse, plain_lse) = self.oracle(tf32=tf32)
        end = begin + out.shape[1]
        assert out.dtype == numpy_dtype(self.dtype)
        assert lse.dtype == (np.float64 if self.dtype == "float64" else np.float32)
        reference.assert_matches_reference(out, ref[:, begin:end], plain[:, begin:end], out.dtype)
        reference.assert_matches_reference(lse, ref_lse[:, :, begin:end], plain_lse[:, :, begin:end], lse.dtype)

    @property
    def bias(self) -> dict[str, Any]:
        """What attention over the whole text adds to logits."""
        return {"bias": self.data["scores"], "bias_delay": self.bias_delay}

    def check_replay(self, cache: dma.DynamicCache, convert: Callable[[np.ndarray], Any] = np.asarray,
                     tf32: bool = False) -> None:
        """Check that attention over the whole text under the recorded stops sees what the queries saw."""
        stops = cache.stops()
        mask = dma.IntervalMask.from_stop(np.array(host(stops)))
        np.testing.assert_array_equal(mask.to_dense(self.length), self.mask)
        np.testing.assert_array_equal(host(stops) == NEVER, self.mask[:, :, -1])
        rows = (convert(self.data[name]) for name in ("query", "key", "value"))
        bias = {name: convert(x) if isinstance(x, np.ndarray) else x for name, x in self.bias.items()}
        found = dma.attention(*rows, mask=dma.IntervalMask.from_stop(stops), scale=self.scale, softcap=self.softcap,
                              return_lse=True, **bias)
        self.check(*(host(x) for x in found), tf32=tf32)

    def check_kept(self, cache: dma.DynamicCache, last: int | None = None) -> None:
        """Check that the cache keeps exactly the keys that token ``last`` sees, with their scores."""
        last = self.length - 1 if last is None else last
        rows = widest(self.window) + self.sinks + self.recent
        positions, scores = (host(x) for x in cache.kept())
        unordered = np.sort(host(cache.positions), -1)
        assert positions.shape == scores.shape == unordered.shape == (self.batch, self.kv_heads, rows)
        assert host(cache.length).tolist() == [last + 1] * self.batch
        for b, g in np.ndindex(self.batch, self.kv_heads):
            wanted = np.flatnonzero(self.mask[b, g, last]) if last >= 0 else np.zeros(0, int)
            assert positions[b, g].tolist() == [*wanted.tolist(), *[-1] * (rows - len(wanted))]
            assert unordered[b, g].tolist() == sorted(positions[b, g].tolist())
            expected = self.data["scores"][b, g, wanted]
            np.testing.assert_array_equal(scores[b, g], [*expected, *[-np.inf] * (rows - len(wanted))])


def stored(rows: np.ndarray, storage: str) -> np.ndarray:
    """The rows rounded as a cache with this ``storage`` reads them; rounding them again changes nothing."""
    library, found = library_named("numpy"), rows
    for _ in range(8):
        before, found = found, fake_quantized(library, found, storage, rows.dtype.name)
        if before.tobytes() == found.tobytes():
            return found
    raise AssertionError("rounding again changes the rows")


def packed(arrays: list[np.ndarray], lengths: Iterable[int], behind: int = 0) -> tuple[list[np.ndarray], np.ndarray]:
    """Pack padded query, key, value and scores, with ``behind`` NaN tokens at the end; also returns cu_seqlens."""
    lengths = list(lengths)
    bounds = np.cumsum([0, *lengths]).astype(np.int32)

    def join(parts: list[np.ndarray], axis: int) -> np.ndarray:
        shape = list(parts[0].shape)
        shape[axis] = behind
        return np.concatenate((*parts, np.full(shape, np.nan, parts[0].dtype)), axis)

    rows = [join([x[b, :n] for b, n in enumerate(lengths)], 0) for x in arrays[:3]]
    return [*rows, join([arrays[3][b, :, :n] for b, n in enumerate(lengths)], 1)], bounds
