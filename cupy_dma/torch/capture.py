"""What the capture of a CUDA graph needs of Python."""
from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No cyclic garbage collection inside this context. Freeing a CUDA graph or a loaded kernel, of any library, aborts
    a capture in progress ("operation failed due to a previous error during capture"), and for example
    ``torch.cuda.make_graphed_callables`` leaves its graphs to the collector. torch itself collected before each capture
    up to 2.8."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
