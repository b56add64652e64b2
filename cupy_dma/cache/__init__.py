"""Decoding of unbounded length in constant memory (SPEC section 7)."""
from cupy_dma.cache.dynamic_cache import DynamicCache
from cupy_dma.cache.gated_cache import GatedCache
from cupy_dma.cache.key_cache import KeptKeys

__all__ = ["DynamicCache", "GatedCache", "KeptKeys"]
