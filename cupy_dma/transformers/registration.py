"""Registers ``attn_implementation="cupy_dma"`` with transformers.

The attention and the mask function go into the registries of transformers. The rest has no registry, so five methods
are wrapped; each behaves as before unless a model asks for this implementation:

    DogeAttention.forward                             scores and selection in O(N) (``doge.py``)
    GenerationMixin._prepare_cache_for_generation     this package's caches for models with dynamic masks
    PreTrainedModel.post_init                         converts a model built from a converted model's configuration;
                                                      raises for a model that is not supported (``served.py``)
    PreTrainedModel.set_attn_implementation           raises likewise
    PreTrainedModel._check_and_adjust_attn_implementation  raises likewise, before the model is built
"""
from __future__ import annotations

import functools
from typing import Any

from transformers import AttentionInterface, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache as FullCache
from transformers.masking_utils import AttentionMaskInterface

from cupy_dma.transformers.attention import attention_forward
from cupy_dma.transformers.cache import DynamicMaskCache, GatedCache
from cupy_dma.transformers.converted import convert_modules
from cupy_dma.transformers.doge import doge_forward
from cupy_dma.transformers.layers import KEY, NAME, dynamic_layers, gated_layers
from cupy_dma.transformers.served import check_class, check_served
from cupy_dma.transformers.visibility import visibility


@functools.cache
def register() -> None:
    """Make ``attn_implementation="cupy_dma"`` known to transformers, for all models; calls after the first do nothing.

    Afterwards ``from_pretrained(..., attn_implementation="cupy_dma")`` and
    ``model.set_attn_implementation("cupy_dma")`` work for any model with causal (or plain bidirectional) softmax
    attention. Doge runs its dynamic mask in O(N), and converted models (``convert``) can be loaded.
    """
    from transformers.models.doge.modeling_doge import DogeAttention

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, visibility)
    DogeAttention.forward = doge_forward(DogeAttention.forward)
    GenerationMixin._prepare_cache_for_generation = _with_our_cache(GenerationMixin._prepare_cache_for_generation)
    PreTrainedModel.post_init = _with_dynamic_masks(PreTrainedModel.post_init)
    PreTrainedModel.set_attn_implementation = _checked(PreTrainedModel.set_attn_implementation)
    PreTrainedModel._check_and_adjust_attn_implementation = _checked_first(
        PreTrainedModel._check_and_adjust_attn_implementation)


def _with_our_cache(original: Any) -> Any:
    @functools.wraps(original)
    def prepare(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        given = {name: model_kwargs.get(name) for name in ("cache", "past_key_values")}
        result = original(self, generation_config, model_kwargs, *args, **kwargs)
        config = self.config.get_text_config(decoder=True)
        if config._attn_implementation == NAME and dynamic_layers(config):
            for name, before in given.items():
                if before is None and type(model_kwargs.get(name)) is FullCache and \
                        generation_config.cache_implementation in (None, "dynamic"):
                    model_kwargs[name] = (GatedCache if gated_layers(config) else DynamicMaskCache)(config)
                    if generation_config.is_assistant:
                        model_kwargs[name].activate_past_recording()
        return result

    return prepare


def _with_dynamic_masks(original: Any) -> Any:
    @functools.wraps(original)
    def post_init(self: Any) -> None:
        original(self)
        config = self.config.get_text_config(decoder=True)
        if getattr(config, KEY, None) is not None:
            convert_modules(self)
        if self.config._attn_implementation == NAME:
            check_served(self)

    return post_init


def _checked(original: Any) -> Any:
    @functools.wraps(original)
    def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        if attn_implementation == NAME:
            check_served(self)
        original(self, attn_implementation, *args, **kwargs)

    return set_attn_implementation


def _checked_first(original: Any) -> Any:
    @functools.wraps(original)
    def check_and_adjust(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        if attn_implementation == NAME:
            check_class(self)
        return original(self, attn_implementation, *args, **kwargs)

    return check_and_adjust
