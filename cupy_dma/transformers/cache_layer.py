"""The tokens of one layer with a dynamic mask, in the protocol of transformers' caches."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from cupy_dma.cache import GatedCache
from cupy_dma.masks.windows import Window
from cupy_dma.transformers.croppable import At, CroppableCache, Store
from cupy_dma.transformers.layers import DynamicMask, GateMask


class DynamicMaskLayer(CacheLayerMixin):
    """The tokens of one layer with a dynamic mask. Its parts are created by its first call.

    A layer that attends several times to the tokens of one ``update`` (DiffLlama) has a part for each.
    """

    is_sliding = False
    supports_early_init = False

    def __init__(self, record_stops: bool = False, capacity: Window | None = None, slots: int | None = None,
                 storage: str | None = None) -> None:
        """``capacity``: of layers with gates, as for ``cupy_dma.GatedCache``; by default the layer's own. ``slots``:
        how many rows it has, whatever the batch of a call (``DynamicMaskCache.at``)."""
        super().__init__()
        self.record_past = False
        self.at: At | None = None  # where the tokens of the current calls belong
        self._options = record_stops, capacity, slots, storage
        self._parts: list[CroppableCache] = []
        self._length = 0  # tokens so far, padding included, as transformers counts
        self._announced = 0  # tokens of an ``update`` that have not reached the cache
        self._calls = 0  # of ``attend`` since the last ``update``

    @property
    def stores(self) -> list[Store]:
        """The caches, one for each time that the layer attends to the tokens of an ``update``."""
        return [part.whole_store for part in self._parts]

    @property
    def store(self) -> Store | None:
        """The first of them, None before the first call."""
        return self._parts[0].whole_store if self._parts else None

    @property
    def _slots(self) -> int | None:
        return self._options[2]

    # ---- tokens -----------------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device, self.batch_size, self.is_initialized = key_states.device, self._slots or key_states.shape[0], True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Announce new tokens ``(B, Hkv, L, D)``, which the layer's attention then appends. Returns them."""
        if self._announced:
            raise unreached()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._announced, self._calls = key_states.shape[2], 0
        return key_states, value_states

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor, how: DynamicMask | GateMask,
               real: Tensor | None, settings: dict[str, Any], sink_logits: Tensor | None = None) -> Tensor:
        """Append the tokens announced last and attend from them. What raises has appended none, and withdraws them.

        Parameters
        ----------
        query : Tensor ``(B, L, H, D)``
        key, value : Tensor ``(B, L, Hkv, D)``
        scores : Tensor ``(B, Hkv, L)``
            Or with gates, the logarithms of these.
        how
            The layer's selection.
        real : bool Tensor ``(B, L)``, optional
            False: padding, which is not stored, and whose output is 0.
        settings
            ``scale`` and ``softcap`` of the attention, with gates ``add_gates``.
        sink_logits : Tensor ``(H,)``, optional
            As for ``cupy_dma.attention``.

        Returns
        -------
        Tensor ``(B, L, H, D)``
        """
        call = self._calls if self.is_initialized else 0  # without ``update``, where it shares another layer's keys
        try:
            if self.at is not None and real is not None:
                raise ValueError("attention_mask must be None within cache.at, whose lengths say which tokens are real")
            if call < len(self._parts):
                part = self._parts[call]
            elif self._length > (0 if self._announced else key.shape[1]):
                raise broken([self])
            else:
                part = CroppableCache(key, value, how, *self._options)
            out = part.append(query, key, value, scores, real, self.record_past, settings, sink_logits, self.at)
        except BaseException:
            self.withdraw()
            raise
        if call == len(self._parts):
            self._parts.append(part)
        added = 0 if self._slots else self._announced  # slots have lengths of their own, which their stores count
        self._calls, self._length, self._announced = call + 1, self._length + added, 0
        return out

    def withdraw(self) -> None:
        """Forget tokens that were announced and have not reached the cache."""
        if self._announced:
            self._announced, self._calls = 0, len(self._parts)

    @property
    def is_whole(self) -> bool:
        """Whether the last call has reached all parts."""
        return not self.is_initialized or self._calls == len(self._parts)

    def advance(self, tokens: int) -> None:
        """Count tokens that have been appended without ``update``: by a CUDA graph."""
        self._length += tokens
        for part in self._parts:
            part.forget_past()

    def restore(self, length: int) -> None:
        """Count ``length`` tokens, as before calls whose tokens have been taken back from the caches."""
        self._length, self._announced, self._calls = length, 0, len(self._parts)

    def stops(self) -> Tensor:
        """int32 ``(B, Hkv, tokens so far)``; see ``DynamicMaskCache.stops``."""
        if not self._options[0]:
            raise RuntimeError("the cache has not recorded its stops: make it with record_stops=True")
        if len(self._parts) > 1:
            raise NotImplementedError("a layer that attends several times evicts other keys each time")
        return self._parts[0].stops() if self._parts else torch.zeros(0, 0, 0, dtype=torch.int32)

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

    def reset(self, slots: Tensor | None = None) -> None:
        """Remove all tokens, or those of some slots."""
        self._length = self._announced = 0
        self._calls = len(self._parts)
        for part in self._parts:
            part.reset(slots)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row ``b`` by the former row ``beam_idx[b]``: a step of beam search."""
        for part in self._parts:
            part.reorder(beam_idx.to(self.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times."""
        if self.store is not None:
            self.batch_select_indices(torch.arange(self.store.batch, device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``."""
        if self.store is not None:
            indices = torch.arange(self.store.batch, device=self.device)[indices.to(self.device)]  # also of a bool mask
            self._parts, self.batch_size = [part.selected(indices) for part in self._parts], len(indices)

    def activate_past_recording(self) -> None:
        """Remember from now on what ``crop`` needs, until the next ``crop``."""
        self.record_past = True

    @property
    def is_croppable(self) -> bool:
        """Whether ``crop`` is exact: the past is recorded, or no key has been dropped yet and none was padding."""
        return self.record_past or self._keeps_all

    @property
    def _keeps_all(self) -> bool:
        return all(part.keeps_all(self._length) for part in self._parts)

    def check_crop(self, tokens_to_remove: int) -> int:
        """How many tokens ``crop`` takes. Raises what it documents."""
        removed = -int(tokens_to_remove)
        if not 0 <= removed <= self._length:
            raise ValueError(f"crop takes minus the number of tokens to remove, of {self._length} that there are, got "
                             f"{tokens_to_remove}")
        if removed and not self._keeps_all and removed > min(part.recorded for part in self._parts):
            store = self._parts[0].store
            kept = "open gates" if isinstance(store, GatedCache) else f"{store.window} keys"
            raise RuntimeError(f"{removed} of {self._length} tokens cannot be removed: the cache keeps {kept} and no "
                               f"padding, and what is left may need keys that have been dropped; call "
                               f"activate_past_recording() before tokens are added")
        return removed

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
        removed = self.check_crop(tokens_to_remove)
        if removed:
            for part, left in [(part, part.without(removed, self._length)) for part in self._parts]:
                part.take_back(left, removed, self._length - removed)
        for part in self._parts:
            part.forget_past()
        self._length -= removed

    # ---- offloading -------------------------------------------------------------------------------------------------

    def offload(self) -> None:
        """Nothing: these few rows stay on the device."""

    def prefetch(self) -> None:
        """Nothing."""


def unreached() -> RuntimeError:
    return RuntimeError("the tokens of the last call never reached the cache: a DynamicMaskCache needs "
                        "attn_implementation='cupy_dma'; model.set_attn_implementation('cupy_dma') chooses it, and "
                        "reset() forgets a call that failed")


def broken(layers: list[Any]) -> RuntimeError:
    held = sorted({layer.get_seq_length() for layer in layers if isinstance(layer, DynamicMaskLayer)})
    return RuntimeError(f"a call has failed after it had changed some layers of the cache, which hold {held} tokens: "
                        f"reset() the cache and give it the whole text again, or go on from a copy made before")
