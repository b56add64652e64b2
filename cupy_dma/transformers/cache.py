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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer
from transformers.cache_utils import DynamicCache as FullCache

from cupy_dma import checks
from cupy_dma.cache.storage import checked_storage
from cupy_dma.masks.windows import Window
from cupy_dma.transformers.budgets import budgets
from cupy_dma.transformers.cache_layer import DynamicMaskLayer, broken, unreached
from cupy_dma.transformers.croppable import At
from cupy_dma.transformers.layers import dynamic_layers, gated_layers


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
    record_stops : bool
        Keep what ``stops`` needs: 4 bytes per token, layer and kv head, and a byte per token and layer.
    slots : int, optional
        A fixed number of rows for texts that come and go: forward passes then name theirs, within ``at``, and
        ``reset(slots)`` empties some. ``ContinuousBatching`` is made of this. All layers must have dynamic masks.
    storage : "int8" or "fp8", optional
        Keep rows in 8 bits per number, as for ``cupy_dma.DynamicCache``.

    Raises
    ------
    ValueError
        The configuration has no layer with a dynamic mask, or its layers are sliding windows, too; ``storage`` is none.

    Notes
    -----
    Greedy search, sampling, beam search, batches with padding on either side and assisted decoding work. ``crop`` is
    exact while no key has been dropped, and for tokens added while the past is recorded; otherwise it raises.

    A forward pass that fails after some layers have taken its tokens cannot be undone: the next one raises a
    RuntimeError before it changes anything, and so on until ``reset()``. One that fails before, or in the first layer,
    has changed nothing.
    """

    def __init__(self, config: Any, *, record_stops: bool = False, slots: int | None = None,
                 storage: str | None = None) -> None:
        config = config.get_text_config(decoder=True)
        found = dynamic_layers(config)
        if not found:
            raise ValueError("config must be of a model with dynamic masks, Doge or a converted one, got "
                             f"{type(config).__name__} without any")
        if gated_layers(config):
            raise ValueError("config must be of a model that keeps a window: one with gates needs a GatedCache")
        self._make_layers(config, {}, record_stops, slots, storage)

    def _make_layers(self, config: Any, capacity: Mapping[int, Window | None], record_stops: bool,
                     slots: int | None, storage: str | None) -> None:
        found, self.slots = dynamic_layers(config), slots
        checked_storage(storage)
        if slots is not None:
            checks.whole(slots, "slots", 1)
            if record_stops:
                raise ValueError("record_stops must be False with slots, whose texts come and go")
            if missing := sorted(set(range(config.num_hidden_layers)) - found.keys()):
                raise ValueError(f"slots need a model whose layers all have dynamic masks, got one without in "
                                 f"layers {missing}")
        layers = FullCache(config=config).layers
        # Older versions of transformers have none for the last layers if these reuse others' keys and values.
        layers += [DynamicLayer() for _ in range(config.num_hidden_layers - len(layers))]
        super().__init__(layers=[DynamicMaskLayer(record_stops, capacity.get(index), slots, storage) if index in found
                                 else layer for index, layer in enumerate(layers)])
        self._forget_calls()

    def stops(self) -> list[Tensor | None]:
        """What was evicted, layer by layer, None for layers without a dynamic mask.

        Returns
        -------
        list of int32 Tensor ``(B, Hkv, N)``
            As ``cupy_dma.DynamicCache.stops``, with positions among all ``N`` tokens so far, padding included.
            ``replay`` takes it.

        Raises
        ------
        RuntimeError
            The cache was not made with ``record_stops=True``.
        NotImplementedError
            A layer attends several times to the same tokens (DiffLlama).
        """
        return [layer.stops() if isinstance(layer, DynamicMaskLayer) else None for layer in self.layers]

    def _forget_calls(self) -> None:
        self._known: set[int] = set()  # layers that have been updated
        self._updated: set[int] = set()  # those of the last forward pass
        self._begin = 0  # tokens before it
        self._is_torn = False  # whether a change of all layers failed in the middle

    @property
    def memory_bytes(self) -> int:
        """Size in bytes of what the layers with dynamic masks store."""
        return sum(store.memory_bytes for layer in self._dynamic for store in layer.stores)

    @property
    def _dynamic(self) -> list[DynamicMaskLayer]:
        return [layer for layer in self.layers if isinstance(layer, DynamicMaskLayer)]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any,
               **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Announce the tokens of a layer with a dynamic mask, and append those of another.

        Raises
        ------
        RuntimeError
            An earlier forward pass failed in the middle, or its attention was another implementation's.
        """
        if not self._updated or layer_idx in self._updated:  # a forward pass begins
            self.check_whole()
            if self.slots is not None and self._dynamic[0].at is None:
                raise RuntimeError("a cache with slots takes tokens within cache.at, which says where they belong")
            self._updated, self._begin = set(), self.layers[layer_idx].get_seq_length()
        elif self.layers[layer_idx].get_seq_length() != self._begin:
            raise broken(self.layers)
        found = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._updated.add(layer_idx)
        self._known.add(layer_idx)
        return found

    def check_whole(self) -> None:
        """Raise a RuntimeError if a call failed after it had changed some of the layers."""
        announced = [layer for layer in self._dynamic if layer._announced]
        if len(announced) == 1 < len(self._dynamic):  # it failed there; another attention would have left them all
            announced[0].withdraw()
        elif announced:
            raise unreached()
        lengths = {self.layers[index].get_seq_length() for index in self._known}
        if self._is_torn or len(lengths) > 1 or not all(layer.is_whole for layer in self._dynamic):
            raise broken(self.layers)

    def reset(self, slots: Tensor | None = None) -> None:
        """Remove all tokens, or those of some slots, int32 ``(n,)`` on the device: also what a forward pass that failed
        has left in them."""
        if slots is None:
            super().reset()
        else:
            self._check_slots("reset(slots)")
            for layer in self._dynamic:
                layer.reset(slots)
        self._forget_calls()

    def _check_slots(self, what: str) -> None:
        if self.slots is None:
            raise ValueError(f"{what} needs a cache made with slots=")

    @contextmanager
    def at(self, slots: Tensor | None, lengths: Tensor) -> Iterator[None]:
        """Give the forward passes within a ``with`` block to some of the cache's slots.

        Parameters
        ----------
        slots : int32 Tensor ``(n,)`` on the device, optional
            The slot of each of the pass's ``n`` rows, -1 for none; no slot twice. By default there are as many rows as
            slots, in order.
        lengths : int32 Tensor ``(n,)`` on the device
            How many of each row's tokens are real. They come first; the others are ignored. 0 leaves a slot idle.

        Raises
        ------
        ValueError
            The cache has no slots.

        Notes
        -----
        Give the model ``position_ids``, and no ``attention_mask``. Nothing is read on the host, so a CUDA graph can
        take the pass. If it fails, its slots hold nothing of use until ``reset(slots)``; the others are unchanged.
        """
        self._check_slots("at")
        for layer in self._dynamic:
            layer.at = At(slots, lengths)
        try:
            yield
        except BaseException:  # drops the slots' tokens that some layers already have
            for layer in self._dynamic:
                layer.restore(0)
            self._forget_calls()
            raise
        finally:
            for layer in self._dynamic:
                layer.at = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row ``b`` by the former row ``beam_idx[b]``: a step of beam search."""
        self._change_all("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times."""
        self._change_all("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``."""
        self._change_all("batch_select_indices", indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row; see ``DynamicMaskLayer.crop``."""
        for layer in self._dynamic:
            layer.check_crop(tokens_to_remove)
        self._change_all("crop", tokens_to_remove)

    def _change_all(self, method: str, argument: Any) -> None:
        """A method of all layers. If it fails after it has changed some, the cache takes no more tokens."""
        changed = False
        try:
            for layer in self.layers:
                changed = changed or not isinstance(layer, DynamicMaskLayer) or len(layer._parts) > 1
                getattr(layer, method)(argument)
                changed = True
        except BaseException:
            self._is_torn = self._is_torn or changed
            raise


class GatedCache(DynamicMaskCache):
    """A cache for ``generate`` and ``forward`` that keeps the keys whose gates are open, recent ones and sinks.

    Its tokens are those of a ``FullGatedCache``, as long as no bound is reached and padding stands only before or
    behind a text: this cache does not count it between two tokens. ``generate`` makes one by itself for models
    converted with ``policy="gate"``; make one to go on with it in another call.

    Parameters
    ----------
    config
        The configuration of a model converted with ``policy="gate"``.
    capacity : int, one int per layer with a gate, or for each layer one per kv head, optional
        The most open keys that a kv head keeps, as for ``cupy_dma.GatedCache``: those with the highest logits, the
        newest first among equal ones. Then rows never grow, and ``DecodingStep`` takes the cache. By default that of
        the configuration, if it has one (``convert(..., capacity=...)``).
    record_stops, slots, storage
        As for ``DynamicMaskCache``; slots need a capacity.

    Raises
    ------
    TypeError, ValueError
        The configuration has no layer with a gate, or ``capacity`` does not fit its layers.

    Notes
    -----
    As for ``DynamicMaskCache``. ``crop`` is exact for tokens added while the past is recorded, and while there are no
    more than ``delay``.
    """

    def __init__(self, config: Any, *, capacity: Any = None, record_stops: bool = False,
                 slots: int | None = None, storage: str | None = None) -> None:
        config = config.get_text_config(decoder=True)
        gated = gated_layers(config)
        if not gated:
            raise ValueError(f"config must be of a model converted with policy='gate', got {type(config).__name__} "
                             f"without gates")
        each: dict[int, Window | None] = dict.fromkeys(gated)
        if capacity is not None:
            each = dict(zip(gated, budgets(capacity, "capacity", list(gated), [None] * len(gated))))
        elif slots is not None and any(how.capacity is None for how in gated.values()):
            raise ValueError("capacity must be given with slots, whose rows cannot grow")
        self._make_layers(config, each, record_stops, slots, storage)


def cache_argument(model: Any) -> str:
    """How ``model.forward`` calls its cache: ``"cache"``, or up to transformers 5.19 ``"past_key_values"``."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
