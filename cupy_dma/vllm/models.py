"""vLLM's model classes, whose attention modules get dynamic masks where the configuration notes them.

``cupy_dma.transformers.convert`` adds ``A`` and ``dt_proj``, ``score_proj`` or ``retention_gate`` to attention modules,
and notes its options as ``config.dynamic_mask``. vLLM's modules are at the same places and get parts of the same names,
so that vLLM's own loaders fill them. A configuration without the note leaves vLLM's classes as they are.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.utils import extract_layer_index

from cupy_dma.torch import RetentionGate
from cupy_dma.torch.registration import wide
from cupy_dma.torch.scores import input_scores, layer_scores
from cupy_dma.transformers.converted import reads_input
from cupy_dma.transformers.layers import GATE, SCORES, DynamicMask, GateMask, dynamic_layers
from cupy_dma.vllm.attention import OPERATOR, DynamicMaskAttention

Scores = Callable[[Tensor, Tensor | None], Tensor]
STORAGE = {"int8_per_token_head": "int8", "fp8_per_token_head": "fp8"}  # of rows, by vLLM's kv_cache_dtype


class _DynamicMasked:
    """What this package adds to a model class of vLLM."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **options: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **options)  # type: ignore[call-arg]
        config = vllm_config.model_config.hf_text_config
        layers = dynamic_layers(config)
        if layers:
            _convert(self, layers, config, vllm_config)


class DynamicMaskLlamaForCausalLM(_DynamicMasked, LlamaForCausalLM):
    """Llama."""


class DynamicMaskMistralForCausalLM(_DynamicMasked, MistralForCausalLM):
    """Mistral."""


class DynamicMaskQwen2ForCausalLM(_DynamicMasked, Qwen2ForCausalLM):
    """Qwen 2 and 2.5."""


class DynamicMaskQwen3ForCausalLM(_DynamicMasked, Qwen3ForCausalLM):
    """Qwen 3."""


def _convert(model: Any, layers: dict[int, DynamicMask | GateMask], config: Any, vllm_config: VllmConfig) -> None:
    """Replace vLLM's ``Attention`` in all layers, before weights are loaded."""
    _check(vllm_config)
    found: dict[int, Any] = {extract_layer_index(module.attn.layer_name): module for module in model.modules()
                             if isinstance(getattr(module, "attn", None), Attention)}
    if found.keys() != layers.keys():
        raise NotImplementedError(f"vLLM serves models whose layers all have dynamic masks, got a model with layers "
                                  f"{sorted(found)}, of which {sorted(layers)} have one")
    for index, module in found.items():
        how, name = layers[index], module.attn.layer_name
        scores = _scores(module, how, config.hidden_size)
        module.attn = DynamicMaskAttention(name, module.num_heads, module.num_kv_heads, module.head_dim, module.scaling,
                                           how, scores, STORAGE.get(vllm_config.cache_config.cache_dtype))
        vllm_config.compilation_config.static_forward_context[name] = module.attn
        if reads_input(how):
            kind: Any = type(module)
            module.__class__ = _with_input(kind)
    splitting = vllm_config.compilation_config.splitting_ops
    if splitting and OPERATOR not in splitting:
        splitting.append(OPERATOR)


def _check(vllm_config: VllmConfig) -> None:
    """Raise NotImplementedError for what these layers do not support."""
    parallel, cache, kind = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.model_config.dtype
    sizes = {name: getattr(parallel, name) for name in (
        "tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size",
        "prefill_context_parallel_size")}
    wrong = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    if parallel.use_ubatching:
        wrong.append("microbatches (enable_dbo)")
    if vllm_config.speculative_config is not None:
        wrong.append("speculative decoding")
    if vllm_config.kv_transfer_config is not None:
        wrong.append("KV connectors and offloading (kv_transfer_config)")
    if cache.cache_dtype not in ("auto", str(kind).removeprefix("torch."), *STORAGE):
        wrong.append(f"kv_cache_dtype={cache.cache_dtype!r} (but {' and '.join(STORAGE)})")
    if wrong:
        raise NotImplementedError(f"models with dynamic masks do not support {', '.join(wrong)} in vLLM")


def _scores(module: Any, how: DynamicMask | GateMask, width: int) -> Scores:
    """Give an attention module the parts that compute scores or gates of its tokens. Returns how."""
    heads: int = module.num_kv_heads
    if isinstance(how, GateMask):
        gate = RetentionGate(width, heads, **how.gate, dtype=torch.float32).eval().requires_grad_(False)
        setattr(module, GATE, gate)
        return lambda value, x: gate.ranks(_given(x)[None])[0]
    if how.form == "none":
        return lambda value, x: value.new_zeros((heads, value.shape[0]), dtype=wide(value))
    if how.form == "input":
        project = nn.Linear(width, heads, bias=False, dtype=torch.float32).requires_grad_(False)
        setattr(module, SCORES, project)
        return lambda value, x: input_scores(_given(x)[None], project, heads, None)[0]
    module.A = nn.Parameter(torch.empty(heads), requires_grad=False)
    module.dt_proj = nn.Linear(heads * module.head_dim, heads, bias=False).requires_grad_(False)
    return lambda value, x: layer_scores(value, module.dt_proj, module.A, form=how.form)


def _given(x: Tensor | None) -> Tensor:
    if x is None:
        raise RuntimeError("the layer's input has not reached its attention")
    return x


@functools.cache
def _with_input(kind: type) -> type:
    """A subclass of an attention module's class whose attention gets the module's input as well."""
    def forward(self: Any, positions: Tensor, hidden_states: Tensor) -> Tensor:
        self.attn.x = hidden_states
        try:
            return kind.forward(self, positions, hidden_states)  # type: ignore[attr-defined]
        finally:
            self.attn.x = None

    return type(f"DynamicMask{kind.__name__}", (kind,), {"__module__": kind.__module__, "forward": forward})
