"""Registration of this package's functions as operators ``torch.ops.cupy_dma``, and when calls bypass them.

Eager calls on plain tensors run a backend directly, inside a ``torch.autograd.Function``: their arguments are checked
once, and a mask keeps its key lists from the forward to the backward pass. Traced and intercepted calls use the
operators: ``torch.compile``, dispatch modes (fake tensors, FLOP counters, selective checkpointing), tensor subclasses,
and autograd when it differentiates a gradient. An operator checks its arguments when it runs; its fake kernel gives
shapes and types. Results are freshly allocated and contiguous.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cupy_dma import checks
from cupy_dma.arrays import library_of, torch_tensors
from cupy_dma.masks.windows import Window

# The compiler must not change the strides of inputs: the last axis has to stay contiguous.
_STRIDES = getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)
_TENSOR = object()  # stands for a tensor argument of an operator
_library = torch.library.Library("cupy_dma", "DEF")
operators = torch.ops.cupy_dma
for _known in (torch.empty(0), torch.nn.Parameter(torch.empty(0))):
    library_of(_known, "")  # noted before tracing starts, which guards on it


class OperatorOptions(NamedTuple):
    """The arguments of the attention operators after the bias."""

    causal: bool
    scale: float | None
    softcap: float
    deterministic: bool
    bias_delay: int
    backend: str | None


# ---- operators ------------------------------------------------------------------------------------------------------


def register(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator with its kernel, for CPU and CUDA tensors, and its fake kernel."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, _STRIDES))
    for device in ("CPU", "CUDA"):
        _library.impl(name, kernel, device)
    torch.library.register_fake(f"cupy_dma::{name}", fake, lib=_library)


def register_derivative(name: str, differentiable: dict[int, str], keeps_outputs: bool) -> None:
    """Register operator ``{name}_backward``, itself not differentiable, as the derivative of operator ``name``.

    ``differentiable``: names of the arguments that may have gradients, by position. The derivative takes the gradients
    of the outputs, with ``keeps_outputs`` the outputs, then the arguments, and the names of the requested gradients,
    which it returns in that order. (``torch.library.register_autograd`` costs 75 us per call for operators with this
    many arguments.)
    """
    operator, derivative = getattr(operators, name).default, getattr(operators, f"{name}_backward").default

    def kernel(keys: Any, *arguments: Any) -> Any:
        for position, argument in differentiable.items():
            if arguments[position] is not None and torch_tensors.has_tangent(torch, arguments[position]):
                raise torch_tensors.tangent_error(argument)
        if needs_grad(*[x for x in arguments if isinstance(x, Tensor)]):
            return _Operator.apply(operator, derivative, differentiable, keeps_outputs, keys, *arguments)
        return _below_autograd(operator, keys, arguments)

    def refusing(keys: Any, *arguments: Any) -> list[Tensor]:
        return list(_SecondDerivative.apply(derivative, keys, *arguments))

    _library.impl(name, kernel, "Autograd", with_keyset=True)
    _library.impl(f"{name}_backward", refusing, "Autograd", with_keyset=True)


def _below_autograd(operator: Any, keys: Any, arguments: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator.redispatch(keys & torch._C._after_autograd_keyset, *arguments)


class _Operator(torch.autograd.Function):
    """An operator at the Autograd dispatch key."""

    @staticmethod
    def forward(ctx: Any, operator: Any, derivative: Any, differentiable: dict[int, str], keeps_outputs: bool,
                keys: Any, *arguments: Any) -> Any:
        outputs = _below_autograd(operator, keys, arguments)
        kept = outputs if keeps_outputs else ()
        ctx.save_for_backward(*kept, *[x for x in arguments if isinstance(x, Tensor)])
        ctx.arguments = [_TENSOR if isinstance(x, Tensor) else x for x in arguments]
        ctx.derivative, ctx.differentiable, ctx.kept = derivative, differentiable, len(kept)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        first = len(ctx.needs_input_grad) - len(ctx.arguments)
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if all(gradient is None for gradient in gradients):
            return tuple(found)
        saved = ctx.saved_tensors  # a checkpoint returns them only once
        outputs, tensors = saved[:ctx.kept], iter(saved[ctx.kept:])
        arguments = [next(tensors) if x is _TENSOR else x for x in ctx.arguments]
        upstream = torch.zeros_like(outputs[0]) if gradients[0] is None else gradients[0]
        if outputs:  # those with gradients
            gradients = tuple([g for g, x in zip(gradients, outputs) if x.is_floating_point()])
        wanted = {i: name for i, name in ctx.differentiable.items() if ctx.needs_input_grad[first + i]}
        made = ctx.derivative(upstream, *gradients[1:], *outputs, *arguments, list(wanted.values()))
        for i, gradient in zip(wanted, made):
            found[first + i] = gradient
        return tuple(found)


class _SecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Any, keys: Any, *arguments: Any) -> Any:
        return tuple(_below_autograd(operator, keys, arguments))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError("cupy_dma has no second derivatives: do not differentiate a gradient of attention or "
                                  "key_scores (create_graph=True)")


# ---- shared by the functions above the operators --------------------------------------------------------------------


def takes_operators(*tensors: Any) -> bool:
    """Whether a call with these arguments is traced or intercepted, so that it must go through operators."""
    if torch.compiler.is_compiling():
        return True
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    special = transformed or torch._C._len_torch_dispatch_stack() > 0
    # No operator takes nested tensors or what a transform has wrapped; the checks of a plain call report these.
    for x in tensors:
        if transformed and isinstance(x, Tensor) and torch_tensors.transform_of(torch, x):
            return False
        if type(x) is not Tensor and isinstance(x, Tensor) and type(x) is not torch.nn.Parameter:
            if x.is_nested:
                return False
            special = True
    return special


def is_plain_gradient(gradient: Tensor) -> bool:
    """Whether a gradient can bypass the operators: it is not traced, and autograd will not differentiate it."""
    return type(gradient) is Tensor and not torch.is_grad_enabled()


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd wants a gradient for any of them."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def is_deterministic(deterministic: bool) -> bool:
    """The checked option, or torch's global switch."""
    return checks.flag(deterministic, "deterministic") or torch.are_deterministic_algorithms_enabled()


def options_of(causal: bool, scale: float | None, softcap: float, deterministic: bool, bias_delay: int,
               backend: str | None) -> OperatorOptions:
    """Checked options, as an operator takes them."""
    return OperatorOptions(checks.flag(causal, "causal"), None if scale is None else checks.real(scale, "scale"),
                           checks.real(softcap, "softcap", 0.0), is_deterministic(deterministic),
                           checks.delay(bias_delay), backend)


def in_rows(x: Any) -> Any:
    """Scores or a key bias with a contiguous last axis: the tensor, or a differentiable copy. Others are unchanged."""
    if not isinstance(x, Tensor) or x.is_nested or x.layout != torch.strided or not 1 <= x.ndim <= 3:
        return x
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def as_key_bias(x: Any) -> Any:
    """16-bit scores or key biases as float32, which the kernels read; differentiable."""
    if isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16) and (
            x.ndim in (2, 3) or x.ndim == 4 and x.shape[2] == 1) and not x.is_nested:
        return x.float()
    return x


def as_tensor(x: Any, like: Tensor) -> Any:
    """A list of ints as an int32 tensor on ``like``'s device; others are unchanged."""
    return torch.tensor(x, dtype=torch.int32, device=like.device) if isinstance(x, (list, tuple)) else x


def listed(window: Window) -> list[int]:
    """A window as operators take it: one int, or 0 followed by one int per head."""
    return [0, *window] if isinstance(window, tuple) else [window]


def from_list(window: Sequence[int]) -> Window:
    """The window that ``listed`` was given."""
    return window[0] if len(window) == 1 else tuple(window[1:])


def cast(*tensors: Any) -> tuple[Any, ...]:
    """Tensors cast to autocast's type if it is enabled for their device, except float64."""
    first = tensors[0]
    if not isinstance(first, Tensor) or first.is_meta or not torch.is_autocast_enabled(first.device.type):
        return tensors
    kind = torch.get_autocast_dtype(first.device.type)
    return tuple([x.to(kind) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
                  for x in tensors])


def own_type(module: torch.nn.Module, like: Tensor) -> torch.dtype:
    """The type that a module's inputs should have without autocast: that of its parameters, or ``like``'s if none is a
    float."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), like.dtype)


# ---- shapes and types of results ------------------------------------------------------------------------------------


def wide(x: Tensor) -> torch.dtype:
    """The type of per-row and per-key numbers."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def empty_like(named: dict[str, Tensor | None], needs: Sequence[str]) -> list[Tensor]:
    """Fake gradients."""
    found = [named[name] for name in needs]
    return [x.new_empty(x.shape) for x in found if x is not None]
