"""The emulated device: the ``Runtime`` that ``cupy_dma.backends.cuda`` needs, on a CPU."""
from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cupy_dma.arrays import Device, numpy_dtype
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.configs import ELEMENTS, LayoutConfig
from tests.emulator import build
from tests.emulator.memory import Memory

DEFAULT_BUILD = os.environ.get("CUPY_DMA_EMULATOR_BUILD", "watched")


class EmulatorError(RuntimeError):
    """A kernel is at fault; the message says what it did, in which thread and on which line."""


@dataclass(frozen=True)
class Order:
    """The order in which threads of a warp, warps of a block, and blocks run: forward, backward or random."""

    threads: str = "forward"
    blocks: str = "forward"
    seed: int = 0


class EmulatedKernel:
    """A kernel compiled for the CPU."""

    def __init__(self, runtime: EmulatorRuntime, path: Path, entry: str, shared_bytes: int):
        self.runtime, self.path, self.entry, self.shared_bytes = runtime, path, entry, shared_bytes
        self._library = _load(path)

    def launch(self, grid: int, threads: int, params: bytes, stream: int = 0, pdl: bool = True,
               alone: bool = False) -> None:
        """Run ``grid`` blocks of ``threads`` threads to their end. ``alone``: no device launches this kernel with PDL,
        so its threads need not wait for the kernel before it."""
        driver, order = build.driver(), self.runtime.order
        try:
            driver.launch(self._library, self.entry, grid, threads, params, self.shared_bytes,
                          self.runtime.build == "watched", order.threads, order.blocks, order.seed, alone)
        except driver.Fault as fault:
            raise EmulatorError(_with_lines(str(fault), self.path)) from None


class EmulatorRuntime:
    """A device whose kernels run on the CPU.

    ``build`` is one of ``build.BUILDS``; ``memory`` knows which memory kernels may access. ``is_hopper``: the kernels
    of ``kernels/sm90`` run too; ``hopper_gpu`` in __init__.py also gives them TMA. ``most_writes``: how often an
    element of a result may be written in a launch.
    """

    def __init__(self, build: str = DEFAULT_BUILD, order: Order = Order(), shared_limit: int = 227 * 1024,
                 is_hopper: bool = False):
        self.build, self.order, self.shared_limit, self.is_hopper = build, order, shared_limit, is_hopper
        self.most_writes = 1
        self.separate_arrays = True  # programs allocate arrays separately, so each is watched
        self.encoder = None  # of TMA descriptors
        self.memory = Memory()
        self._checked: set[int] = set()

    def load(self, config: jit.Config, entry: str, index: int, shared_bytes: int = 0) -> EmulatedKernel:
        return EmulatedKernel(self, build.kernel_library(config, self.build), entry, shared_bytes)

    def load_text(self, text: str, entry: str, shared_bytes: int = 0) -> EmulatedKernel:
        """A kernel from the given source text (for tests of the emulator)."""
        return EmulatedKernel(self, build.compile_text("test", text, self.build), entry, shared_bytes)

    def on(self, device: Device) -> AbstractContextManager:
        return nullcontext()

    def clear(self, pointer: int, size: int, stream: int) -> None:
        build.driver().clear(pointer, size)

    def shared_memory_limit(self, index: int) -> int:
        return self.shared_limit

    def num_sms(self, index: int) -> int:
        return 4  # a small GPU: even small tests have several blocks and waves

    def hopper(self, index: int) -> bool:
        return self.is_hopper

    def tensor_map_encoder(self):
        return self.encoder

    def check_layout(self, index: int) -> None:
        """The emulator's fragments must pass the same check as a GPU's."""
        if index in self._checked:
            return
        self._checked.add(index)
        for dtype in ELEMENTS:
            assert self.lanes_with_known_layout(dtype) == 32

    def lanes_with_known_layout(self, dtype: str) -> int:
        x = (np.arange(256) - 128).astype(numpy_dtype(dtype))
        ok = np.zeros(1, np.int32)
        with self.memory.session() as session:
            session.readable(x, "x")
            session.writable(ok, "ok")
            config = LayoutConfig(element=ELEMENTS[dtype])
            params = jit.params(config.source, "LayoutParams").pack(x=x.ctypes.data, ok=ok.ctypes.data)
            self.load(config, "fragment_layout", 0).launch(1, 32, params, 0)
        return int(ok[0])


@functools.cache
def _load(path: Path) -> int:
    return build.driver().load(str(path))


def _with_lines(message: str, library: Path) -> str:
    """The message with files and lines instead of code offsets, including inlined calls from the inside out."""

    def resolve(match: re.Match) -> str:
        if shutil.which("addr2line") is None:
            return match[0]
        found = subprocess.run(["addr2line", "--inlines", "-e", str(library), match[1]], capture_output=True, text=True)
        frames = [line.split(" (")[0] for line in found.stdout.splitlines()]
        own = [frame for frame in frames if "/include/" not in frame and not frame.startswith("generated")]
        return " < ".join(dict.fromkeys(frame.rpartition("/")[2] for frame in own or frames))

    return re.sub(r"<\+(0x[0-9a-f]+)>", resolve, message)
