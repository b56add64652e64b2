"""The attention function for models of the ``transformers`` library, which need not be installed."""
from cupy_dma.flash_dmattn.integrations.flash_dynamic_mask_attention import flash_dynamic_mask_attention_forward

flash_sparse_attention_forward = flash_dynamic_mask_attention_forward  # its later name

__all__ = ["flash_dynamic_mask_attention_forward", "flash_sparse_attention_forward"]
