"""``utils.mask`` and ``utils.padding``, for all array libraries."""
from cupy_dma.flash_dmattn.utils import mask, padding

__all__ = ["mask", "padding"]
