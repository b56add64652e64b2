"""Which kernels a call launches and why not others, without running it: ``info --explain SHAPE``."""
from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, NamedTuple

from cupy_dma.arrays import ALIGNMENT, Device, Operand, library_named, packed_strides
from cupy_dma.arrays.library import NO_CONTEXT
from cupy_dma.backends.cuda.chain import Building, arguments
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.builder import Builder, Launch
from cupy_dma.backends.cuda.runtime.program import Program, builder
from cupy_dma.backends.cuda.runtime.warmup import shared_memory_limit
from cupy_dma.calls.gradients import chain_gradients
from cupy_dma.calls.run import attention_of
from cupy_dma.calls.types import AttentionCall, DynamicCall, key_bias
from cupy_dma.masks.selection import Candidates

SMS = {"sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90a": 132, "sm_100": 148, "sm_120": 170}  # of the common GPUs
_GPU = Device("cuda", 0)
_SHOWN = ("keys", "heads", "block_m", "block_n", "block_q", "stages", "split", "ping_pong", "dquery", "rows", "warps",
          "tensor_cores", "dim_slices")  # fields of configurations


class Kernel(NamedTuple):
    config: jit.Config
    entry: str
    shared_bytes: int

    def launch(self, grid: int, threads: int, params: bytes, stream: int, pdl: bool = True) -> None:
        raise RuntimeError("cannot launch kernels on a device that is only described")


class DescribedDevice:
    """A GPU as the backend sees it; it need not exist."""

    def __init__(self, arch: str = "sm_90a", num_sms: int | None = None):
        """``arch``: such as sm_90a. ``num_sms``: by default that of the common GPU of this architecture."""
        if arch not in SMS:
            raise ValueError(f"arch must be one of {', '.join(SMS)}, got {arch!r}")
        self.arch, self._num_sms = arch, num_sms or SMS[arch]

    def load(self, config: jit.Config, entry: str, index: int, shared_bytes: int = 0) -> Kernel:
        return Kernel(config, entry, shared_bytes)

    def on(self, device: Device) -> AbstractContextManager:
        return NO_CONTEXT

    def clear(self, pointer: int, size: int, stream: int) -> None:
        pass

    def shared_memory_limit(self, index: int) -> int:
        return shared_memory_limit(self.arch)

    def num_sms(self, index: int) -> int:
        return self._num_sms

    def hopper(self, index: int) -> bool:
        return self.arch == "sm_90a"

    def check_layout(self, index: int) -> None:
        pass

    def tensor_map_encoder(self) -> Any:
        def encode(target: Any, kind: int, rank: int, pointer: Any, *more: Any) -> int:
            ctypes.memmove(target.value, pointer.value.to_bytes(8, "little"), 8)
            return 0

        return encode


class Shape(NamedTuple):
    """A call of ``dynamic_mask_attention``, or of causal ``attention`` if there is no window."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    window: int | None
    dtype: str
    backward: bool
    deterministic: bool

    @classmethod
    def of(cls, text: str) -> Shape:
        """From words such as ``B=1 H=16/8 N=8192 D=128 w=1024 bfloat16 backward``; ``Lq=`` and ``Lk=`` for different
        lengths. ValueError for others."""
        given: dict[str, Any] = {"B": "1", "D": "128"}
        flags = set()
        for word in text.replace(",", " ").split():
            name, sign, value = word.partition("=")
            if sign and name in ("B", "H", "N", "Lq", "Lk", "D", "w"):
                given[name] = value
            elif word in ("float16", "bfloat16", "float32", "backward", "deterministic"):
                flags.add(word)
            else:
                raise ValueError(f"SHAPE may have B=, H=, N= or Lq= and Lk=, D=, w=, float16, bfloat16, float32, "
                                 f"backward and deterministic, got {word!r}")
        heads, _, kv_heads = given.get("H", "").partition("/")
        try:
            numbers = {name: int(value) for name, value in given.items() if name != "H"}
            both = int(heads), int(kv_heads or heads)
            lengths = numbers.get("Lq", numbers.get("N")), numbers.get("Lk", numbers.get("N"))
            if None in lengths or min(*numbers.values(), *both) < 1 or both[0] % both[1] or numbers["D"] > 256:
                raise ValueError
        except ValueError:
            raise ValueError(f"SHAPE must have heads such as H=16/8, a multiple of the kv heads, a length N= or Lq= "
                             f"and Lk=, and whole numbers of at least 1, D of at most 256, got {text!r}") from None
        kinds = [flag for flag in ("float16", "bfloat16", "float32") if flag in flags]
        return cls(numbers["B"], *both, lengths[0], lengths[1], numbers["D"], numbers.get("w"),  # type: ignore[arg-type]
                   kinds[0] if kinds else "bfloat16", "backward" in flags, "deterministic" in flags)

    def call(self) -> AttentionCall | DynamicCall:
        query, key, value = (_operand(name, (self.batch, length, heads, self.head_dim), self.dtype)
                             for name, length, heads in (("query", self.queries, self.heads),
                                                         ("key", self.keys, self.kv_heads),
                                                         ("value", self.keys, self.kv_heads)))
        own = AttentionCall(query, key, value, None, None, None, self.window is None, self.head_dim ** -0.5, 0.0,
                            self.deterministic)
        if self.window is None:
            return own
        scores = _operand("scores", (self.batch, self.kv_heads, self.keys), "float32")
        return DynamicCall(dataclasses.replace(own, bias=key_bias(scores)), scores, None, self.window, "prefix",
                           Candidates())


def _operand(name: str, shape: tuple[int, ...], dtype: str) -> Operand:
    return Operand(name, SimpleNamespace(shape=shape), library_named("numpy"), shape, packed_strides(shape), dtype,
                   _GPU, ALIGNMENT)


def explain(shape: str, device: Any = None) -> str:
    """The launches of a call with this ``Shape``, its workspace in bytes, and why it does not use other kernels.

    Parameters
    ----------
    shape
        See ``Shape.of``.
    device
        A ``DescribedDevice`` or a runtime; by default an H100.

    Raises
    ------
    ValueError
        ``shape`` cannot be read.

    Examples
    --------
    >>> "attention_forward" in dma.explain("B=1 H=16/8 N=8192 D=128 w=1024 bfloat16")
    True
    """
    given = Shape.of(shape)
    build = builder(device or DescribedDevice(), "numpy", _GPU, given.backward)
    spec, recipe, _ = arguments(build, given.call(), own_mask=False)
    module: Any = Building(build)
    own = attention_of(spec, module) if isinstance(spec, DynamicCall) else spec
    out, lse = module.attention(own)
    lines = [*_described("forward", build, Program(build, (out, lse)))]
    if given.backward:
        after = build.following()
        first = len(after.buffers)
        dout = after.argument(_operand("dout", tuple(out.shape), out.dtype))
        needs = frozenset(["query", "key", "value", *(["bias"] if own.bias is not None else [])])
        upstream = dout, build.describe(out, "out"), build.describe(lse, "lse"), None
        module = Building(after)
        found = chain_gradients(own, recipe, upstream, needs, module)
        places = {buffer: place for buffer, place in Program(build, (out, lse)).places.items() if buffer < first}
        places |= {buffer: places[0]._replace(at=len(places) + i) for i, buffer in enumerate(after.given)}
        results = tuple([found[name] for name in sorted(needs)])
        lines += _described("backward", after, Program(after, results, places=places, first=first))
    return "\n".join(lines)


def _described(title: str, build: Builder, program: Program) -> Iterator[str]:
    yield f"{title}: {program.workspace:,} bytes besides the results"
    for step in build.steps:
        if isinstance(step, Launch):
            kernel: Any = step.kernel
            facts = [f"{name}={getattr(kernel.config, name)}" for name in _SHOWN if hasattr(kernel.config, name)]
            yield (f"  {kernel.entry:<20} {kernel.config.source:<28} {step.grid} x {step.threads} threads, "
                   f"{kernel.shared_bytes / 1024:.0f} KiB{'' if step.pdl else ', no PDL'}  {' '.join(facts)}")
        else:
            yield f"  {'set to zero':<20} {step.size:,} bytes"
    for note in dict.fromkeys(build.notes):
        yield f"  not used: {note}"
