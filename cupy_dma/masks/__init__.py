"""Interval masks, two integers per key, their constructors, and eviction policies as masks."""
from cupy_dma.masks import policies
from cupy_dma.masks.interval import IntervalMask

__all__ = ["IntervalMask", "policies"]
