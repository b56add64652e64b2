"""A cache of constant size for models of transformers whose layers have dynamic masks.

A key that has dropped out of a layer's kept set never returns, so the layer stores ``window + sinks + recent`` rows per
kv head however long the text gets (``cupy_dma.DynamicCache``), and generates what it would with all keys stored.

The protocol of transformers, in which a layer calls ``cache.update(key, value)`` and gets all keys to attend to, has no
place for queries and scores. So ``update`` of such a layer hands back the new keys alone, and the layer's attention
(``cupy_dma.transformers.attention``) appends them with their scores and attends in one step. An attention that does not
is found out by the next ``update``.
"""
from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.cache_utils import DynamicCache as FullCache

from cupy_dma.cache import DynamicCache
from cupy_dma.torch.tokens import real_first, taken
from cupy_dma.transformers.layers import DynamicMask, dynamic_layers


class _Chunk(NamedTuple):
    """Tokens of one call."""

    key: Tensor  # (B, L, Hkv, D); with padding, real tokens first in each row
    value: Tensor
    scores: Tensor  # (B, Hkv, L)
    real: Tensor | None  # bool (B, L): which are, in their own order; None: all


class DynamicMaskLayer(CacheLayerMixin):
    """The tokens of one layer with a dynamic mask. Its parts are created by its first call."""

    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.store: DynamicCache | None = None
        self.record_past = False
        self._length = 0  # tokens so far, padding included, as transformers counts
        self._unattended = False
        self._padded = False  # whether there has been padding
        self._before: DynamicCache | None = None  # while the past is recorded: the store when that began
        self._since: list[_Chunk] = []  # and what has been appended to it

    # ---- tokens -----------------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device, self.batch_size, self.is_initialized = key_states.device, key_states.shape[0], True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Announce new tokens ``(B, Hkv, L, D)``, which the layer's attention then appends. Returns them."""
        if self._unattended:
            raise RuntimeError("the tokens of the last call never reached the cache: a DynamicMaskCache needs "
                               "attn_implementation='cupy_dma'; model.set_attn_implementation('cupy_dma') chooses it")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._unattended = True
        self._length += key_states.shape[2]
        return key_states, value_states

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor, how: DynamicMask,
               real: Tensor | None, settings: dict[str, Any]) -> Tensor:
        """Append the tokens announced last and attend from them.

        Parameters
        ----------
        query : Tensor ``(B, L, H, D)``
        key, value : Tensor ``(B, L, Hkv, D)``
        scores : Tensor ``(B, Hkv, L)``
        how
            The layer's selection.
        real : bool Tensor ``(B, L)``, optional
            False: padding, which is not stored, and whose output is 0.
        settings
            ``scale`` and ``softcap`` of the attention.

        Returns
        -------
        Tensor ``(B, L, H, D)``
        """
        if self.store is None:
            self.store = DynamicCache(key.shape[0], key.shape[2], how.window, key.shape[3], value.shape[3], like=key,
                                      sinks=how.sinks, recent=how.recent)
        lengths = place = None
        if real is not None:
            lengths, self._padded = real.sum(1), True
            if real.shape[1] > 1:
                order = real_first(real)
                query, key, value = (taken(x, order) for x in (query, key, value))
                scores, place = taken(scores.transpose(1, 2), order).transpose(1, 2).contiguous(), order.argsort(1)
        if self.record_past:
            self._before = self.store.clone() if self._before is None else self._before
            self._since.append(_Chunk(key, value, scores, real))
        out = self.store.extend(query, key, value, scores, lengths=lengths, **settings)
        self._unattended = False
        return out if place is None else taken(out, place)

    def advance(self, tokens: int) -> None:
        """Count tokens that have been appended, or taken back, without ``update``: by a CUDA graph."""
        self._length += tokens

    # ---- sizes, as transformers asks for them -----------------------------------------------------------------------

    def get_seq_length(self) -> int:
        """Tokens so far, padding included."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask is about: all so far, as for a full cache."""
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1

    # ---- whole sequences --------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Remove all tokens."""
        self._length, self._unattended, self._padded = 0, False, False
        self._forget_past()
        if self.store is not None:
            self.store.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row ``b`` by the former row ``beam_idx[b]``: a step of beam search."""
        self._forget_past()
        if self.store is not None:
            self.store.reorder(beam_idx.to(self.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times."""
        if self.store is not None:
            self.batch_select_indices(torch.arange(self.store.batch, device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``."""
        self._forget_past()
        if self.store is not None:
            indices = torch.arange(self.store.batch, device=self.device)[indices.to(self.device)]  # also of a bool mask
            self.store, self.batch_size = self.store.select_batch(indices), len(indices)

    def activate_past_recording(self) -> None:
        """Remember from now on what ``crop`` needs, until the next ``crop``."""
        self.record_past = True

    @property
    def is_croppable(self) -> bool:
        """Whether ``crop`` is exact: the past is recorded, or no key has been dropped yet and none was padding."""
        return self.record_past or self._keeps_all

    @property
    def _keeps_all(self) -> bool:
        return self.store is None or self._length <= self.store.window and not self._padded

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row (a number of at most 0, as in transformers).

        Raises
        ------
        ValueError
            The number is positive, or there are not so many tokens.
        RuntimeError
            Keys have been dropped that the remaining tokens would see. ``activate_past_recording`` before the call
            that adds the tokens makes this possible for all tokens added since the last ``crop``.
        """
        removed = -int(tokens_to_remove)
        if not 0 <= removed <= self._length:
            raise ValueError(f"crop takes minus the number of tokens to remove, of {self._length} that there are, got "
                             f"{tokens_to_remove}")
        if removed and self.store is not None:
            if self._before is not None and removed <= sum(chunk.key.shape[1] for chunk in self._since):
                self._replay(removed)
            elif self._keeps_all:
                self._keep_first(removed)
            else:
                raise RuntimeError(f"{removed} of {self._length} tokens cannot be removed: the cache keeps "
                                   f"{self.store.window} keys and no padding, and what is left may need keys that have "
                                   f"been dropped; call activate_past_recording() before tokens are added")
        self._length -= removed
        self._forget_past()

    def _forget_past(self) -> None:
        self._before, self._since = None, []

    def _replay(self, removed: int) -> None:
        """The store of before, and on it all but the last ``removed`` tokens since."""
        assert self._before is not None
        self.store = self._before
        left = sum(chunk.key.shape[1] for chunk in self._since) - removed
        for key, value, scores, real in self._since:
            n = min(left, key.shape[1])
            if n > 0:
                self.store.update(key[:, :n], value[:, :n], scores[:, :, :n],
                                  lengths=None if real is None else real[:, :n].sum(1))
            left -= n

    def _keep_first(self, removed: int) -> None:
        """A store that has kept every token, without the last ``removed``."""
        assert self.store is not None
        saved = self.store.state_dict()
        where = saved["positions"]  # (B, Hkv, R): -1 where there is none
        order = torch.where(where < 0, torch.iinfo(where.dtype).max, where).argsort(-1)[..., :self._length]
        rows = order.transpose(1, 2)[..., None]  # (B, L, Hkv, 1)
        key, value = (saved[name].transpose(1, 2).gather(1, rows.expand(-1, -1, -1, saved[name].shape[-1]))
                      for name in ("key", "value"))
        scores = saved["scores"].gather(-1, order)
        lengths = (self.store.length - removed).clamp(min=0)
        self.store.reset()
        self.store.update(key, value, scores, lengths=lengths)

    # ---- offloading -------------------------------------------------------------------------------------------------

    def offload(self) -> None:
        """Nothing: these few rows stay on the device."""

    def prefetch(self) -> None:
        """Nothing."""


class DynamicMaskCache(Cache):
    """A cache for ``generate`` and ``forward`` that keeps only what dynamic masks can still show.

    Layers without a dynamic mask (``convert`` with ``layers=``) get the layers of transformers' ``DynamicCache``.
    ``generate`` makes one by itself for Doge and converted models; make one to go on with it in another call::

        cache = DynamicMaskCache(model.config)
        model.generate(**first, cache=cache)            # past_key_values=cache up to transformers 5.19
        model.generate(**more, cache=cache)

    Parameters
    ----------
    config
        The configuration of a Doge or converted model.

    Raises
    ------
    ValueError
        The configuration has no layer with a dynamic mask, or its layers are sliding windows, too.

    Notes
    -----
    Greedy search, sampling, beam search, batches with padding on either side and assisted decoding work. ``crop`` is
    exact while no key has been dropped, and for tokens added while the past is recorded; otherwise it raises.
    """

    def __init__(self, config: Any) -> None:
        config = config.get_text_config(decoder=True)
        found = dynamic_layers(config)
        if not found:
            raise ValueError("config must be of a model with dynamic masks, Doge or a converted one, got "
                             f"{type(config).__name__} without any")
        full = FullCache(config=config).layers
        layers = [DynamicMaskLayer() if index in found else full[index] for index in range(config.num_hidden_layers)]
        super().__init__(layers=layers)

    @property
    def memory_bytes(self) -> int:
        """Size in bytes of what the layers with dynamic masks store."""
        return sum(layer.store.memory_bytes for layer in self.layers
                   if isinstance(layer, DynamicMaskLayer) and layer.store is not None)


def cache_argument(model: Any) -> str:
    """How ``model.forward`` calls its cache: ``"cache"``, or up to transformers 5.19 ``"past_key_values"``."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
