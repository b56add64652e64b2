"""Interval masks, two integers per key, and their constructors."""
from cupy_dma.masks.interval import IntervalMask

__all__ = ["IntervalMask"]
