"""The CUDA backend: this project's raw kernels (``kernels/``), compiled for the device at run time.

Work runs on the caller's current stream, memory comes from the caller's library, and nothing synchronizes. The modules
of this package prepare and launch; they reach the device through a ``Runtime`` only. Its packages mirror ``kernels/``:

    attention/  forward, backward, Hopper, few queries       kernels/sm80, sm90, decode/flash_decode.cu
    select/     key scores and prefix top-w                  kernels/select
    lists/      key lists of interval and dense masks        kernels/lists
    decode/     the decode cache                             kernels/decode/step.cu
    runtime/    compiling, loading, launching                kernels/common/check_fragment_layout.cu
"""
from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from cupy_dma.backends.cuda.attention.backward_chunks import attention_backward as _attention_backward
from cupy_dma.backends.cuda.attention.flash_decode import takes_value_dim as _takes_value_dim
from cupy_dma.backends.cuda.attention.forward import attention as _attention
from cupy_dma.backends.cuda.attention.last_queries import attend_last as _attend_last
from cupy_dma.backends.cuda.buffers import plan_buffers as _plan_buffers
from cupy_dma.backends.cuda.decode.cache import cache_extend as _cache_extend
from cupy_dma.backends.cuda.decode.step import step as _decode_step
from cupy_dma.backends.cuda.runtime import jit, plans, warmup
from cupy_dma.backends.cuda.runtime.device import CudaRuntime
from cupy_dma.backends.cuda.runtime.user_kernel import run_kernel as _run_kernel
from cupy_dma.backends.cuda.select.last_queries import last_keys as _last_keys
from cupy_dma.backends.cuda.select.prefix import prefix_run as _prefix_run
from cupy_dma.backends.cuda.select.prefix import prefix_stop as _prefix_stop
from cupy_dma.backends.cuda.select.scores import key_scores as _key_scores
from cupy_dma.backends.cuda.select.scores import key_scores_backward as _key_scores_backward
from cupy_dma.backends.cuda.steps import make_step as _make_step
from cupy_dma.calls.types import AttentionBackwardCall, AttentionCall

__all__ = ["attend_last", "attention", "attention_backward", "cache_extend", "key_scores", "key_scores_backward",
           "last_keys", "make_step", "plan_buffers", "prefix_run", "prefix_stop", "run_kernel", "takes_value_dim",
           "unavailable", "warmup_jobs"]

plans.plannable(AttentionCall, AttentionBackwardCall)
runtime = CudaRuntime()
attention = partial(plans.planned(_attention), runtime)
key_scores = partial(plans.planned(_key_scores), runtime)
prefix_stop = partial(plans.planned(_prefix_stop), runtime)
prefix_run = partial(plans.planned(_prefix_run), runtime)
attention_backward = partial(plans.planned(_attention_backward), runtime)
key_scores_backward = partial(plans.planned(_key_scores_backward), runtime)
attend_last = partial(_attend_last, runtime)
last_keys = partial(_last_keys, runtime)
takes_value_dim = partial(_takes_value_dim, runtime)
make_step = partial(_make_step, runtime)
plan_buffers = partial(_plan_buffers, runtime)
run_kernel = partial(_run_kernel, runtime)
cache_extend = partial(_cache_extend, partial(_decode_step, runtime), prefix_stop, attention)


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
    except jit.CompileError as error:
        return str(error)
    return None


def warmup_jobs(head_dims: tuple[int, ...] = (64, 128), dtypes: tuple[str, ...] = ("float16", "bfloat16"),
                groups: tuple[int, ...] = (1, 2, 4), arch: str | None = None) -> list[tuple[str, Callable[[], Any]]]:
    """(label, job) pairs; ``job()`` compiles one kernel file for ``arch``, by default the current device's (without one
    sm_90a)."""
    if arch is None and unavailable() is None:
        import cupy

        index = cupy.cuda.runtime.getDevice()
        return warmup.jobs(jit.device_arch(index), runtime.shared_memory_limit(index), head_dims, dtypes, groups)
    return warmup.jobs(arch or "sm_90a", None, head_dims, dtypes, groups)
