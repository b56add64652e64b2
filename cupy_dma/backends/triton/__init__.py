"""The Triton backend: gathered-key kernels written in Triton, selection and scores in torch operations.

Takes CUDA arrays of torch, CuPy and DLPack producers; with ``TRITON_INTERPRET=1``, set before Triton is imported, CPU
arrays, on which Triton's interpreter runs the kernels. Work runs on the caller's current stream, results come from the
caller's library, nothing synchronizes, and every sum has one order: results are the same bits on every run.

float16 and bfloat16 are multiplied on tensor cores; a float32 product is made of three TF32 products, which together
have about the precision of float32.

    problem.py     a call as the kernels see it
    lists.py       key lists and ranges of tiles, the order of keys for their gradients
    tiles.py       what the kernels share: a tile of queries, visibility, logits, non-finite values
    forward.py     attention                       backward.py, backward_key.py, backward_bias.py   its gradients
    selection.py   prefix top-w
    ../_torch_math.py     key scores, their gradients, the rest of the selection
    ../_torch_arrays.py   operands as torch tensors, the caller's stream
"""
from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from typing import Any

__all__ = ["attention", "attention_backward", "cache_extend", "interpreted", "key_scores", "key_scores_backward",
           "prefix_stop", "unavailable"]

_SCORES = "torch_common.scores_and_selection"
_MODULES = {"attention": "triton.forward", "attention_backward": "triton.backward", "key_scores": _SCORES,
            "key_scores_backward": _SCORES, "prefix_stop": "triton.selection"}


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU arrays."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def unavailable() -> str | None:
    """Why this backend cannot run here, or None."""
    for name in ("torch", "triton"):
        try:
            import_module(name)
        except ImportError as error:
            return f"{name} is not installed: pip install 'cupy_dma[triton]' ({error})"
    if interpreted():
        return None
    import torch

    if not torch.cuda.is_available():
        return "torch sees no CUDA device (TRITON_INTERPRET=1 runs the kernels on the CPU, slowly)"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"the device has compute capability {major}.{minor}, at least 8.0 (Ampere) is needed"
    return None


def cache_extend(state: Any, call: Any) -> Any:
    """The decode cache: not here."""
    raise NotImplementedError("backend='triton' has no DynamicCache; backend='cuda' and backend='numpy' have one")


def __getattr__(name: str) -> Any:
    """The functions of a backend. Their modules import torch and Triton, which may be missing, so they come late."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"cupy_dma.backends.{_MODULES[name]}"), name)
    return found
