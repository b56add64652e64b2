"""A gate that blocks a CUDA stream, so tests detect a call that waits for the stream on hosts of any speed."""
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np

LIMIT = 20.0  # s; far longer than a test's calls take on a busy host
CLOSED, OPEN, EXPIRED = range(3)
SOURCE = f"""
extern "C" __global__ void hold(volatile int* gate, unsigned long long limit) {{
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {{
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        if (now - start > limit) *gate = {EXPIRED};
    }} while (*gate == {CLOSED});
}}
"""


@contextmanager
def held(stream: int, limit: float = LIMIT):
    """Block the stream (given by address) until the ``with`` block ends, then wait for it.

    A ``with`` block that waits for the stream would never end, so the gate opens by itself after ``limit`` seconds.

    Raises:
        AssertionError: the ``with`` block took longer than ``limit``.
    """
    import cupy

    memory = cupy.cuda.alloc_pinned_memory(4)  # the GPU sees it at the same address
    gate = np.frombuffer(memory, np.int32, 1)
    gate[0] = CLOSED
    arguments = np.uint64(memory.ptr), np.uint64(limit * 1e9)
    cupy.RawKernel(SOURCE, "hold").kernel((1,), (1,), arguments, stream=SimpleNamespace(ptr=stream))
    try:
        yield
        assert gate[0] == CLOSED, f"a call waited for the stream (for {limit} s, when its gate opened by itself)"
    finally:
        gate[0] = OPEN
        cupy.cuda.runtime.streamSynchronize(stream)
