"""Dynamic mask attention as a layer that learns its key scores."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from cupy_dma import checks, distributed
from cupy_dma.arrays import Windows
from cupy_dma.cache import DynamicCache
from cupy_dma.calls.scores import FORMS, check_option, width_of
from cupy_dma.torch.attention import attention
from cupy_dma.torch.dynamic import dynamic_mask_attention
from cupy_dma.torch.kept import kept_keys
from cupy_dma.torch.options import Check, at_least, backend_name, one_of, optional
from cupy_dma.torch.registration import cast
from cupy_dma.torch.scored import ScoredLayer, slope_of
from cupy_dma.torch.varlen import varlen_attention, varlen_dynamic_mask_attention


class DynamicMaskAttention(ScoredLayer):
    """``dynamic_mask_attention`` with the parameters of the key scores, for training and for decoding.

    ``DynamicMaskSelfAttention`` adds the projections and rotary positions around it.

    Parameters
    ----------
    kv_heads, head_dim : int
        ``Hkv`` and ``D`` of the keys and values; ``D`` is 1 to 256.
    window : int, or one int per kv head
        Keys kept per query, the highest-scored ones.
    sinks, recent : int
        First and last tokens of each sequence that are kept too, as in ``DynamicCache``. They need ``keys="prefix"``.
    bias_delay : int
        Distance in positions from which on a key's score is added to the logits, as in ``cupy_dma.attention``; the
        selection is not delayed.
    scores : ``"value"`` or ``"input"``
        What the scores are computed from: the keys' values, or the layer's input ``x``, from which they predict better
        what a pretrained model will need. Scores of the input are ``score_proj(x)``.
    width : int, optional
        Size of a token of ``x``, with ``scores="input"``.
    slope : float, or one per kv head
        Added to a key's score for each position in its sequence, so that newer keys rank higher. In the logits it is
        ALiBi's slope; with ``bias_delay=2**30`` scores select only.
    dt_bias : bool
        Also learn an offset per kv head.
    A_init : float
        Initial value of all of ``A``.
    form : optional
        As for ``cupy_dma.key_scores``; default ``"exp"``. With ``scores="input"`` only ``"linear"``, the default.
    keys, causal, scale, softcap, deterministic, backend
        As for ``cupy_dma.dynamic_mask_attention``. These, ``window``, ``sinks``, ``recent``, ``bias_delay`` and
        ``slope`` are attributes that may be changed later.
    process_group : ProcessGroup or one-dimensional DeviceMesh, optional
        Context parallelism: the ranks of the group hold consecutive shards of each sequence, see
        ``cupy_dma.distributed``. It needs ``keys="prefix"``. An attribute that may be changed later; it is neither
        saved nor copied with the parameters.
    device, dtype
        Of the parameters.

    Attributes
    ----------
    A : Parameter ``(Hkv,)``
        Zeros by default, as in the original (Hugging Face Doge), which also gives the names: at first all scores are
        equal, every query sees the last ``window`` keys, and only ``A`` gets a gradient until it becomes nonzero. If
        it crosses 0 in training, the order of all keys is reversed. With ``A_init=1.0`` ``dt_proj`` decides the
        selection from the first step on.
    dt_proj : nn.Linear
        ``Hkv * D -> Hkv``, initialised by ``nn.Linear``. It may be replaced or wrapped (LoRA, quantization, offloading)
        and have hooks; then the layer calls it. Of a plain ``nn.Linear`` the kernels read weight and bias directly.
    score_proj : nn.Linear
        With ``scores="input"`` instead of these two: ``width -> Hkv``, zeros, so that every query sees the last
        ``window`` keys at first; it learns from the first step on. A plain ``nn.Linear`` is computed in float32.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or value.

    Warns
    -----
    UserWarning
        In the first training pass, if ``A`` is frozen at 0 (``requires_grad=False``) while ``dt_proj`` is trained:
        ``dt_proj`` gets no gradient, and the layer stays a sliding window. If that is intended, freeze both. The check
        waits for the GPU once; it is skipped under ``torch.compile``.
    """

    CHECKS: ClassVar[dict[str, Check]] = {
        "sinks": at_least(0), "recent": at_least(0), "bias_delay": lambda value, name: checks.delay(value),
        "slope": slope_of,
        "form": one_of(FORMS), "keys": one_of(("prefix", "global")), "causal": checks.flag,
        "scale": optional(checks.real), "softcap": lambda value, name: checks.real(value, name, 0.0),
        "deterministic": checks.flag, "backend": backend_name, "A_init": checks.real}
    FIXED = ("kv_heads", "head_dim", "dt_bias", "width")

    def __init__(self, kv_heads: int, head_dim: int, window: Windows, *, sinks: int = 0, recent: int = 0,
                 bias_delay: int = 0, scores: str = "value", width: int | None = None,
                 slope: float | Sequence[float] = 0.0, dt_bias: bool = False, A_init: float = 0.0,
                 form: str | None = None, keys: str = "prefix", causal: bool = True, scale: float | None = None,
                 softcap: float = 0.0, deterministic: bool = False, backend: str | None = None,
                 process_group: Any = None, device: torch.device | str | int | None = None,
                 dtype: torch.dtype | None = None):
        super().__init__()
        self._fix(kv_heads=checks.whole(kv_heads, "kv_heads", 1), head_dim=checks.whole(head_dim, "head_dim", 1),
                  width=width_of(scores, width))
        if self.head_dim > 256:
            raise ValueError(f"head_dim must be 1 to 256, got {head_dim}")
        self.form = ("exp" if self.width is None else "linear") if form is None else form
        self.window, self.keys, self.causal, self.sinks, self.recent = window, keys, causal, sinks, recent
        self.scale, self.softcap, self.deterministic, self.backend = scale, softcap, deterministic, backend
        self.bias_delay, self.slope, self.process_group = bias_delay, slope, process_group
        self._make_parameters(A_init, dt_bias, device, dtype)

    def check_together(self, name: str, value: Any) -> None:
        keys, causal, sinks, recent = (
            value if option == name else self.__dict__.get(option, default)
            for option, default in (("keys", "prefix"), ("causal", True), ("sinks", 0), ("recent", 0)))
        check_option(self.width, name, value)
        if name == "slope" and isinstance(value, tuple) and len(value) != self.kv_heads:
            raise ValueError(f"slope must be a number, or one for each of {self.kv_heads} kv heads, got {len(value)}")
        if keys == "prefix" and not causal:
            raise ValueError("causal=False needs keys='global', got keys='prefix', which is causal by construction")
        if keys == "global" and (sinks or recent):
            raise ValueError(f"sinks and recent need keys='prefix', got sinks={sinks}, recent={recent} and "
                             f"keys='global'")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, x: Tensor | None = None,
                padding: Tensor | None = None, documents: Tensor | None = None,
                cu_seqlens: Tensor | None = None, return_lse: bool = False,
                cache: DynamicCache | None = None, lengths: Tensor | None = None, out: Any = None) -> Any:
        """Attention of whole sequences, or of tokens appended to a cache.

        Parameters
        ----------
        query : Tensor ``(B, Lq, H, D)``
            ``H`` is a multiple of the layer's ``kv_heads``.
        key, value : Tensor ``(B, Lk, Hkv, D)``
        x : Tensor ``(B, Lk, width)``
            What the keys and values were projected from; with ``scores="input"`` only.
        padding, documents
            As for ``IntervalMask.top_w``.
        cu_seqlens : int32 or int64 Tensor ``(B + 1,)``, optional
            Cumulative lengths of packed sequences: ``query (total, H, D)``, ``key`` and ``value (total, Hkv, D)``,
            ``x (total, width)``.
            With a ``process_group`` give the shard's ``documents`` instead.
        return_lse
            Return ``(out, lse)``.
        cache, lengths, out
            As for ``extend``, which passes them here so that hooks on the layer also run during decoding.

        Returns
        -------
        out : Tensor of query's shape
        lse : float32 Tensor ``(B, H, Lq)``, or ``(H, total)``, natural log (float64 for float64)

        Raises
        ------
        TypeError, ValueError
            A tensor does not fit the layer, or as for ``dynamic_mask_attention``.
        """
        if cache is not None:
            if padding is not None or documents is not None:
                raise ValueError("with a cache give lengths or cu_seqlens, not padding or documents")
            return self._extend(cache, query, key, value, x, lengths=lengths, cu_seqlens=cu_seqlens,
                                return_lse=return_lse, out=out)
        if lengths is not None or out is not None:
            raise ValueError("lengths and out need a cache, got cache=None")
        packed = cu_seqlens is not None
        if packed and (padding is not None or documents is not None):
            raise ValueError("cu_seqlens already separates the packed sequences: give no padding and no documents with "
                             "it")
        source = self._checked(query, key, value, x, packed)
        if self.width is None and not self.A.requires_grad and not self._looked_at_A:
            self._warn_of_no_gradient()
        options: dict[str, Any] = {"bias_delay": self.bias_delay, "scale": self.scale, "softcap": self.softcap,
                                   "deterministic": self.deterministic, "return_lse": return_lse,
                                   "backend": self.backend}
        if self._group is not None:
            return self._sharded(query, key, value, source, packed, padding=padding, documents=documents, **options)
        places = self._places(source, cu_seqlens, padding, documents)
        if self.sinks or self.recent:
            scores = self._scores(source, padding, places)
            mask = kept_keys(scores[None] if packed else scores, self.window, self.sinks, self.recent, padding,
                             cu_seqlens if packed else documents, self.backend)
            if packed:
                return varlen_attention(query, key, value, cu_seqlens, cu_seqlens, mask=mask, bias=scores, **options)
            return attention(query, key, value, mask=mask, bias=scores, **options)
        options.update(window=self.window, keys=self.keys, causal=self.causal)
        given = self._score_arguments(source, padding, places)
        if packed:
            return varlen_dynamic_mask_attention(query, key, value, cu_seqlens, cu_seqlens, **given, **options)
        return dynamic_mask_attention(query, key, value, padding=padding, documents=documents, **given, **options)

    @property
    def process_group(self) -> Any:
        """The ranks that hold shards of each sequence, or None."""
        return self._group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        self._group = group
        # Imported here, where nothing is traced: these functions are graph breaks, and importing what makes them so
        # takes seconds that only users of a group should pay.
        self._over_shards: Any = None if group is None else distributed.context_parallel_attention
        self._shard_positions: Any = None if group is None else distributed.shard_positions

    def _sharded(self, query: Tensor, key: Tensor, value: Tensor, source: Tensor, packed: bool, **options: Any) -> Any:
        if packed:
            raise ValueError("cu_seqlens must be None with a process_group, because shards cut through sequences: give "
                             "the shard's ids as documents, see cupy_dma.distributed.document_ids")
        if self.keys != "prefix":
            raise ValueError(f"a process_group needs keys='prefix', got keys={self.keys!r}, which selects by the "
                             f"scores of later keys")
        places = self._shard_places(source, options["padding"], options["documents"])
        given = self._score_arguments(source, options["padding"], places)
        return self._over_shards(query, key, value, window=self.window, sinks=self.sinks, recent=self.recent,
                                 group=self.process_group, **given, **options)

    def _shard_places(self, source: Tensor, padding: Tensor | None, documents: Tensor | None = None) -> Tensor | None:
        if not self.slope:
            return None
        return self._shard_positions(source.shape[1], self.process_group, padding=None if padding is None else
                                     padding != 0, documents=documents, device=source.device)

    # ---- decoding ---------------------------------------------------------------------------------------------------

    def make_cache(self, batch: int, *, dtype: torch.dtype | None = None,
                   device: torch.device | str | int | None = None, storage: str | None = None) -> DynamicCache:
        """An empty cache of ``batch`` sequences for ``extend``, with the layer's sizes and options.

        Parameters
        ----------
        batch : int
        dtype
            Type of queries, keys and values; default: under autocast its type, otherwise that of the parameters.
        device
            Default: that of the parameters.
        storage : "int8" or "fp8", optional
            Keep rows in 8 bits per number, as for ``cupy_dma.DynamicCache``.

        Raises
        ------
        ValueError
            The layer was made with ``keys="global"``, which selects by the scores of later keys.
        """
        if self.keys == "global":
            raise ValueError("a layer with keys='global' cannot decode: it selects by the scores of later keys")
        like = next(self.parameters()).new_empty(0, device=device)
        kind = cast(like)[0].dtype if dtype is None else dtype
        return DynamicCache(batch, self.kv_heads, self.window, self.head_dim, dtype=kind, like=like, sinks=self.sinks,
                            recent=self.recent, storage=storage, backend=self.backend)

    def extend(self, cache: DynamicCache, query: Tensor, key: Tensor, value: Tensor, *, x: Tensor | None = None,
               lengths: Tensor | None = None, cu_seqlens: Tensor | None = None, return_lse: bool = False,
               out: Any = None) -> Any:
        """Append tokens to a cache and attend from them: a prompt, a chunk of one, or one new token.

        The result equals the last rows of ``forward`` over all tokens so far. Call under ``torch.no_grad()``.

        Parameters
        ----------
        cache
            Of ``make_cache``.
        query : Tensor ``(B, L, H, D)`` of the cache's type
        key, value : Tensor ``(B, L, Hkv, D)``
        x : Tensor ``(B, L, width)``
            As for ``forward``.
        lengths, cu_seqlens, return_lse, out
            As for ``DynamicCache.extend``.

        Returns
        -------
        As ``DynamicCache.extend``.

        Raises
        ------
        TypeError, ValueError
            A tensor or the cache does not fit the layer, or as for ``DynamicCache.extend``.
        NotImplementedError
            Something requires grad: a cache carries no gradient.
        """
        self._check_cache(cache)
        return self(query, key, value, x=x, cache=cache, lengths=lengths, cu_seqlens=cu_seqlens,
                    return_lse=return_lse, out=out)

    def _extend(self, cache: Any, query: Tensor, key: Tensor, value: Tensor, x: Tensor | None, *,
                cu_seqlens: Tensor | None, **options: Any) -> Any:
        self._check_cache(cache)
        source = self._checked(query, key, value, x, cu_seqlens is not None)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, *self.parameters())):
            raise NotImplementedError("a cache carries no gradient, but the layer's parameters or inputs require grad: "
                                      "call under torch.no_grad()")
        query, key, value = cast(query, key, value)
        source = value if x is None else source
        scores = self._scores(source, None, self._places(source, cu_seqlens, cache=cache))
        return cache.extend(query, key, value, scores, bias_delay=self.bias_delay, scale=self.scale,
                            softcap=self.softcap, cu_seqlens=cu_seqlens, **options)

    @torch.no_grad()
    def prefill(self, cache: DynamicCache, query: Tensor, key: Tensor, value: Tensor, *, x: Tensor | None = None,
                padding: Tensor | None = None) -> Tensor:
        """Attention of a prompt whose shards are on the ranks of ``process_group``; fills a cache with all of it.

        Every rank gets the rows of its own queries and the same cache, which replaces the contents of ``cache``; then
        ``extend`` decodes on each rank by itself.

        Parameters
        ----------
        cache
            Of ``make_cache``.
        query, key, value, x, padding
            The shard, as for ``forward``.

        Returns
        -------
        As ``forward``.

        Raises
        ------
        TypeError, ValueError, RankError
            As for ``forward`` and ``cupy_dma.distributed.fill_cache``; or there is no ``process_group``.
        """
        self._check_cache(cache)
        if self.process_group is None:
            raise ValueError("prefill needs a process_group, got None: without one extend takes the whole prompt")
        query, key, value = cast(query, key, value)
        out = self(query, key, value, x=x, padding=padding)
        source = value if x is None else x
        scores = self._scores(source, None, self._shard_places(source, padding))
        distributed.fill_cache(cache, key, value, scores, self.process_group, padding=padding)
        return out

    # ---- checks -----------------------------------------------------------------------------------------------------

    def _check_cache(self, cache: Any) -> None:
        if not isinstance(cache, DynamicCache):
            raise TypeError(f"cache must be a DynamicCache, as make_cache makes it, got {type(cache).__name__}")
        for name in ("kv_heads", "head_dim", "window", "sinks", "recent"):
            if getattr(cache, name) != getattr(self, name):
                raise ValueError(f"cache must have the layer's {name}={getattr(self, name)}, got "
                                 f"{name}={getattr(cache, name)}: make it with the layer's make_cache")

    def extra_repr(self) -> str:
        names = ("kv_heads", "head_dim", "window", "sinks", "recent", "bias_delay", "slope", "width", "A_init",
                 "form", "keys", "causal", "scale", "softcap", "deterministic", "backend")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) is not None)
