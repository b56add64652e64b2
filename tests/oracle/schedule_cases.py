"""Calls whose tiles are scheduled on few SMs: whole, cut by rows (``ROW_CUT`` in kernels/sm90/config.cuh), split along
their keys (kernels/sm90/split_kv.cuh) or, in the last wave, short."""
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

import cupy_dma as dma
from cupy_dma.backends.cuda.attention import sm90, sm90_backward, sm90_schedule, sm90_tiles
from cupy_dma.backends.cuda.lists import intervals
from cupy_dma.backends.cuda.runtime.device import CudaRuntime
from cupy_dma.backends.cuda.runtime.program import fresh
from tests.emulator import EmulatorRuntime

# : names, and whether a row's visible keys come in the same blocks in every slice of a tile
CASES = {"none": True, "causal": True, "key bias": True, "lists": True, "short lists": True,
         "values that are not finite": True, "lists of all tiles": False, "sequences": True,
         "lists of sequences": True, "dense bias": True}
HEADS = [(2, 1), (4, 1), (3, 1), (2, 2)]


@contextmanager
def num_sms(count: int, split: bool = False, short_tiles: bool = False) -> Iterator[list[int]]:
    """Inside the context, the scheduler sees ``count`` SMs, and calls are ``scheduled``. Lists stay the same: their
    order of keys depends on how many warps make a list."""
    with (mock.patch.object(CudaRuntime, "num_sms", lambda runtime, index: count),
          mock.patch.object(EmulatorRuntime, "num_sms", lambda runtime, index: count),
          mock.patch.object(intervals, "_tile_warps", lambda *arguments: 1), scheduled(split, short_tiles) as found):
        yield found


@contextmanager
def hopper_gradients(one_pass: bool | None) -> Iterator[None]:
    """Inside the context, Hopper kernels compute gradients however few tiles there are, in one pass if possible, or in
    two; None: in two if lists skip any pairs."""
    with (fresh(one_pass=one_pass), mock.patch.object(sm90_backward, "LISTED_STEPS", 0.0),
          mock.patch.object(sm90_backward, "MIN_TILES", 0.0)):
        yield


@contextmanager
def scheduled(split: bool = False, short_tiles: bool = False) -> Iterator[list[int]]:
    """Inside the context, tiles of the last wave are split along their keys, into as many splits as possible, even
    splits without keys; or they are short wherever possible; or neither. Yields the number of splits of each call (1:
    whole tiles), or the number of short tiles per set of heads."""
    found: list[int] = []

    def best_schedule(facts: sm90_tiles.ScheduleKey, tile: sm90_tiles.HopperTile, sms: int) -> sm90_schedule.Schedule:
        work, *others = sm90_schedule.candidates(facts, tile, sms)
        for other in others:
            if split and other.num_splits > 1 or short_tiles and other.short_tiles:
                work = other
        found.append(work.short_tiles if short_tiles else work.num_splits)
        return work

    with (fresh(), mock.patch.object(sm90, "best_schedule", best_schedule),
          mock.patch.object(sm90_schedule, "_min_split_keys", lambda tile: 1)):
        yield found


def run(name: str, heads: int, kv_heads: int, head_dim: int, convert: Callable[[np.ndarray], Any],
        backend: str | None = None, length: int = 1003) -> tuple[Any, Any]:
    """``out`` and ``lse`` of a call whose tiles have few or no queries at the ends, and one or several blocks of
    keys."""
    rng = np.random.default_rng(0)
    sequences = "sequences" in name
    batch = 1 if sequences else 2

    def draw(*shape: int, dtype: str = "float16") -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    q, k, v = (draw(batch, length, h, head_dim) for h in (heads, kv_heads, kv_heads))
    scores = draw(batch, kv_heads, length, dtype="float32")
    if "finite" in name:
        v[:, ::97] = np.inf
    bounds = convert(np.array([0, length // 3, length // 3, length // 3 + 10, length], np.int32))
    options: dict[str, Any] = {"return_lse": True, "backend": backend, "causal": name == "causal"}
    if "lists" in name or "finite" in name:
        options["mask"] = dma.IntervalMask.top_w(convert(scores), 20 if "short" in name else 150, backend=backend,
                                                 documents=bounds if sequences else None)
    if "of all tiles" in name:
        options["mask"] = dma.IntervalMask(options["mask"].start, options["mask"].stop)
    if name == "dense bias":
        options["bias"] = convert(draw(batch, heads, length, length))
    elif name not in ("none", "causal", "sequences"):
        options["bias"] = convert(scores[0] if sequences else scores)
    if sequences:
        return dma.varlen_attention(convert(q[0]), convert(k[0]), convert(v[0]), bounds, bounds, **options)
    return dma.attention(convert(q), convert(k), convert(v), **options)
