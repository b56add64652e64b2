"""A model's mask in ``O(K)``: the mask function of ``attn_implementation="cupy_dma"``.

transformers describes a mask by a function of indices, which its other implementations evaluate for every query and
key. Causal models combine a few kinds (causality, a sliding window, chunks, packed sequences), so this module reads
these off the function and stores their meaning: two integers per key (``IntervalMask``), and padding and sequences of
the keys for a selection. No Q x K array is made.

Positions are those of the keys of the call: key ``j`` of ``K`` stands at ``j``, query ``i`` at ``first_query + i``.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cupy_dma.masks.interval import EVER, NEVER, IntervalMask

_LIBRARY = "transformers.masking_utils"


@dataclass(eq=False)
class Visibility:
    """Which keys the queries of a forward pass may see; shared by all layers with the same kind of mask."""

    query_length: int
    key_length: int
    first_query: int | Tensor  # an int, or an integer tensor with one element (transformers' static cache)
    device: torch.device
    causal: bool = True
    window: int | None = None  # a query sees keys less than this before it (and after it, if not causal)
    padding: Tensor | None = None  # bool (B, K), True = a real token
    documents: list[Tensor] = field(default_factory=list)  # integers (B, K): a query sees keys with its own number
    looks_back: bool = False  # whether the window is one of causal masks

    _interval: IntervalMask | None = field(default=None, init=False, repr=False)

    ndim = 4  # transformers requires it of a ready-made mask

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(1, 1, Q, K)``: the shape that a dense mask would broadcast to."""
        return 1, 1, self.query_length, self.key_length

    @property
    def is_aligned(self) -> bool:
        """Whether the last query stands at the last key."""
        return not isinstance(self.first_query, Tensor) and self.first_query + self.query_length == self.key_length

    @property
    def is_plain(self) -> bool:
        """Whether the mask is just causality with the last query at the last key, or nothing at all."""
        return (self.is_aligned or not self.causal) and not self.documents and self.padding is None and (
            self.window is None or self.is_aligned and self.window >= self.key_length)

    @property
    def numbering(self) -> Tensor | None:
        """Integers ``(B, K)`` that change along a row wherever one of ``documents`` does."""
        if len(self.documents) < 2:
            return self.documents[0] if self.documents else None
        changes = torch.stack([numbers.diff(dim=1, prepend=numbers[:, :1]) != 0 for numbers in self.documents]).any(0)
        return changes.cumsum(1)

    def narrow(self, window: int) -> None:
        """Add a window."""
        self.window = window if self.window is None else min(self.window, window)

    def interval(self) -> IntervalMask:
        """The mask, ``(1|B, 1, K)``, made once."""
        if self._interval is None:
            self._interval = self._made()
        return self._interval

    def __getitem__(self, index: Any) -> Visibility:
        """Some of the queries and the first keys: what models slice from a mask ``(B, 1, Q, K)``."""
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis in index:
            at = index.index(Ellipsis)
            index = (*index[:at], *[slice(None)] * (5 - len(index)), *index[at + 1:])
        index = (*index, *[slice(None)] * (4 - len(index)))
        whole = slice(None)
        if len(index) != 4 or index[0] != whole or index[1] != whole or not all(isinstance(i, slice) for i in index):
            raise _unknown(f"a part {index} of a mask")
        queries, keys = range(self.query_length)[index[2]], range(self.key_length)[index[3]]
        if queries.step != 1 or keys.step != 1 or keys.start or self.documents and len(keys) < self.key_length:
            raise _unknown(f"a part {index} of a mask")
        if len(queries) == self.query_length and len(keys) == self.key_length:
            return self
        return replace(self, query_length=len(queries), key_length=len(keys),
                       first_query=self.first_query + queries.start,
                       padding=None if self.padding is None else self.padding[:, :len(keys)])

    def _made(self) -> IntervalMask:
        like, n = torch.empty(0, device=self.device), self.key_length
        masks = [IntervalMask.documents(numbers, causal=self.causal) for numbers in self.documents]
        if self.window is not None and self.causal:
            masks.append(IntervalMask.sliding_window(n, self.window, like=like))
        elif self.window is not None:
            place = torch.arange(n, device=self.device, dtype=torch.int32)
            masks.append(IntervalMask(place - self.window + 1, place + self.window))
        elif self.causal and not masks:
            masks.append(IntervalMask.causal(n, like=like))
        if self.padding is not None:
            masks.append(IntervalMask.padding(self.padding))
        if not masks:
            return IntervalMask(*(torch.full((n,), bound, dtype=torch.int32, device=self.device)
                                  for bound in (EVER, NEVER)))
        return self.placed(functools.reduce(IntervalMask.__and__, masks))

    def placed(self, mask: IntervalMask) -> IntervalMask:
        """``mask``, whose runs count from the first key, for queries that attention aligns to the last key."""
        if self.is_aligned:
            return mask
        shift = self.key_length - self.query_length - self.first_query
        start, stop = (torch.where((run == EVER) | (run == NEVER), run, run + shift).int()
                       for run in (mask.start, mask.stop))
        return IntervalMask(start, stop)

    def new_tokens(self) -> Tensor | None:
        """bool ``(B, Q)``, True = a real token, or None where all are: the padding of the queries' own keys."""
        if self.padding is None:
            return None
        if not isinstance(self.first_query, Tensor):
            return self.padding[:, self.first_query:self.first_query + self.query_length]
        place = self.first_query + torch.arange(self.query_length, device=self.device)
        return self.padding[:, place]

    def to(self, device: Any, *_: Any, **__: Any) -> Visibility:
        """On another device, as accelerate moves the arguments of layers."""
        if torch.device(device) == self.device:
            return self
        first = self.first_query.to(device) if isinstance(self.first_query, Tensor) else self.first_query
        return replace(self, first_query=first, device=torch.device(device),
                       padding=None if self.padding is None else self.padding.to(device),
                       documents=[numbers.to(device) for numbers in self.documents])


@torch.compiler.disable  # a graph break here: a traced function cannot be inspected for its closure
def visibility(batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
               mask_function: Callable | None = None, attention_mask: Any = None, device: Any = "cpu",
               **others: Any) -> Visibility:
    """The mask function to register with transformers; its arguments are those of ``masking_utils.sdpa_mask``. An
    ``attention_mask`` that is a ``Visibility``, made before the forward pass, is returned unchanged.

    Returns
    -------
    Visibility, never None: a layer without one would have to guess what its model meant.

    Raises
    ------
    NotImplementedError
        The mask is not of these kinds.
    """
    if isinstance(attention_mask, Visibility):
        return attention_mask
    found = Visibility(q_length, kv_length, q_offset - kv_offset, torch.device(device), causal=False)
    if mask_function is None:
        found.causal = True
    else:
        _read(mask_function, found, kv_offset, batch_size, None)
        if found.looks_back and not found.causal:
            raise _unknown("a sliding window of the keys before a query beside all keys after it")
    if attention_mask is not None:
        missing = kv_length + kv_offset - attention_mask.shape[-1]  # keys of a static cache that are still to come
        real = torch.nn.functional.pad(attention_mask, (0, max(missing, 0)))[:, kv_offset:kv_offset + kv_length].bool()
        found.padding = None if _is_known_to_be_true(real) else real
    return found


def _is_known_to_be_true(real: Tensor) -> bool:
    """Whether all of it is True. False if reading it is impossible; reading synchronizes."""
    if real.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return bool(real.all())


def _read(function: Callable, found: Visibility, kv_offset: int, batch: int, positions: Tensor | None) -> None:
    """Add the conditions of a mask function of transformers. ``positions (B, K)``: what it counts, if not keys."""
    name = f"{function.__module__}.{function.__qualname__}".replace(".<locals>", "")
    inside = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ())))
    kind = name.removeprefix(f"{_LIBRARY}.")
    if kind == "causal_mask_function":
        found.causal = True
    elif kind == "bidirectional_mask_function":
        pass
    elif kind == "and_masks.and_mask":
        for each in inside["mask_functions"]:
            _read(each, found, kv_offset, batch, positions)
    elif kind == "or_masks.or_mask":
        _read_union(name, inside["mask_functions"], found, kv_offset, batch, positions)
    elif kind == "sliding_window_overlay.inner_mask":
        found.narrow(inside["sliding_window"])
        found.looks_back = True
    elif kind == "sliding_window_bidirectional_overlay.inner_mask":
        found.narrow(inside["sliding_window"] + 1)
    elif kind == "packed_sequence_mask_function.inner_mask":
        found.documents.append(inside["packed_sequence_mask"])
    elif kind == "remap_positions_for_packed_sequence.inner_mask":
        _read(inside["mask_function"], found, kv_offset, batch, inside["position_ids"])
    elif kind == "chunked_overlay.inner_mask":
        if positions is None:
            positions = torch.arange(kv_offset, kv_offset + found.key_length, device=found.device).expand(batch, -1)
        begin = inside["left_padding"].to(found.device)[:, None]
        found.documents.append((positions - begin).div(inside["chunk_size"], rounding_mode="floor"))
    else:
        raise _unknown(name)


def _read_union(name: str, functions: Sequence[Callable], found: Visibility, *where: Any) -> None:
    """Add a union with blocks of mutually visible tokens (images) if there are none, that is for text alone."""
    blocks = [each for each in functions if each.__qualname__ == "blockwise_overlay.<locals>.inner_mask"]
    others = [each for each in functions if each not in blocks]
    if len(others) != 1:
        raise _unknown(name)
    if any((each.__closure__[0].cell_contents >= 0).any() for each in blocks):  # type: ignore[index]
        raise _unknown(f"{name} with blocks of images, whose tokens see each other")
    _read(others[0], found, *where)


def _unknown(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"attn_implementation='cupy_dma' supports masks of causality, sliding windows, chunks, packed sequences and "
        f"padding, but the model asks for {name}; use attn_implementation='sdpa' or 'eager' for it")
