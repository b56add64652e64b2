"""Operands as torch tensors, and the caller's stream. Nothing is copied, except CuPy arrays with a negative stride."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cupy_dma.arrays import Operand


@contextmanager
def on_stream_of(operand: Operand) -> Iterator[None]:
    """Make the operand's device and its library's current stream torch's current ones. Enter before ``tensor``."""
    device, place = operand.device, operand.library
    if device.kind == "cpu":
        with torch.no_grad():
            yield
        return
    with torch.no_grad(), torch.cuda.device(device.index):
        if place.name == "torch":
            yield
        else:
            with torch.cuda.stream(_stream(place.stream(device), device.index)):
                yield


def _stream(handle: int, index: int) -> torch.cuda.Stream:
    """torch's view of a raw stream. The legacy default stream is 0, or 1 as ``cudaStreamLegacy``; of a 0 ExternalStream
    would make a new stream, on which nothing waits for CuPy's work, nor CuPy's for what is done there."""
    return torch.cuda.default_stream(index) if handle in (0, 1) else torch.cuda.ExternalStream(handle, index)


def tensor(operand: Operand) -> torch.Tensor:
    """The operand's array as a tensor over the same memory; its own axes, which may be fewer than the operand's."""
    return as_tensor(operand.array, operand)


def as_tensor(array: Any, like: Operand) -> torch.Tensor:
    """An array of ``like``'s library as a tensor over the same memory."""
    if isinstance(array, torch.Tensor):
        return array.detach()
    if array.dtype.name == "bfloat16" and like.device.kind == "cpu":  # a type that torch does not know in NumPy arrays
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    if any(stride < 0 for stride in array.strides):
        array = like.library.contiguous(array)
    return torch.from_numpy(array) if like.device.kind == "cpu" else torch.from_dlpack(array)


def strides_of(operand: Operand, array: torch.Tensor) -> tuple[int, ...]:
    """The operand's strides, or those of the copy that ``tensor`` had to make, on the operand's axes."""
    if all(stride >= 0 for stride in operand.strides):
        return operand.strides
    shape, strides = operand.shape, list(array.stride())
    if len(strides) == 3 and len(shape) == 4:  # a key bias: its query axis is not there
        strides.insert(2, 0)
    strides = [0] * (len(shape) - len(strides)) + strides
    return tuple(0 if size == 1 else stride for size, stride in zip(shape, strides))


def result(like: Operand, shape: tuple[int, ...], dtype: str) -> tuple[Any, torch.Tensor]:
    """An uninitialised array of ``like``'s library and device, and the same memory as a tensor."""
    array = like.library.empty(shape, dtype, like.device)
    return array, as_tensor(array, like)


def delivered(found: torch.Tensor, like: Operand) -> Any:
    """A tensor that was made here, in ``like``'s library: torch's own, or a copy in memory of the caller's pool."""
    if like.library.name == "torch":
        return found
    array, target = result(like, tuple(found.shape), str(found.dtype).removeprefix("torch."))
    target.copy_(found)
    return array
