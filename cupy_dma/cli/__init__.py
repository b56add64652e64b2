"""What ``python -m cupy_dma`` does."""
