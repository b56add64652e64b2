"""Layers with a gate: their attention, and a cache that keeps every key with its gate.

    log g = retention_gate(hidden_states)      of the attention module's own input
    out   = attention under these gates        see ``cupy_dma.torch.RetentionGate``

A gate takes effect ``delay`` positions after its token but is known immediately, so a generation step needs the gates
of earlier tokens. ``FullGatedCache`` stores them; its memory grows like that of any full cache. A ``GatedCache`` drops
the keys whose gates are closed.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache as FullCache
from transformers.cache_utils import DynamicLayer

from cupy_dma.masks.interval import NEVER, IntervalMask
from cupy_dma.torch import RetentionGate, attention
from cupy_dma.torch.kept import kept_keys
from cupy_dma.transformers.cache_layer import DynamicMaskLayer
from cupy_dma.transformers.layers import GATE, gated_layers
from cupy_dma.transformers.visibility import Visibility


class FullGatedLayer(DynamicLayer):
    """The tokens of one layer, and their gates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.log_gate: Tensor | None = None  # (B, Hkv, tokens so far)
        self._gate: RetentionGate | None = None

    def append_gates(self, gate: RetentionGate, log_gate: Tensor, past: int) -> Tensor:
        """Add the gates of new tokens ``(B, Hkv, N)`` after those of ``past`` ones. Returns all."""
        self._gate = gate
        stored = 0 if self.log_gate is None else self.log_gate.shape[2]
        if stored != past:
            raise RuntimeError(f"the cache has {past} earlier keys and {stored} gates of them: a call has failed, or "
                               f"another attention has added keys; reset() the cache and give it the whole text again")
        self.log_gate = log_gate if self.log_gate is None else torch.cat([self.log_gate, log_gate], 2)
        return self.log_gate

    def stops(self) -> Tensor:
        """int32 ``(B, Hkv, tokens so far)``; see ``FullGatedCache.stops``."""
        if self.log_gate is None or self._gate is None:
            return torch.zeros(0, 0, 0, dtype=torch.int32)
        stop = self._gate.mask(self.log_gate).stop
        return torch.where(stop >= self.log_gate.shape[2], NEVER, stop).int()

    def reset(self) -> None:
        """Remove all tokens."""
        super().reset()
        self.log_gate = None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, as transformers' own layer does."""
        super().crop(tokens_to_remove)
        if self.log_gate is not None:
            left = self.get_seq_length() if self.is_initialized else self.log_gate.shape[2] - abs(tokens_to_remove)
            self.log_gate = self.log_gate[..., :left]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row ``b`` by the former row ``beam_idx[b]``: a step of beam search."""
        super().reorder_cache(beam_idx)
        if self.log_gate is not None:
            self.log_gate = self.log_gate.index_select(0, beam_idx.to(self.log_gate.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times."""
        super().batch_repeat_interleave(repeats)
        if self.log_gate is not None:
            self.log_gate = self.log_gate.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``."""
        super().batch_select_indices(indices)
        if self.log_gate is not None:
            self.log_gate = self.log_gate[indices.to(self.log_gate.device)]


class FullGatedCache(FullCache):
    """transformers' ``DynamicCache``, with the gates of all tokens in addition to their keys and values.

    It keeps every row, and queries see the keys with open gates: cached generation computes the same as a forward pass
    over the whole text, which ``GatedCache`` does in less memory. Any number of tokens can be cropped.

    Parameters
    ----------
    config
        The configuration of a model converted with ``policy="gate"``.

    Raises
    ------
    ValueError
        The configuration has no layer with a gate, or bounds its open keys (``capacity``).
    """

    def __init__(self, config: Any) -> None:
        config = config.get_text_config(decoder=True)
        gated = gated_layers(config)
        if not gated:
            raise ValueError(f"config must be of a model converted with policy='gate', got {type(config).__name__} "
                             f"without gates")
        if any(how.capacity is not None for how in gated.values()):
            raise ValueError("config must have no capacity, which a FullGatedCache does not keep to: use a GatedCache")
        super().__init__(config=config)
        layers: list[Any] = self.layers
        # Older versions of transformers have none for the last layers if these reuse others' keys and values.
        layers += [DynamicLayer() for _ in range(config.num_hidden_layers - len(layers))]
        for index in gated:
            layers[index] = FullGatedLayer()

    def stops(self) -> list[Tensor | None]:
        """Which position was the first that did not see a key, as for ``DynamicMaskCache.stops``; what it says of
        padding means nothing."""
        return [layer.stops() if isinstance(layer, FullGatedLayer) else None for layer in self.layers]

    def reset(self) -> None:
        """Remove all tokens."""
        for layer in self.layers:
            if isinstance(layer, DynamicLayer):  # older versions of transformers would fill them with zeros
                layer.keys = layer.values = None
                layer.is_initialized = False
        super().reset()


class GateCall:
    """The gates of one forward pass of a layer, computed when its attention knows the mask; a layer that attends
    several times (DiffLlama) reuses them."""

    def __init__(self, hidden_states: Tensor, layer: FullGatedLayer | DynamicMaskLayer | None) -> None:
        self._hidden_states, self.layer = hidden_states, layer
        self._found: Tensor | None = None

    def log_gate(self, gate: RetentionGate, keys: int, seen: Visibility | None) -> Tensor:
        """``(B, Hkv, keys)``, including earlier tokens."""
        if self._found is None:
            past = keys - self._hidden_states.shape[1]
            if past and self.layer is None:
                raise NotImplementedError(f"a layer with a gate needs the gates of earlier keys: give the model a "
                                          f"GatedCache, got {past} keys from another cache")
            padding = documents = None
            if seen is not None:
                padding, documents = seen.padding, seen.numbering
            self._found = gate(self._hidden_states, padding=padding, documents=documents, past=past).log_gate
            if isinstance(self.layer, FullGatedLayer):
                self._found = self.layer.append_gates(gate, self._found, past)
        return self._found

    def open_logits(self, gate: RetentionGate) -> Tensor:
        """``(B, Hkv, N)`` of new tokens, -inf where a gate is closed."""
        return gate.ranks(self._hidden_states)

    def ranks(self, gate: RetentionGate, seen: Visibility | None) -> Tensor:
        """``(B, Hkv, N)`` of new tokens, for a ``GatedCache``: in training the logarithms of their gates."""
        assert isinstance(self.layer, DynamicMaskLayer)
        if self._found is None and gate.training:
            self.log_gate(gate, self.layer.get_seq_length() + self._hidden_states.shape[1], seen)
        elif self._found is None:
            self._found = self.open_logits(gate)
        assert self._found is not None
        return self._found


def gated_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, seen: Visibility | None,
                    recorded: IntervalMask | None, **settings: Any) -> Tensor:
    """``out (B, Q, H, D)`` of a layer with a gate, under what its model's mask shows, or under ``recorded``."""
    gate, layer = getattr(module, GATE), module.gate_call.layer
    if isinstance(layer, DynamicMaskLayer):
        if seen is not None and (seen.documents or seen.window is not None):
            raise NotImplementedError("a GatedCache supports no packed sequences or sliding windows: give one row per "
                                      "sequence")
        how = replace(module.dynamic_mask, delay=gate.delay, threshold=gate.threshold, sinks=gate.sinks,
                      capacity=module.dynamic_mask.capacity if gate.enabled else None)
        sink_logits = settings.pop("sink_logits", None)
        return layer.attend(query, key, value, module.gate_call.ranks(gate, seen), how,
                            None if seen is None else seen.new_tokens(), {**settings, "add_gates": gate.training},
                            sink_logits)
    if seen is not None and not seen.is_aligned:
        raise NotImplementedError("a layer with a gate supports no static cache: give the model a GatedCache")
    log_gate = module.gate_call.log_gate(gate, key.shape[1], seen)
    if recorded is not None:
        bias = {"bias": log_gate[:, :, None], "bias_delay": gate.delay} if gate.training else {}
        return attention(query, key, value, mask=recorded, **bias, **settings)
    mask = None if seen is None else seen.interval()
    capacity = module.dynamic_mask.capacity
    if capacity is not None and gate.enabled and not gate.training:
        padding, documents = (None, None) if seen is None else (seen.padding, seen.numbering)
        best = kept_keys(module.gate_call.open_logits(gate), capacity, gate.sinks, gate.delay, padding, documents, None)
        mask = best if mask is None else best & mask
    return gate.attend(query, key, value, log_gate, mask=mask, **settings)
