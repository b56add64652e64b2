"""One BLAS thread for small products, and threads of our own for long sequences.

The product of a tile takes well under a millisecond. Spread over a pool of threads it ends when the last of them has
been scheduled, which on a busy machine takes far longer than the product. A call sets and lifts the limit once, at a
cost of 10 us or more; finding it already set costs 2 us.

If tiles are large, NumPy's operations are long enough for threads to work side by side, on different kv heads. The time
of short sequences goes into waiting for the interpreter's lock, and threads only add to that (docs/lab/numpy.md).
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
LONG = 1024  # queries from which threads pay
_lock = Lock()
if hasattr(os, "register_at_fork"):  # a child forked while another thread held the lock would wait for ever
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def parallel_for(work: Callable[[Sequence[Item]], Any], items: Sequence[Item], queries: int,
                 alone: bool = False) -> None:
    """``work`` on all items, each with this many queries. If sequences are long, as many run at a time as BLAS may have
    threads, without NumPy's warnings. ``alone``: one after the other."""
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
    """Limit BLAS to one thread inside the ``with`` block and restore the previous number after it, even after an
    exception. Yields that number.

    Some libraries have one number for the whole process (the OpenBLAS of NumPy's wheels does). Other threads' products
    then run with one thread meanwhile, and only the caller that lowered the number restores it: a caller that mistook
    the limit of a concurrent call for the user's number would restore the limit after that call has ended. Nor must a
    caller find the numbers of some libraries restored and of others not.
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
