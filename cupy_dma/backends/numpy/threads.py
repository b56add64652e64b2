"""One BLAS thread while small products are computed, and threads of our own for long sequences.

A product of a tile takes well under a millisecond. Spread over a pool of threads it ends when the last of them has been
scheduled, and on a busy machine that takes far longer than the product. A call sets and lifts the limit once, which
costs 10 us or more; to find it set costs 2 us.

Where tiles are large, NumPy's operations are long enough for threads to work side by side, each on other kv heads; the
time of short sequences is that of waiting for the interpreter's lock, which threads only add to (docs/lab/numpy.md).
"""
from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any, TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

Item = TypeVar("Item")
LONG = 4096  # queries from which on threads pay
_lock = Lock()
if hasattr(os, "register_at_fork"):  # a process forked while another thread held it would wait for that thread for ever
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def parallel_for(work: Callable[[Sequence[Item]], Any], items: Sequence[Item], queries: int,
                 alone: bool = False) -> None:
    """``work`` on all items, each of which takes so many queries: as many shares at a time as BLAS may have threads if
    sequences are long, without NumPy's warnings. ``alone``: one after the other."""
    with one_blas_thread() as threads:
        count = 1 if alone or queries < LONG else min(threads, len(items))

        def run(share: Sequence[Item]) -> None:
            with np.errstate(all="ignore"):
                work(share)

        if count <= 1:
            run(items)
            return
        with ThreadPoolExecutor(count, "cupy_dma") as pool:
            for done in [pool.submit(run, items[first::count]) for first in range(count)]:
                done.result()


@contextmanager
def one_blas_thread() -> Iterator[int]:
    """Let BLAS use one thread inside the ``with`` block, and as many as before after it, also after an exception. Gives
    how many those are.

    Some libraries have one number for the whole process (the OpenBLAS of NumPy's wheels does). Then other threads run
    their products with one thread meanwhile, and only the caller that lowered the number puts it back: one that takes
    the limit of a concurrent call for the user's would restore it after that call has ended. Nor must it find the
    numbers of some libraries put back and of others not.
    """
    blas = _blas()
    with _lock:
        threads = max((library.num_threads or 1 for library in blas.lib_controllers), default=1)
        limit = blas.limit(limits=1) if threads > 1 else None
    try:
        yield threads
    finally:
        if limit is not None:
            with _lock:
                limit.restore_original_limits()


@cache
def _blas() -> ThreadpoolController:
    """The BLAS libraries in this process; looking for them takes milliseconds."""
    return ThreadpoolController().select(user_api="blas")
