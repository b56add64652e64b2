"""Attention modules with dynamic masks made of those of any causal model.

A module keeps its parts and their weights, gets ``A`` and ``dt_proj`` beside them, and becomes an instance of a
subclass of its class that knows its selection. Which modules, the model's configuration says: ``convert`` notes it
there, and a model built from such a configuration is converted when it is made, before its weights are loaded
(``registration.py``).
"""
from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn

from cupy_dma.transformers.cache import DynamicMaskCache
from cupy_dma.transformers.layers import NAME, DynamicMask, dynamic_layers
from cupy_dma.transformers.served import self_attention


def convert_modules(model: nn.Module) -> None:
    """Convert the attention modules that the model's configuration names, unless they are converted already."""
    config = model.config.get_text_config(decoder=True)
    masks = dynamic_layers(config)
    chosen = [(module, masks[index]) for index, module in self_attention(model).items()
              if index in masks and not isinstance(module, _DynamicMasked)]
    for (module, how), size in [(each, _value_size(each[0], config)) for each in chosen]:
        _convert_module(module, how, size, config)
    config._attn_implementation = NAME


class _DynamicMasked:
    """What a converted attention module adds to its class."""

    dynamic_mask: DynamicMask
    dynamic_cache: DynamicMaskCache | None = None  # of the call under way

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        implementation = self.config._attn_implementation  # type: ignore[attr-defined]
        if implementation != NAME:
            raise RuntimeError(f"a model with dynamic masks needs attn_implementation='cupy_dma', got "
                               f"{implementation!r}, which would ignore them")
        self.dynamic_cache = next((x for x in (*args, *kwargs.values()) if isinstance(x, DynamicMaskCache)), None)
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.dynamic_cache = None


    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        kinds = type(self).__mro__
        return _blank, (kinds[kinds.index(_DynamicMasked) + 1],), self.__dict__


def _blank(kind: type) -> nn.Module:
    """A module of a pickle or copy, without its state."""
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


def _convert_module(module: Any, how: DynamicMask, size: tuple[int, int], config: Any) -> None:
    heads, dim = size
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    module.A = nn.Parameter(torch.zeros(heads, device=like.device, dtype=like.dtype))
    module.dt_proj = nn.Linear(heads * dim, heads, bias=False, device=like.device, dtype=like.dtype)
    nn.init.normal_(module.dt_proj.weight, std=getattr(config, "initializer_range", 0.02))
    module.dynamic_mask = how
    kind: Any = type(module)
    module.__class__ = _with_dynamic_mask(kind)
