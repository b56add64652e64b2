"""Masks in two integers per key, and what makes them."""
from cupy_dma.masks.interval import IntervalMask

__all__ = ["IntervalMask"]
