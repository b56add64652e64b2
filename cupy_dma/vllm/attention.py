"""The attention of a layer with a dynamic mask inside vLLM, whose block is the cache of one request.

    spec       vLLM allocates N blocks for every layer, each of the bytes of one sequence's cache (``storage.py``), and
               gives a request one of them for its whole life. Block 0 is nobody's
    backend    the batch of a step: which block each request has, which requests begin, where their tokens are
    layer      computes scores or gates, and appends the step's tokens to its cache, whose batch is the blocks

vLLM's batches are packed: any number of prompts, pieces of prompts and single tokens, one after the other. Preempted
requests begin again. The operator is opaque to ``torch.compile``, and vLLM runs it between its CUDA graphs.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from cupy_dma.torch.registration import register
from cupy_dma.transformers.layers import DynamicMask, GateMask
from cupy_dma.vllm.storage import Cache, page_bytes, placed, single

OPERATOR = "cupy_dma::vllm_attention"


# ---- what vLLM knows of the cache -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RequestCacheSpec(CircularBufferSpec):
    """A block is the cache of one request: one block a request for its life, no slot mapping, no prefix caching, as
    vLLM's own manager of circular buffers has it."""

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Layers may have caches of different sizes: all have the same blocks."""
        return all(isinstance(spec, RequestCacheSpec) for spec in kv_cache_specs.values())


@dataclass
class Batch:
    """The requests of a step."""

    slots: Tensor  # (n,) int32: their blocks, -1: none
    fresh: Tensor | None  # (n,) int32: the same where a request begins, -1 elsewhere; None: none begins
    cu_seqlens: Tensor  # (n + 1,) int32
    tokens: int  # of all requests, padding included
    is_step: bool  # every request has one token


class BatchBuilder(AttentionMetadataBuilder[Batch]):
    """Makes a ``Batch`` of what vLLM's model runner says of a step."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig,
                 device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata,
              fast_build: bool = False) -> Batch:
        """Nothing is read on the host but what the host has."""
        common = common_attn_metadata
        n, bounds, on_host = common.num_reqs, common.query_start_loc, common.query_start_loc_cpu
        block = common.block_table_tensor[:n, 0]
        slots = torch.where(block > 0, block, -1).int()  # block 0 stands for padding
        count, most = on_host[1:n + 1] - on_host[:n], common.seq_lens_cpu_upper_bound
        fresh = None
        if most is None or bool(((most[:n] <= count) & (count > 0)).any()):
            begins = (common.seq_lens[:n] <= bounds[1:n + 1] - bounds[:n]) & (bounds[1:n + 1] > bounds[:n])
            fresh = torch.where(begins, slots, -1).int()
        is_step = common.num_actual_tokens == n and bool((count[:-1] >= count[1:]).all()) and bool((count <= 1).all())
        return Batch(slots, fresh, bounds[:n + 1], common.num_actual_tokens, is_step)


class Backend(AttentionBackend):
    """Only layers of this file use it, so vLLM never chooses it."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        """Its name in messages."""
        return "CUPY_DMA"

    @staticmethod
    def get_impl_cls() -> Any:
        """The layer attends itself."""
        raise NotImplementedError("layers with dynamic masks have no attention implementation of vLLM")

    @staticmethod
    def get_builder_cls() -> type[BatchBuilder]:
        """What makes a ``Batch``."""
        return BatchBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Those in which all blocks of a layer lie together."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """Blocks cannot be copied one by one."""
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """The host's lengths must be those of the batch."""
        return False


# ---- the layer ------------------------------------------------------------------------------------------------------


class DynamicMaskAttention(nn.Module, AttentionLayerBase):
    """In place of vLLM's ``Attention`` in a layer with a dynamic mask.

    Parameters
    ----------
    prefix : str
        The layer's name in vLLM.
    heads, kv_heads, head_dim : int
    scale : float
        Of the logits.
    how
        The layer's selection.
    scores : callable
        ``(value (n, Hkv, D), x) -> (Hkv, n)``: scores or gates of tokens; ``x (n, width)`` is the input of the layer's
        attention module, or None.
    storage : "int8" or "fp8", optional
        Of the rows in the cache.

    Raises
    ------
    TypeError, ValueError
        As ``storage.single`` does.
    """

    supports_dcp = False

    def __init__(self, prefix: str, heads: int, kv_heads: int, head_dim: int, scale: float,
                 how: DynamicMask | GateMask, scores: Callable[[Tensor, Tensor | None], Tensor],
                 storage: str | None = None) -> None:
        super().__init__()
        self.layer_name, self.num_heads, self.num_kv_heads, self.head_size = prefix, heads, kv_heads, head_dim
        self.how, self.scores, self.storage = how, scores, storage
        self.x: Tensor | None = None  # of the current call, where ``scores`` reads it
        self.cache: Cache | None = None
        self.kv_cache = torch.tensor([])
        self._single(torch.empty(0, dtype=torch.float32, device="cpu"))  # which checks sizes
        self.settings: dict[str, Any] = {"scale": scale}
        if isinstance(how, GateMask):
            self.settings["add_gates"] = False

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``(n, heads * head_dim)`` of ``query (n, heads * head_dim)`` and ``key, value (n, kv_heads * head_dim)``."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        torch.ops.cupy_dma.vllm_attention(query, key, value, self.x, out, self.layer_name)
        return out

    def attend(self, query: Tensor, key: Tensor, value: Tensor, x: Tensor | None, out: Tensor, batch: Batch) -> None:
        """Append the tokens of a batch, and write what they see to ``out``. Shapes as for ``forward``."""
        cache = self.cache
        if cache is None:
            raise RuntimeError(f"{self.layer_name} has no cache: vLLM has not allocated it")
        requests = min(len(batch.slots), cache.batch)  # what is beyond is padding
        slots, n = batch.slots[:requests], requests if batch.is_step else batch.tokens
        q, o = (t[:n].view(n, self.num_heads, self.head_size) for t in (query, out))
        k, v = (t[:n].view(n, self.num_kv_heads, self.head_size) for t in (key, value))
        scores = self.scores(v, None if x is None else x[:n])
        if batch.fresh is not None:
            cache.reset(batch.fresh[:requests])
        if batch.is_step:
            cache.extend(q[:, None], k[:, None], v[:, None], scores.mT[..., None], slots=slots, out=o[:, None],
                         **self.settings)
        else:
            cache.extend(q, k, v, scores, slots=slots, cu_seqlens=batch.cu_seqlens[:requests + 1], tail_padding=True,
                         out=o, **self.settings)
        out[n:] = 0

    # ---- for vLLM ---------------------------------------------------------------------------------------------------

    def get_attn_backend(self) -> type[AttentionBackend]:
        """See ``Backend``."""
        return Backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """A block of the bytes of one sequence's cache."""
        dtype, length = vllm_config.model_config.dtype, vllm_config.model_config.max_model_len
        page = page_bytes(self._single(torch.empty(0, dtype=dtype, device="cpu")))
        return RequestCacheSpec(block_size=length, tokens_per_state=length, num_kv_heads=self.num_kv_heads,
                                head_size=self.head_size, dtype=dtype, num_head_slots=1, state_content_bytes=page,
                                dcp_sharded=False)

    @property
    def kv_cache(self) -> Tensor:
        """vLLM's memory for this layer: contiguous blocks. vLLM sets it, and an empty tensor to release it."""
        return self._memory

    @kv_cache.setter
    def kv_cache(self, memory: Tensor) -> None:
        self.cache = placed(self._single(memory), memory.view(-1).view(torch.int8)) if memory.numel() else None
        self._memory = memory

    def _single(self, like: Tensor) -> Cache:
        return single(self.how, self.num_kv_heads, self.head_size, like, self.storage)


@eager_break_during_capture  # vLLM's other way to run an operator between its CUDA graphs
def _attention(query: Tensor, key: Tensor, value: Tensor, x: Tensor | None, out: Tensor, layer_name: str) -> None:
    context = get_forward_context()
    if context.attn_metadata is None:  # vLLM measures memory
        out.zero_()
        return
    layer: Any = context.no_compile_layers[layer_name]
    layer.attend(query, key, value, x, out, context.attn_metadata[layer_name])


register("vllm_attention(Tensor query, Tensor key, Tensor value, Tensor? x, Tensor(a!) out, str layer_name) -> ()",
         _attention, lambda *_: None)
