"""Which memory emulated kernels may touch, and how.

Every array of a call is announced to the driver: arguments as read-only, with the gaps between their rows out of
bounds; arrays that the host code makes as writable and uninitialised, filled with NaN (or 0xAB bytes if they hold
integers). When the call returns, the arrays that it made become read-only too (masks keep key lists), until they are
freed.
"""
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from cupy_dma.arrays import Library, Operand, numpy_dtype
from tests.emulator import build


class Session:
    """The memory of one call."""

    def __init__(self) -> None:
        self._arguments: list[int] = []
        self._made: list[int] = []
        self._results: dict[int, int] = {}  # pointer of an array made here -> its region

    # ---- arguments ----
    def operand(self, operand: Operand, writable: bool = False) -> Operand:
        """Announce an argument. Returns the same operand with a library that announces arrays made for this call.

        ``writable``: it is contiguous, and the call changes it in place.
        """
        size = numpy_dtype(operand.dtype).itemsize
        if writable and 0 not in operand.shape:
            count = int(np.prod(operand.shape))
            region = build.driver().add_region(operand.pointer, count * size, operand.name, True, None, size)
            build.driver().initialise_region(region)
            self._arguments.append(region)
        elif 0 not in operand.shape:
            ends = [stride * (extent - 1) for stride, extent in zip(operand.strides, operand.shape)]
            below, above = sum(min(e, 0) for e in ends), sum(max(e, 0) for e in ends)
            elements = np.zeros(above - below + 1, np.uint8)
            np.lib.stride_tricks.as_strided(elements[-below:], operand.shape, operand.strides)[...] = 1
            self._arguments.append(build.driver().add_region(operand.pointer + below * size, elements.size * size,
                                                             operand.name, False, np.repeat(elements, size)))
        if isinstance(operand.library, WatchedLibrary):
            return operand
        return replace(operand, library=WatchedLibrary(operand.library, self))

    def readable(self, array: np.ndarray, name: str) -> None:
        self._arguments.append(build.driver().add_region(array.ctypes.data, array.nbytes, name, False, None))

    def writable(self, array: np.ndarray, name: str) -> int:
        region = build.driver().add_region(array.ctypes.data, array.nbytes, name, True, None)
        self._arguments.append(region)
        return region

    # ---- arrays made by the host code ----
    def made(self, array: Any, pointer: int, size: int, name: str, item: int, initialised: bool = False) -> None:
        driver = build.driver()
        region = driver.add_region(pointer, size, name, True, None, item)
        if initialised:
            driver.initialise_region(region)
        self._made.append(region)
        self._results[pointer] = region
        weakref.finalize(array, self._gone, pointer, region).atexit = False

    def _gone(self, pointer: int, region: int) -> None:
        build.driver().remove_region(region)
        if self._results.get(pointer) == region:  # the address may already belong to another array
            del self._results[pointer]

    def check_written(self, pointer: int, name: str, item: int, most: int = 1) -> None:
        """Every element of a result must have been written, at most ``most`` times per launch."""
        region = self._results.get(pointer)
        if region is None:
            return
        never, often = build.driver().written(region, most)
        if never >= 0:
            raise AssertionError(f"element {never // item} of {name} was not written")
        if often >= 0:
            raise AssertionError(f"element {often // item} of {name} was written more than {most} times in a launch")

    def close(self) -> None:
        driver = build.driver()
        for region in self._arguments:
            driver.remove_region(region)
        for region in self._made:
            driver.freeze_region(region)


class WatchedLibrary:
    """An array library that announces the arrays that it makes, and otherwise behaves like the original."""

    def __init__(self, inner: Library, session: Session):
        self._inner, self._session = inner, session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def empty(self, shape: tuple[int, ...], dtype: str, device: Any) -> Any:
        array, item = self._inner.empty(shape, dtype, device), numpy_dtype(dtype).itemsize
        size = int(np.prod(shape)) * item
        if size:
            memory = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * size).from_address(self.pointer(array)))
            memory[:] = 0xff if "float" in dtype else 0xab
            self._session.made(array, self.pointer(array), size, f"an array {shape} {dtype}", item)
        return array

    def allocator(self, shape: tuple[int, ...], dtype: str, device: Any) -> Callable[[], Any]:
        return functools.partial(self.empty, shape, dtype, device)

    def full(self, shape: tuple[int, ...], value: Any, dtype: str, device: Any) -> Any:
        array, item = self._inner.full(shape, value, dtype, device), numpy_dtype(dtype).itemsize
        size = int(np.prod(shape)) * item
        if size:
            self._session.made(array, self.pointer(array), size, f"an array {shape} {dtype}", item, initialised=True)
        return array

    def describe(self, array: Any, name: str) -> Operand:
        return self._session.operand(self._inner.describe(array, name))

    def operand(self, array: Any, name: str) -> Operand:
        return self.describe(array, name)


class Memory:
    """Opens sessions."""

    @contextmanager
    def session(self) -> Iterator[Session]:
        session = Session()
        try:
            yield session
        finally:
            session.close()
