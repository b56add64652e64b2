"""One BLAS thread while small products are computed.

A product of a tile takes well under a millisecond. Spread over a pool of threads it ends when the last of them has been
scheduled, and on a busy machine that takes far longer than the product. A call sets and lifts the limit once, which
costs 10 us or more; to find it set costs 2 us.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from threading import Lock

from threadpoolctl import ThreadpoolController

_lock = Lock()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let BLAS use one thread inside the ``with`` block, and as many as before after it, also after an exception.

    Some libraries have one number for the whole process (the OpenBLAS of NumPy's wheels does). Then other threads run
    their products with one thread meanwhile, and only the caller that lowered the number puts it back: one that takes
    the limit of a concurrent call for the user's would restore it after that call has ended.
    """
    blas = _blas()
    with _lock:
        lowers = any((library.num_threads or 1) > 1 for library in blas.lib_controllers)
        limit = blas.limit(limits=1) if lowers else nullcontext()
    with limit:
        yield


@cache
def _blas() -> ThreadpoolController:
    """The BLAS libraries in this process; looking for them takes milliseconds."""
    return ThreadpoolController().select(user_api="blas")
