"""The Triton backend: gathered-key attention kernels written in Triton; scores and selection in torch operations.

Takes CUDA arrays of torch, CuPy and DLPack producers; with ``TRITON_INTERPRET=1``, set before Triton is imported, it
takes CPU arrays and Triton's interpreter runs the kernels. Work runs on the caller's current stream, results are
allocated by the caller's library, nothing synchronizes, and every sum has a fixed order: results are bitwise
reproducible.

float16 and bfloat16 are multiplied on tensor cores; float32 uses three TF32 MMAs per product (3xTF32), which have about
the precision of float32.

    problem.py     a call as the kernels see it
    lists.py       key lists or key ranges of tiles, and the order of keys for their gradients
    tiles.py       shared by the kernels: a tile of queries, visibility, logits, non-finite values
    forward.py     attention                       backward.py, backward_dkv.py, backward_dbias.py   its gradients
    selection.py   prefix top-w
    ../torch_common/scores_and_selection.py   key scores, their gradients, the rest of the selection
    ../torch_common/arrays.py                 operands as torch tensors, the caller's stream
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
    """This backend has no decode cache."""
    raise NotImplementedError("backend='triton' has no DynamicCache; backend='cuda' and backend='numpy' have one")


def __getattr__(name: str) -> Any:
    """The backend's functions. Their modules import torch and Triton, which may not be installed: loaded lazily."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"cupy_dma.backends.{_MODULES[name]}"), name)
    return found
