"""The backend registry: what a backend provides, and which one serves a call.

A backend is a module with these functions:

- ``unavailable() -> str | None``: why it cannot run here;
- ``key_scores(value, dt_proj, A, dt_bias, form) -> array``: SPEC section 2, float32 ``(B, Hkv, Lk)``;
- ``prefix_stop(scores, window, padding, document) -> array``: ``stop_j`` of SPEC section 3, int32 ``(B, Hkv, Lk)``;
  ``window`` is an int, or a tuple with one per head of the scores;
- ``selected_run(scores, window, keys, padding, documents, apart) -> (start, stop)``, optional: the whole selection, as
  ``masks/selection.py`` builds it from ``prefix_stop``, for nonempty scores; ``window`` is None if every key is kept,
  ``documents`` are as the caller passes them, and ``apart`` is as in ``Candidates``;
- ``attention(call) -> (out, lse)``: SPEC section 5;
- ``attention_backward(call) -> (dquery, dkey, dvalue, dbias)``: SPEC section 6, for an ``AttentionBackwardCall``; None
  for gradients not in ``call.needs``. ``dbias`` has the four axes of the call's bias Operand and its type;
- ``key_scores_backward(dscores, value, dt_proj, A, dt_bias, form, needs, dvalue=None) -> (dvalue, ddt_proj, dA,
  ddt_bias)``: ``dscores`` is contiguous float32 ``(B, Hkv, Lk)`` (float64 for float64); each result has its argument's
  shape and type, None if not in ``needs``. ``dvalue``, if given, is the gradient of ``value`` through the attention
  itself and is added before rounding (``needs`` then contains "value");
- ``cache_extend(state, call) -> (out, lse)``: SPEC section 7, for a ``CacheState``, updated in place, and an
  ``ExtendCall``; ``out`` and ``lse`` are None without a query;
- ``takes_value_dim(call) -> bool``, optional: whether it supports ``Dv != D`` for this call, forward or backward;
  otherwise the narrower arrays get zero columns (``calls/head_dims.py``);
- ``attend_last(call, scores) -> (out, lse) | None``, optional: ``dynamic_mask_attention`` for a ``DynamicCall`` with
  few queries and its scores, without building a mask; None if the call is faster with one;
- ``last_keys(scores, window) -> array``, optional: the best ``window`` of more keys, int32 ``(B, Hkv, window)`` in any
  order, for float32 scores;
- ``run_kernel(launch)``, optional: a user's kernel (``cuda/runtime/user_kernel.py``);
- ``make_chain(call, grad, own_mask) -> chain | None``, optional: programs of an ``AttentionCall`` or ``DynamicCall``,
  and with ``grad`` of its gradients, for calls that differ in addresses only (``cuda/chain.py``); with it the
  ``runtime`` of the programs, and ``keeps_programs()``, False while calls must build programs of their own;
- ``build_program(function, operands) -> program | None``, optional: a function of arrays as a program that fills the
  caller's memory, by ``launch(program, addresses, stream, arrays)`` (``cuda/backend.py``).

They take checked ``Operand``s (a forward call without sinks) and return arrays of their first argument's library.
CUDA arrays go to ``cuda``, CPU arrays to ``numpy``. ``register`` adds a backend from outside the package; in a checkout
``CUPY_DMA_EMULATOR=1`` sends CPU arrays to the one that runs the CUDA kernels on the CPU (``tests/emulator``).
"""
from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Operand, is_tensor, library_named

NAMES = ("cuda", "numpy", "triton", "flex")  # in order of preference for CUDA arrays
_loaded: dict[str, Any] = {}  # backends that have been found to run here
_registered: dict[str, Any] = {}  # those from outside the package
_FOR_CPU = "emulator" if os.environ.get("CUPY_DMA_EMULATOR", "") not in ("", "0") else "numpy"


def register(name: str, backend: Any) -> None:
    """Make ``backend``, an object with these functions, selectable by ``name``. It takes CPU arrays."""
    _registered[name] = backend


def is_registered(name: str) -> bool:
    """Whether a backend of this name was registered from outside the package."""
    return name in _registered or name == _FOR_CPU and why_not(name) is None


def why_not(name: str) -> str | None:
    """Why backend ``name`` cannot run here; None if it can. ValueError if there is no backend of that name."""
    if name in _loaded:
        return None
    if name == _FOR_CPU == "emulator" and name not in _registered:
        try:
            import_module("tests.emulator")  # registers itself
        except ImportError as error:
            return f"CUPY_DMA_EMULATOR is set outside a checkout: {error}"
    if name not in NAMES and name not in _registered:
        raise ValueError(f"backend must be one of {', '.join(map(repr, NAMES))}, got {name!r}")
    try:
        module = _registered.get(name) or import_module(f"cupy_dma.backends.{name}")
    except ImportError as error:
        return str(error)
    reason = module.unavailable()
    if reason is None:
        _loaded[name] = module
    return reason


def get_available_backends() -> list[str]:
    """Names of the backends that can run on this machine, in order of preference for CUDA arrays.

    >>> "numpy" in dma.get_available_backends()
    True
    """
    return [name for name in NAMES if why_not(name) is None]


def choose(backend: str | None, operands: Iterable[Operand | None]) -> ModuleType:
    """The backend module that serves these arguments.

    Parameters
    ----------
    backend
        A name from ``get_available_backends()``, or None: ``cuda`` for CUDA arrays, ``numpy`` for CPU arrays.
        ``"numpy"`` with CUDA arrays is an explicit request to copy to the host, compute there and copy back.
    operands
        The arguments of the call, all on one device; the first that is not None decides.

    Raises
    ------
    TypeError, ValueError
        There is no backend of that name, or it does not take arrays on this device.
    RuntimeError
        The backend cannot run here; the message says why.
    """
    first = next(operand for operand in operands if operand is not None)
    checks.has_memory(first)
    on_cuda = first.device.kind == "cuda"
    name = ("cuda" if on_cuda else _FOR_CPU) if backend is None else backend
    try:
        module = _loaded[name]
    except (KeyError, TypeError):
        module = None
    if module is None:  # outside the handler, so that errors are not chained to it
        module = _load(name, backend, first)
    if name in _registered and on_cuda:
        raise ValueError(f"backend={name!r} takes CPU arrays, but {first.name} is on {first.device}")
    if name == "cuda" and not on_cuda:
        raise ValueError(f"backend='cuda' takes CUDA arrays, but {first.name} is on {first.device}; "
                         f"leave backend out or use backend='numpy'")
    if name == "triton" and on_cuda == module.interpreted():
        wanted = "CPU arrays under TRITON_INTERPRET=1" if on_cuda else "CUDA arrays"
        raise ValueError(f"backend='triton' takes {wanted}, but {first.name} is on {first.device}")
    return module


def is_traced(array: Any) -> bool:
    """Whether ``torch.compile`` is tracing this call, so that it must go through operators instead of addresses."""
    return is_tensor(array) and library_named("torch").is_traced()


def traced() -> ModuleType:
    """The module whose functions are operators, for ``torch.compile``, which cannot trace ``import_module``.

    This is the only import of a higher layer: ``IntervalMask.top_w`` has to become an operator when it is traced.
    """
    from cupy_dma.torch import scores

    return scores


def _load(name, backend: str | None, first: Operand) -> ModuleType:
    if not isinstance(name, str):
        raise TypeError(f"backend must be a str or None, got {type(name).__name__}")
    reason = why_not(name)
    if reason is None:
        return _loaded[name]
    if backend is None:
        raise RuntimeError(f"no backend here takes {first.name} on {first.device}: {name}: {reason} "
                           f"(backend='numpy' would copy to the host and compute there)")
    raise RuntimeError(f"backend={backend!r} cannot run here: {reason}; "
                       f"available: {', '.join(get_available_backends())}")
