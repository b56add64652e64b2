"""Operands as torch tensors, the caller's stream, and results as arrays of the caller's library.

For backends that compute with torch. Nothing is copied except arrays with negative strides and read-only NumPy arrays.
Results are in memory of the caller's library.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cupy_dma.arrays import CPU, Operand, library_named


@contextmanager
def on_stream_of(operand: Operand) -> Iterator[None]:
    """Make the operand's device and its library's current stream torch's current ones. Enter before ``tensor``."""
    device, library = operand.device, operand.library
    if device.kind == "cpu":
        with torch.no_grad():
            yield
        return
    with torch.no_grad(), torch.cuda.device(device.index):
        if library.name == "torch":
            yield
        else:
            with torch.cuda.stream(_stream(library.stream(device), device.index)):
                yield


def _stream(handle: int, index: int) -> torch.cuda.Stream:
    """A raw stream as a torch stream. The legacy default stream is 0, or 1 as ``cudaStreamLegacy``; for 0
    ExternalStream would create a new stream, unordered with CuPy's work."""
    return torch.cuda.default_stream(index) if handle in (0, 1) else torch.cuda.ExternalStream(handle, index)


def tensor(operand: Operand) -> torch.Tensor:
    """The operand's array as a tensor over the same memory; it may have fewer axes than the operand."""
    return as_tensor(operand.array, operand)


def shaped(operand: Operand) -> torch.Tensor:
    """The operand's array as a tensor of the operand's shape; a view with stride 0 where it broadcasts."""
    found = tensor(operand)
    return found.expand(operand.shape) if found.ndim == len(operand.shape) else found.reshape(operand.shape)


def as_tensor(array: Any, like: Operand) -> torch.Tensor:
    """An array of ``like``'s library as a tensor over the same memory."""
    if isinstance(array, torch.Tensor):
        return array.detach()
    if any(stride < 0 for stride in array.strides):
        array = like.library.contiguous(array)
    if like.device.kind == "cpu":
        if not array.flags.writeable:  # torch has no read-only tensors, and warns
            array = array.copy()
        return library_named("torch").from_numpy(array, CPU)
    raw = {"bfloat16": "int16", "bool": "uint8"}.get(array.dtype.name)  # some DLPack versions lack these types
    if raw is None:
        return torch.from_dlpack(array)
    return torch.from_dlpack(array.view(raw)).view(getattr(torch, array.dtype.name))


def strides_of(operand: Operand, array: torch.Tensor) -> tuple[int, ...]:
    """The operand's strides, or those of the copy that ``tensor`` had to make, for the operand's axes."""
    if all(stride >= 0 for stride in operand.strides):
        return operand.strides
    shape, strides = operand.shape, list(array.stride())
    if len(strides) == 3 and len(shape) == 4:  # a key bias: its array has no query axis
        strides.insert(2, 0)
    strides = [0] * (len(shape) - len(strides)) + strides
    return tuple(0 if size == 1 else stride for size, stride in zip(shape, strides))


def result(like: Operand, shape: tuple[int, ...], dtype: str) -> tuple[Any, torch.Tensor]:
    """An uninitialised array of ``like``'s library and device, and the same memory as a tensor."""
    array = like.library.empty(shape, dtype, like.device)
    return array, as_tensor(array, like)


def delivered(found: torch.Tensor, like: Operand) -> Any:
    """A tensor computed here as an array of ``like``'s library: itself, or a copy in memory of the caller's library."""
    if like.library.name == "torch":
        return found
    array, target = result(like, tuple(found.shape), str(found.dtype).removeprefix("torch."))
    target.copy_(found)
    return array


def rounded(gradient: torch.Tensor, like: Operand) -> Any:
    """A gradient of the shape, type and library of its argument."""
    return delivered(gradient.detach().to(getattr(torch, like.dtype)).reshape(like.shape), like)
