"""The two ways of the prefix selection on CUDA (kernels/select/prefix_top_w.cu)."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cupy_dma.backends.cuda.runtime.program import fresh


@contextmanager
def counting(counted: bool) -> Iterator[None]:
    """Each key meets all others in one kernel, however many there are; or else keys are selected chunk by chunk."""
    with fresh(counted=counted):
        yield
