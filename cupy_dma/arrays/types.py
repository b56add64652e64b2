"""Types of the arguments of public functions, for type checkers; ``describe`` and ``checks`` look at what comes."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias


class Array(Protocol):
    """An array that a function takes: ``numpy.ndarray``, ``cupy.ndarray``, ``torch.Tensor``, or anything else with
    ``__dlpack__``. For type checkers.

    >>> def norm(x: dma.Array) -> float:
    ...     return float(np.linalg.norm(np.from_dlpack(x)))
    >>> norm(np.array([3.0, 4.0]))
    5.0
    """

    @property
    def __dlpack__(self) -> Callable[..., Any]: ...


Ints: TypeAlias = Array | Sequence[int]
PageTable: TypeAlias = Array | Sequence[Sequence[int]]
Windows: TypeAlias = int | Ints  # one for all kv heads, or one for each
