"""Scores from the norms of keys, as a function of this library: the example of docs/add-a-kernel.md.

    python examples/add_a_kernel/key_norms.py       on a GPU or, without one, on the CPU emulator of this checkout
"""
from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import cupy_dma as dma
from cupy_dma import backends, checks
from cupy_dma.arrays import Operand, describe
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.builder import Array, Builder
from cupy_dma.backends.cuda.runtime.configs import ELEMENTS, blocks
from cupy_dma.backends.cuda.runtime.params import Params

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 256


# ---- the definition: tests/oracle/reference.py ----------------------------------------------------------------------

def reference(key: np.ndarray) -> np.ndarray:
    """``(B, Hkv, Lk)`` of ``key (B, Lk, Hkv, D)``, in float64."""
    return -np.sqrt((key.astype(np.float64)**2).sum(-1)).transpose(0, 2, 1)


# ---- the configuration: backends/cuda/runtime/configs.py ------------------------------------------------------------

@dataclass(frozen=True)
class NormConfig(jit.Config):
    source = "select/key_norms.cu"
    element: str
    head_dim: int
    threads: int = THREADS

    def text(self) -> str:  # needed only because the file is not in kernels/
        return self.prelude() + jit.inlined(SOURCE.name, SOURCE.read_text())


# ---- the launcher: backends/cuda/select/norms.py --------------------------------------------------------------------

def key_norms(build: Builder, key: Operand) -> Array:
    """Launches kernels/select/key_norms.cu: ``(B, Hkv, Lk)`` float32 of ``key (B, Lk, Hkv, D)``."""
    batch, length, kv_heads, head_dim = key.shape
    score = build.empty((batch, kv_heads, length), "float32")
    rows = batch * kv_heads * length
    if rows:
        config = NormConfig(ELEMENTS[key.dtype], head_dim)
        params = Params(SOURCE.read_text(), "NormParams").pack(  # jit.params(config.source, "NormParams")
            key=key.pointer, score=score.ref, key_batch=key.strides[0], key_row=key.strides[1],
            key_head=key.strides[2], kv_heads=kv_heads, key_length=length, rows=rows)
        build.launch(build.load(config, "key_norms"), blocks(rows, THREADS // 32), THREADS, params)
    return score


# ---- the public function: api.py ------------------------------------------------------------------------------------

def key_norm_scores(key: Any, *, backend: str | None = None) -> Any:
    """The negative norm of each key: float32 scores ``(B, Hkv, Lk)`` of ``key (B, Lk, Hkv, D)``.

    Raises
    ------
    TypeError, ValueError
        ``key`` is not a float array with four axes whose last one is contiguous.
    """
    given = describe(key, "key")
    checks.one_of_types(given, ("float16", "bfloat16", "float32"))
    if given.ndim != 4:
        raise ValueError(f"key must have shape (B, Lk, Hkv, D), got {given.shape}")
    checks.rows_contiguous(given)
    module = backends.choose(backend, (given,))
    return given.library.export(module.key_norms(given))


# ---- the backends: backends/numpy/scores.py, and a few lines in three more ------------------------------------------

def on_numpy(key: Operand) -> Any:
    rows = key.library.to_numpy(key.array).astype(np.float32)
    return key.library.from_numpy(-np.sqrt((rows**2).sum(-1)).transpose(0, 2, 1).copy(), key.device)


def register() -> None:
    """Add the lines that backends/cuda/backend.py and the __init__.py of cuda and numpy would contain."""
    from cupy_dma.backends import cuda, numpy
    from cupy_dma.backends.cuda.backend import Backend

    Backend.key_norms = lambda self, key: self._run(key_norms, key)  # type: ignore[attr-defined]
    cuda.key_norms = cuda._backend.key_norms  # type: ignore[attr-defined]
    numpy.key_norms = on_numpy  # type: ignore[attr-defined]


register()


# ---- a call of it ---------------------------------------------------------------------------------------------------

def main() -> None:
    on_gpu = "cuda" in dma.get_available_backends()
    if on_gpu:
        import cupy as xp
    else:
        from tests import emulator

        emulator.RESULTS["key_norms"] = ("score",)  # the emulator checks that every element is written, once
        xp = np
    key = np.random.default_rng(0).standard_normal((2, 100, 3, 40)).astype(np.float16)
    there = xp.asarray(key)
    scores = key_norm_scores(there, backend=None if on_gpu else "emulator")
    found = scores.get() if on_gpu else scores
    print(f"largest error {abs(found - reference(key)).max():.1e}")
    print("out", dma.dynamic_mask_attention(there, there, there, scores, window=16).shape)


if __name__ == "__main__":
    main()
