"""Self-attention with a dynamic mask: the attention of a transformer block, from ``x`` to ``x``.

    q, k, v = x Wq, x Wk, x Wv                     heads of head_dim
    q, k    = rotate(norm(q), p), rotate(norm(k), p)      both optional; p: position in the sequence
    out     = DynamicMaskAttention(q, k, v) Wo

The same parameters serve whole sequences, padded or packed, and decoding with a cache.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpointed

from cupy_dma import checks
from cupy_dma.arrays import Windows, is_exported
from cupy_dma.cache import DynamicCache
from cupy_dma.torch.module import DynamicMaskAttention
from cupy_dma.torch.options import Check, Layer, of_core, optional
from cupy_dma.torch.registration import cast, own_type
from cupy_dma.torch.rotary import Rotation
from cupy_dma.torch.tokens import Tokens

_NOT_RANDOM: set[type] = {nn.Linear, nn.RMSNorm, DynamicMaskAttention}


class DynamicMaskSelfAttention(Layer):
    """Causal multi-head self-attention in which every query sees the keys that the layer has learned to keep.

    Parameters
    ----------
    width : int
        Size of a token, in and out.
    heads, kv_heads : int
        ``H`` and ``Hkv``; ``H`` is a multiple of ``Hkv``, which is ``H`` by default.
    window : int
        Keys kept per query, the highest-scored ones.
    head_dim : int, optional
        ``D``, 1 to 256; default ``width // heads``.
    rope : float or None
        Base of the rotary positions; None for none.
    qk_norm : bool
        Normalise queries and keys, each head with RMSNorm, before they are rotated.
    sinks, recent : int
        First and last tokens that are kept too.
    scores, slope, bias_delay, form, dt_bias, A_init, scale, softcap, deterministic, backend
        As for ``DynamicMaskAttention``; ``scores="input"`` reads ``x``. All but ``scores`` and ``dt_bias``
        are, like ``window``, ``sinks`` and ``recent``, attributes of the core that may be changed later.
    bias : bool
        Whether the projections have biases.
    checkpoint : bool
        Recompute the layer in the backward pass instead of keeping its intermediate results (gradient checkpointing).
        An attribute that may be changed later.
    batch_first : bool
        ``x`` is ``(B, N, width)``, otherwise ``(N, B, width)``.
    process_group : ProcessGroup or one-dimensional DeviceMesh, optional
        The ranks of the group hold consecutive shards of each sequence, as for ``DynamicMaskAttention``. Also an
        attribute.
    device, dtype
        Of the parameters.

    Attributes
    ----------
    q_proj, k_proj, v_proj, o_proj : nn.Linear
    q_norm, k_norm : nn.RMSNorm or None
    attention : DynamicMaskAttention
        The core, with the parameters of the key scores.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or value.

    Notes
    -----
    The projections are named as those of Llama and Doge in ``transformers``. There is no dropout of attention weights.
    """

    CHECKS: ClassVar[dict[str, Check]] = {
        "rope": optional(checks.real), "checkpoint": checks.flag, "batch_first": checks.flag}
    FIXED = ("width", "heads", "kv_heads", "head_dim", "qk_norm", "bias", "dt_bias")

    def __init__(self, width: int, heads: int, kv_heads: int | None = None, window: Windows = 2048, *,
                 head_dim: int | None = None, rope: float | None = 10000.0, qk_norm: bool = False, sinks: int = 0,
                 recent: int = 0, bias_delay: int = 0, scores: str = "value", slope: float | Sequence[float] = 0.0,
                 form: str | None = None, dt_bias: bool = False, A_init: float = 0.0, scale: float | None = None,
                 softcap: float = 0.0, bias: bool = False, checkpoint: bool = False, batch_first: bool = True,
                 deterministic: bool = False, backend: str | None = None, process_group: Any = None,
                 device: torch.device | str | int | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        width, heads = checks.whole(width, "width", 1), checks.whole(heads, "heads", 1)
        kv_heads = heads if kv_heads is None else checks.whole(kv_heads, "kv_heads", 1)
        if heads % kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got heads={heads}, kv_heads={kv_heads}")
        if head_dim is None and width % heads:
            raise ValueError(f"width must be a multiple of heads where head_dim is not given, got width={width}, "
                             f"heads={heads}")
        head_dim = width // heads if head_dim is None else checks.whole(head_dim, "head_dim", 1)
        self._fix(width=width, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        self.rope, self.checkpoint, self.batch_first = rope, checkpoint, batch_first
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.attention = DynamicMaskAttention(
            self.kv_heads, self.head_dim, window, sinks=sinks, recent=recent, bias_delay=bias_delay, scores=scores,
            width=width if scores == "input" else None, slope=slope, dt_bias=dt_bias, A_init=A_init, form=form,
            scale=scale, softcap=softcap, deterministic=deterministic, backend=backend, process_group=process_group,
            **made)
        inner, outer = self.heads * self.head_dim, self.kv_heads * self.head_dim
        made["bias"] = checks.flag(bias, "bias")
        self.q_proj, self.k_proj = nn.Linear(width, inner, **made), nn.Linear(width, outer, **made)
        self.v_proj, self.o_proj = nn.Linear(width, outer, **made), nn.Linear(inner, width, **made)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.head_dim, eps=1e-6, device=device, dtype=dtype) if checks.flag(qk_norm, "qk_norm") else None
            for _ in range(2))

    window, sinks, recent, bias_delay, slope, form, A_init, scale, softcap, deterministic, backend = map(of_core, (
        "window", "sinks", "recent", "bias_delay", "slope", "form", "A_init", "scale", "softcap", "deterministic",
        "backend"))

    @property
    def process_group(self) -> Any:
        """The window of the core; None if another module has replaced it."""
        return getattr(self.attention, "process_group", None)

    @process_group.setter
    def process_group(self, group: Any) -> None:
        self.attention.process_group = group

    def check_together(self, name: str, value: Any) -> None:
        if name == "rope" and value is not None:
            if value <= 0:
                raise ValueError(f"rope must be a positive base, or None for no rotary positions, got {value}")
            if self.head_dim % 2:
                raise ValueError(f"rotary positions need an even head_dim, got head_dim={self.head_dim}; give another "
                                 f"or rope=None")

    def reset_parameters(self) -> None:
        """Initialise all parameters anew, as the constructor does."""
        for module in self.children():
            module.reset_parameters()

    def make_cache(self, batch: int, *, dtype: torch.dtype | None = None,
                   device: torch.device | str | int | None = None) -> DynamicCache:
        """An empty cache of ``batch`` sequences for ``forward(x, cache=...)``; arguments as for
        ``DynamicMaskAttention.make_cache``. Type and device are those of the projections; the parameters of the scores
        may have another type."""
        any_one = next(self.attention.parameters())
        (like,) = cast(any_one.new_empty(0, device=device, dtype=own_type(self.k_proj, any_one)))
        return self.attention.make_cache(batch, dtype=like.dtype if dtype is None else dtype, device=like.device)

    def forward(self, x: Tensor, *, padding: Tensor | None = None, cu_seqlens: Any = None,
                documents: Tensor | None = None, positions: Tensor | None = None,
                cache: DynamicCache | None = None) -> Tensor:
        """Self-attention of whole sequences or, with a cache, of the next tokens of sequences; with a
        ``process_group``, of this rank's shard of them.

        Parameters
        ----------
        x : Tensor ``(B, N, width)``, or ``(N, B, width)`` without ``batch_first``
            With ``cu_seqlens``: ``(total, width)``.
        padding : bool or 0/1 integer Tensor ``(B, N)``, optional
            True or 1 = a real token of ``x``; padding may be anywhere. Its output is 0, and its contents have no
            influence, not even a NaN. Positions count real tokens.
        cu_seqlens : int32 or int64 Tensor ``(B + 1,)``, or a list, optional
            Cumulative lengths of packed sequences, from 0 to ``total``; without a ``process_group``.
        documents : int Tensor ``(1|B, N)``, optional
            With a ``process_group``: ids of the shard's documents, as for
            ``cupy_dma.distributed.context_parallel_attention``.
        positions : int Tensor ``(N,)``, ``(B, N)`` or ``(total,)``, optional
            Where the tokens stand, for the rotary positions only; default: 0, 1, 2, ... in each sequence, with a cache
            from its length on. The selection goes by the order of tokens. With a ``process_group`` positions are
            counted through all shards, by a small all-gather; pass ``cupy_dma.distributed.shard_positions`` to do that
            once for all layers.
        cache : DynamicCache, optional
            Of ``make_cache``; the tokens of ``x`` are appended to it. Call under ``torch.no_grad()``. A
            ``process_group`` is not used here: after ``prefill`` each rank decodes by itself.

        Returns
        -------
        Tensor of ``x``'s shape

        Raises
        ------
        TypeError, ValueError
            An argument has the wrong type, shape or value, or does not fit the layer.
        NotImplementedError
            With a cache, something requires grad.
        """
        tokens = Tokens.of(x, self.width, self.batch_first, padding, cu_seqlens, positions, cache)
        if self.process_group is not None and cache is None:
            self._place(tokens, positions, documents)
        elif documents is not None:
            raise ValueError("documents need a process_group, got documents without one: pack the sequences and give "
                             "cu_seqlens")
        if self.checkpoint and cache is None and torch.is_grad_enabled() and not is_exported():
            # An adapter may contain dropout.
            random = any(type(module) not in _NOT_RANDOM for module in self.modules() if module is not self)
            out = checkpointed(self._attend, tokens.x, tokens, use_reentrant=False, preserve_rng_state=random)
        else:
            out = self._attend(tokens.x, tokens, cache)
        return tokens.restored(out)

    def prefill(self, x: Tensor, cache: DynamicCache, *, padding: Tensor | None = None,
                positions: Tensor | None = None) -> Tensor:
        """Self-attention of a prompt whose shards are on the ranks of ``process_group``; fills a cache with the whole
        prompt on each rank, as ``DynamicMaskAttention.prefill``. Arguments and errors as for ``forward``."""
        if self.process_group is None:
            raise ValueError("prefill needs a process_group, got None: without one forward(x, cache=...) takes the "
                             "whole prompt")
        tokens = Tokens.of(x, self.width, self.batch_first, padding, None, positions, None)
        self._place(tokens, positions, None)
        with torch.no_grad():
            return tokens.restored(self._attend(tokens.x, tokens, cache, prefill=True))

    def _place(self, tokens: Tokens, positions: Tensor | None, documents: Tensor | None) -> None:
        """The positions of a shard's tokens."""
        tokens.documents = documents
        if positions is None and self.rope is not None and tokens.cu_seqlens is None:
            tokens.positions = self.attention._shard_positions(
                tokens.x.shape[1], self.process_group, padding=tokens.padding, documents=documents,
                device=tokens.x.device)

    def _attend(self, x: Tensor, tokens: Tokens, cache: DynamicCache | None = None, prefill: bool = False) -> Tensor:
        query, key = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj))
        value = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = (norm(x.to(own_type(norm, x))).to(value.dtype)  # torch's norm is slow for mixed types
                          for norm, x in ((self.q_norm, query), (self.k_norm, key)))
        if self.rope is not None:
            rotate = Rotation.at(tokens.positions, self.head_dim, self.rope)
            query, key = rotate(query), rotate(key)
        source = {} if getattr(self.attention, "width", None) is None else {"x": x}
        if cache is None:
            out = self.attention(query, key, value, padding=tokens.padding, cu_seqlens=tokens.cu_seqlens,
                                 documents=tokens.documents, **source)
        elif prefill:
            out = self.attention.prefill(cache, query, key, value, padding=tokens.padding, **source)
        else:
            out = self.attention.extend(cache, query, key, value, lengths=tokens.lengths,
                                        cu_seqlens=tokens.cu_seqlens, **source)
        return self.o_proj(out.flatten(-2))

    def extra_repr(self) -> str:
        names = ("width", "heads", "kv_heads", "head_dim", "rope", "checkpoint", "batch_first")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
