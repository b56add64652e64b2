"""What the capture of a CUDA graph needs of Python."""
from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No cyclic garbage is collected in here. To free a CUDA graph or a loaded kernel, of whatever library, ends a
    capture that is under way with "operation failed due to a previous error during capture", and
    ``torch.cuda.make_graphed_callables``, say, leaves its graphs to the collector. torch collected before each capture
    up to 2.8."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
