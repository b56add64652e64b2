"""The CUDA backend: this project's raw kernels (``kernels/``), compiled for the device at run time.

Work runs on the caller's current stream, memory comes from the caller's library, and nothing synchronizes. The modules
here build programs (``runtime/program.py``), one for each combination of shapes, strides, types and options;
``backend.py`` runs them, ``chain.py`` those of a differentiable call. The packages mirror ``kernels/``:

    attention/  forward, backward, Hopper, few queries       kernels/sm80, sm90, decode/flash_decode.cu
    select/     key scores and top-w                         kernels/select
    lists/      key lists of interval and dense masks        kernels/lists
    decode/     the decode cache                             kernels/decode/step.cu
    runtime/    programs; compiling, loading, launching      kernels/common/check_fragment_layout.cu
"""
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from cupy_dma.backends.cuda.attention.sm90_stored import max_stored
from cupy_dma.backends.cuda.backend import Backend
from cupy_dma.backends.cuda.runtime import jit, warmup
from cupy_dma.backends.cuda.runtime.device import CudaRuntime
from cupy_dma.backends.cuda.runtime.program import keeps_programs

__all__ = ["attend_last", "attention", "attention_backward", "build_program", "cache_extend", "keeps_programs",
           "key_scores", "key_scores_backward", "last_keys", "launch", "make_chain", "prefix_stop", "run_kernel",
           "selected_run", "takes_value_dim", "unavailable", "warmup_jobs"]

runtime = CudaRuntime()
_backend = Backend(runtime)
attend_last, attention, attention_backward = _backend.attend_last, _backend.attention, _backend.attention_backward
build_program, launch, make_chain = _backend.build_program, _backend.launch, _backend.make_chain
cache_extend, run_kernel, takes_value_dim = _backend.cache_extend, _backend.run_kernel, _backend.takes_value_dim
key_scores, key_scores_backward = _backend.key_scores, _backend.key_scores_backward
last_keys, prefix_stop, selected_run = _backend.last_keys, _backend.prefix_stop, _backend.selected_run


@cache
def unavailable() -> str | None:
    """Why this backend cannot run here, or None."""
    try:
        import cupy
    except ImportError:
        return ("CuPy is not installed: pip install 'cupy_dma[cuda12]' (CUDA 12 drivers) or 'cupy_dma[cuda13]' "
                "(CUDA 13 drivers)")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"
    if count == 0:
        return "no CUDA device"
    capability = cupy.cuda.Device(0).compute_capability
    if int(capability) < 80:
        return f"the device has compute capability {capability}, at least 8.0 (Ampere) is needed"
    try:
        jit.find_headers()
        max_stored()
    except (jit.CompileError, ValueError) as error:
        return str(error)
    return None


def warmup_jobs(head_dims: tuple[int, ...] = (64, 128), dtypes: tuple[str, ...] = ("float16", "bfloat16"),
                groups: tuple[int, ...] = (1, 2, 4), arch: str | None = None) -> list[tuple[str, Callable[[], Any]]]:
    """(label, job) pairs; ``job()`` compiles one kernel file for ``arch``, by default that of the current device, or
    sm_90a if there is none."""
    if arch is None and unavailable() is None:
        import cupy

        index = cupy.cuda.runtime.getDevice()
        return warmup.jobs(jit.device_arch(index), runtime.shared_memory_limit(index), head_dims, dtypes, groups)
    return warmup.jobs(arch or "sm_90a", None, head_dims, dtypes, groups)
