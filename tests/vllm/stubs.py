"""The parts of vLLM 0.32 that ``cupy_dma.vllm`` uses, for tests without vLLM.

``make test-vllm`` runs the same tests with vLLM itself.
"""
import enum
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn


@contextmanager
def installed() -> Iterator[None]:
    """Inside the context, modules of these names can be imported."""
    before = dict(sys.modules)
    for path, contents in {
            "vllm": [ModelRegistry], "vllm.config": [VllmConfig],
            "vllm.compilation.breakable_cudagraph": [eager_break_during_capture],
            "vllm.forward_context": [get_forward_context],
            "vllm.model_executor.layers.attention": [Attention],
            "vllm.model_executor.layers.attention_layer_base": [AttentionLayerBase],
            "vllm.model_executor.models.llama": [LlamaForCausalLM],
            "vllm.model_executor.models.mistral": [model_class("MistralForCausalLM")],
            "vllm.model_executor.models.qwen2": [model_class("Qwen2ForCausalLM")],
            "vllm.model_executor.models.qwen3": [model_class("Qwen3ForCausalLM")],
            "vllm.model_executor.models.utils": [extract_layer_index],
            "vllm.v1.attention.backend": [AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata],
            "vllm.v1.kv_cache_interface": [CircularBufferSpec, KVCacheSpec],
            "vllm.v1.kv_cache_layout": [KVCacheLayout]}.items():
        names = path.split(".")
        for end in range(1, len(names) + 1):
            sys.modules.setdefault(".".join(names[:end]), types.ModuleType(".".join(names[:end])))
        vars(sys.modules[path]).update({each.__name__: each for each in contents})
    yield
    for name in {name for name in sys.modules if name.partition(".")[0] == "vllm"} - set(before):
        del sys.modules[name]


class ModelRegistry:
    @staticmethod
    def register_model(name: str, where: str) -> None:
        raise NotImplementedError


class VllmConfig:
    pass


def get_forward_context() -> Any:
    raise NotImplementedError


def eager_break_during_capture(function: Any) -> Any:
    return function


# ---- KV cache specs, backends ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    block_size: int
    dcp_sharded: bool = True

    def copy_with_new_block_size(self, block_size: int) -> Any:
        return replace(self, block_size=block_size)


@dataclass(frozen=True, kw_only=True)
class CircularBufferSpec(KVCacheSpec):
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    num_head_slots: int
    state_content_bytes: int
    tokens_per_state: int
    prefix_cacheable = False
    uses_slot_mapping = False

    @property
    def page_size_bytes(self) -> int:
        return self.num_head_slots * (self.block_size // self.tokens_per_state) * self.state_content_bytes

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        return self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        return 1


class KVCacheLayout(enum.Enum):
    LBHNC = (0, 1, 2, 3, 4)


class AttentionBackend:
    pass


class AttentionMetadataBuilder:
    def __class_getitem__(cls, kind: Any) -> Any:
        return cls

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        pass


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor | None = None


# ---- models ---------------------------------------------------------------------------------------------------------


class AttentionLayerBase:
    pass


def extract_layer_index(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdigit())


class Attention(nn.Module):
    def __init__(self, layer_name: str) -> None:
        super().__init__()
        self.layer_name = layer_name


class LlamaAttention(nn.Module):
    """Passes the first elements of its input to its attention, so a test can see what arrives."""

    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scaling = self.head_dim ** -0.5
        self.attn = Attention(f"{prefix}.attn")

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        sizes = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        return self.attn(*(hidden_states[:, :heads * self.head_dim].contiguous() for heads in sizes))


class LlamaForCausalLM(nn.Module):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.model = nn.Module()
        self.model.layers = nn.ModuleList()
        for index in range(config.num_hidden_layers):
            layer = nn.Module()
            layer.self_attn = LlamaAttention(config, f"model.layers.{index}.self_attn")
            self.model.layers.append(layer)


def model_class(name: str) -> type:
    return type(name, (LlamaForCausalLM,), {})
