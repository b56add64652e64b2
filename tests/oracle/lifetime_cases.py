"""Masks without a bound, named by the lifetimes of their keys."""
from collections.abc import Iterator

import numpy as np

import cupy_dma as dma
from cupy_dma.masks.interval import EVER, NEVER


def masks(n: int, heads: int, seed: int = 0) -> Iterator[tuple[str, dma.IntervalMask]]:
    rng, j = np.random.default_rng(seed), np.arange(n)
    shape = heads, n
    survives = rng.random(shape) < 1 / 8
    yield "survivors", dma.IntervalMask.from_stop(np.where(survives, n, j + 40))
    yield "only far survivors", dma.IntervalMask(np.broadcast_to(j + 40, shape).astype(np.int32).copy(),
                                                 np.where(survives, NEVER, 0).astype(np.int32))
    yield "lognormal", dma.IntervalMask.from_stop(j + np.exp(rng.normal(4, 1.5, shape)).astype(int))
    yield "nothing", dma.IntervalMask.from_stop(np.zeros(shape, int))
    yield "everything", dma.IntervalMask.from_stop(np.full(shape, n))
    yield "any start", dma.IntervalMask(np.where(rng.random(shape) < 0.3, EVER, j + 7).astype(np.int32),
                                        np.where(rng.random(shape) < 0.5, NEVER, j + 90).astype(np.int32))


NAMES = [name for name, _ in masks(8, 1)]
