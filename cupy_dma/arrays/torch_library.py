"""torch, on the CPU and on CUDA devices."""
from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cupy_dma.arrays import torch_tensors
from cupy_dma.arrays.library import CPU, Device, Library, Operand, numpy_dtype


def _in_numpy(array):
    """A NumPy view of a CPU tensor. ``Tensor.numpy()`` would pin the size of its storage, which FSDP changes for
    parameters."""
    found = np.from_dlpack(array)
    return found if found.flags.writeable else array.numpy()  # unversioned DLPack counts as read-only


class TorchLibrary(Library):
    name = "torch"

    def __init__(self):
        import torch

        self.xp, self._forward_ad, self._is_compiling = torch, torch.autograd.forward_ad, torch.compiler.is_compiling
        # Older versions of torch cannot tell export from compilation.
        self._is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
        names = ("float16", "bfloat16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32", "int64")
        self._type_of = {name: getattr(torch, name) for name in names}
        self._name_of = {kind: name for name, kind in self._type_of.items()}
        self._torch_devices: dict[Device, Any] = {CPU: torch.device("cpu")}
        self._cuda: dict[int, Device] = {}

    def _torch_device(self, device):
        found = self._torch_devices.get(device)
        if found is None:
            found = self._torch_devices[device] = self.xp.device(*device)
        return found

    def describe(self, array, name):
        plain = self._is_compiling()  # traced tensors have no memory and none of the special kinds
        if not plain and (self._forward_ad._current_level >= 0 or array.is_neg()):
            array = torch_tensors.in_memory(self.xp, array, name)
        try:
            if array.is_cuda:
                index = array.get_device()
                device = self._cuda.get(index) or self._cuda.setdefault(index, Device("cuda", index))
            elif array.is_cpu:
                device = CPU
            else:
                raise torch_tensors.unreadable(self.xp, array, name)
            shape, strides = tuple(array.shape), array.stride()
            pointer = self._traced_pointer(array) if plain else array.data_ptr()
        except (RuntimeError, UserWarning):  # nested, sparse or wrapped by torch.func; FakeTensor under -W error
            raise torch_tensors.unreadable(self.xp, array, name) from None
        if not plain and pointer == 0 and 0 not in shape:
            return self.describe(torch_tensors.written_out(self.xp, array, name), name)
        return Operand(name, array, self, shape, strides, self._name_of.get(array.dtype) or str(array.dtype), device,
                       pointer)

    def _traced_pointer(self, array):
        """None where ``torch.export`` traces tensors that have no memory; nothing can be launched then."""
        try:
            return array.data_ptr()
        except RuntimeError:
            return None

    def pointer(self, array):
        return array.data_ptr()

    def empty(self, shape, dtype, device):
        return self.xp.empty(shape, dtype=self._type_of[dtype], device=self._torch_device(device))

    def allocator(self, shape, dtype, device):
        return functools.partial(self.xp.empty, shape, dtype=self._type_of[dtype], device=self._torch_device(device))

    def to_numpy(self, array):
        array = array.detach().cpu()
        if array.dtype == self.xp.bfloat16:
            return _in_numpy(array.view(self.xp.int16)).view(numpy_dtype("bfloat16"))
        return _in_numpy(array)

    def from_numpy(self, array, device):
        if array.dtype.name == "bfloat16":  # torch does not accept this dtype in NumPy arrays
            return self.xp.from_numpy(array.view(np.int16)).view(self.xp.bfloat16).to(self._torch_device(device))
        return self.xp.from_numpy(array).to(self._torch_device(device))

    def astype(self, array, dtype):
        return array.to(self._type_of[dtype])

    def contiguous(self, array):
        return array.contiguous()

    def is_traced(self):
        return self._is_compiling()

    def is_exported(self):
        return self._is_exporting()

    def requires_grad(self, array):
        return array.requires_grad and self.xp.is_grad_enabled()

    def stream(self, device):
        return 0 if device.kind == "cpu" else self.xp._C._cuda_getCurrentRawStream(device.index)

    def arange(self, start, stop, device):
        return self.xp.arange(start, stop, dtype=self.xp.int32, device=self._torch_device(device))

    def full(self, shape, value, dtype, device):
        return self.xp.full(shape, value, dtype=self._type_of[dtype], device=self._torch_device(device))

    def cumsum(self, array):
        return self.xp.cumsum(array, -1, dtype=self.xp.int32)

    def search_right(self, boundaries, values):
        return self.xp.searchsorted(boundaries.contiguous(), values.contiguous(), right=True, out_int32=True)
