"""Attention modules with dynamic masks, made from those of any causal model.

A module keeps its parts and their weights, gets ``A`` and ``dt_proj``, ``score_proj`` or a gate in addition, and
becomes an instance of a subclass of its class that knows its selection. ``convert`` notes in the model's configuration
which modules; a model built from such a configuration is converted when it is made, before its weights are loaded
(``registration.py``).
"""
from __future__ import annotations

import functools
import sys
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cupy_dma.torch import RetentionGate
from cupy_dma.transformers.cache import DynamicMaskCache
from cupy_dma.transformers.gate import FullGatedCache, GateCall
from cupy_dma.transformers.layers import GATE, NAME, SCORES, DynamicMask, GateMask, dynamic_layers
from cupy_dma.transformers.served import self_attention


class Plan(NamedTuple):
    """The target of a conversion."""

    module: Any
    heads: int  # kv heads
    value_dim: int
    width: int  # of its input


def plans(model: nn.Module, layers: Collection[int]) -> list[Plan]:
    """The attention modules of these layers, in order, that are not converted already. Changes nothing.

    Raises
    ------
    ValueError
        A module cannot be converted.
    """
    config = model.config.get_text_config(decoder=True)
    return [Plan(module, *_value_size(module, config), _width(module, config))
            for index, module in sorted(self_attention(model).items())
            if index in layers and not isinstance(module, _DynamicMasked)]


def convert_modules(model: Any) -> None:
    """Convert the attention modules that the model's configuration names, unless they are converted already."""
    config = model.config.get_text_config(decoder=True)
    layers = dynamic_layers(config)
    for plan in plans(model, layers):
        _convert_module(plan, layers[plan.module.layer_idx], config)
    wide = {GATE if isinstance(how, GateMask) else SCORES for how in layers.values() if reads_input(how)}
    if wide:  # whatever type the model is loaded in
        model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), *wide}
    config._attn_implementation = NAME


def reads_input(how: DynamicMask | GateMask) -> bool:
    """Whether a layer's gates or scores are computed from its input."""
    return isinstance(how, GateMask) or how.form == "input"


class _DynamicMasked:
    """What a converted attention module adds to its class."""

    dynamic_mask: DynamicMask | GateMask
    dynamic_cache: DynamicMaskCache | None = None  # of the current call
    gate_call: GateCall | None = None  # likewise
    score_input: Tensor | None = None  # likewise

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        implementation = self.config._attn_implementation  # type: ignore[attr-defined]
        if implementation != NAME:
            raise RuntimeError(f"a model with dynamic masks needs attn_implementation='cupy_dma', got "
                               f"{implementation!r}, which would ignore them")
        caches = [x for x in (*args, *kwargs.values()) if isinstance(x, DynamicMaskCache | FullGatedCache)]
        cache = caches[0] if caches else None
        given = (args[0] if args else kwargs["hidden_states"]) if reads_input(self.dynamic_mask) else None
        if isinstance(self.dynamic_mask, GateMask):
            layer = None if cache is None else cache.layers[self.layer_idx]  # type: ignore[attr-defined]
            self.dynamic_cache, self.gate_call, self.score_input = None, GateCall(given, layer), None
        else:
            self.dynamic_cache, self.gate_call, self.score_input = cache, None, given
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.dynamic_cache = self.gate_call = self.score_input = None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        kinds = type(self).__mro__
        return _blank, (kinds[kinds.index(_DynamicMasked) + 1],), self.__dict__


def _blank(kind: type) -> nn.Module:
    """A new module for a pickle or copy, still without its state."""
    sys.modules[__package__].register()  # not imported from there: registration.py imports this module
    made: Any = _with_dynamic_mask(kind)
    return made.__new__(made)


@functools.cache
def _with_dynamic_mask(kind: type) -> type:
    return type(f"DynamicMask{kind.__name__}", (_DynamicMasked, kind), {"__module__": kind.__module__,
                                                                         "__doc__": kind.__doc__})


def _value_size(module: Any, config: Any) -> tuple[int, int]:
    """kv heads and value dim of what the module attends to."""
    heads = getattr(module, "num_key_value_heads", None)
    if heads is None and getattr(module, "num_key_value_groups", None):
        heads = (getattr(module, "num_heads", None) or config.num_attention_heads) // module.num_key_value_groups
    if heads is None:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    sizes = (getattr(module, name, None) for name in ("v_head_dim", "head_dim", "head_size", "attention_head_size"))
    size = next((found for found in sizes if found), None) or getattr(config, "head_dim", None)
    return heads, size or config.hidden_size // config.num_attention_heads


def _width(module: Any, config: Any) -> int:
    """Size of the module's input tokens: the hidden size, unless none of its layers takes that."""
    inputs = [child.in_features if isinstance(child, nn.Linear) else child.weight.shape[0]
              for child in module.modules() if isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D"]
    return inputs[0] if inputs and config.hidden_size not in inputs else config.hidden_size


def _convert_module(plan: Plan, how: DynamicMask | GateMask, config: Any) -> None:
    module, heads = plan.module, plan.heads
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    made: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
    if reads_input(how):
        made["dtype"] = torch.float64 if like.dtype == torch.float64 else torch.float32
    if isinstance(how, GateMask):
        gate = RetentionGate(plan.width, heads, **how.gate, **made)
        setattr(module, GATE, gate.train(module.training))
    elif how.form == "input":
        setattr(module, SCORES, nn.Linear(plan.width, heads, bias=False, **made))
        nn.init.zeros_(module.score_proj.weight)
    elif how.form != "none":
        module.A = nn.Parameter(torch.zeros(heads, **made))
        module.dt_proj = nn.Linear(heads * plan.value_dim, heads, bias=False, **made)
        nn.init.normal_(module.dt_proj.weight, std=getattr(config, "initializer_range", 0.02))
    module.dynamic_mask = how
    kind: Any = type(module)
    module.__class__ = _with_dynamic_mask(kind)
