"""Attention modules with dynamic masks made of those of any causal model.

A module keeps its parts and their weights, gets ``A`` and ``dt_proj`` beside them, and becomes an instance of a
subclass of its class that knows its selection. Which modules, the model's configuration says: ``convert`` notes it
there, and a model built from such a configuration is converted when it is made, before its weights are loaded
(``registration.py``).
"""
from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from cupy_dma.transformers.cache import DynamicMaskCache
from cupy_dma.transformers.layers import NAME, DynamicMask, dynamic_layers


def convert_modules(model: nn.Module) -> None:
    """Convert the attention modules that the model's configuration names, unless they are converted already."""
    config = model.config.get_text_config(decoder=True)
    for index, module in attention_modules(model).items():
        how = dynamic_layers(config).get(index)
        if how is not None and not isinstance(module, _DynamicMasked):
            _convert_module(module, how, config)
    config._attn_implementation = NAME


def attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """The self-attention of each layer, by index."""
    return {module.layer_idx: module for module in model.modules()
            if isinstance(getattr(module, "layer_idx", None), int) and "Attention" in type(module).__name__}


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


@functools.cache
def _with_dynamic_mask(kind: type) -> type:
    return type(f"DynamicMask{kind.__name__}", (_DynamicMasked, kind), {"__module__": kind.__module__,
                                                                         "__doc__": kind.__doc__})


def _convert_module(module: Any, how: DynamicMask, config: Any) -> None:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = next((found for found in (getattr(module, "v_head_dim", None), getattr(module, "head_dim", None),
                                     getattr(module, "head_size", None), getattr(config, "head_dim", None))
                 if found), config.hidden_size // config.num_attention_heads)
    like = next(module.parameters())
    module.A = nn.Parameter(torch.zeros(heads, device=like.device, dtype=like.dtype))
    module.dt_proj = nn.Linear(heads * size, heads, bias=False, device=like.device, dtype=like.dtype)
    nn.init.normal_(module.dt_proj.weight, std=getattr(config, "initializer_range", 0.02))
    module.dynamic_mask = how
    kind: Any = type(module)
    module.__class__ = _with_dynamic_mask(kind)
