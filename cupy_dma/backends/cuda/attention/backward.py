"""Gradients of the attention on the device (SPEC section 6): two passes, no atomics, the same bits on every run. Only
Hopper has one pass, without such lists, where the call need not be deterministic (sm90_backward.py).

1. ``backward_preprocess``: ``delta_i = dout_i . out_i - dlse_i``; clears what later kernels add to.
2. ``backward_dq``: dq, query-major, over the same key lists as the forward.
   Also the gradient of a dense bias that belongs to one head of one batch entry.
3. ``backward_dkv``: dk, dv and the bias gradient, key-stationary. Where few keys meet a tile, and under dense masks,
   the keys of each super-tile of queries are gathered and their sums kept in float32, which ``backward_reduce`` adds in
   order; else keys in their own order look at every query that may see them.
4. ``backward_dbias``: the gradient of a dense bias that heads, batch entries or keys share, summed where it is made.

2 to 4 are launched without PDL: their blocks, of long work, would gather behind the many short ones of
``backward_preprocess`` (B1 H2/1 D64, 4096 tokens: 151 us for 119).
"""
from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.attention import sm90_backward
from cupy_dma.backends.cuda.attention.problem import Problem, rows_aligned
from cupy_dma.backends.cuda.attention.tiles import backward_dbias_tile, backward_dkv_tile, backward_dq_tile
from cupy_dma.backends.cuda.lists.dense_macro_tiles import DenseSupers, dense_supers
from cupy_dma.backends.cuda.lists.intervals import SuperLists, super_lists
from cupy_dma.backends.cuda.lists.varlen import tile_count
from cupy_dma.backends.cuda.runtime.configs import (
    BIAS_DENSE,
    ELEMENTS,
    REDUCE_THREADS,
    REDUCE_WARPS,
    BackwardDbiasConfig,
    BackwardDkvConfig,
    BackwardDqConfig,
    BackwardPreprocessConfig,
    BackwardReduceConfig,
    KeyTile,
    Tile,
    blocks,
)
from cupy_dma.backends.cuda.runtime.device import LoadedKernel, Runtime
from cupy_dma.backends.cuda.runtime.sums import add_parts, sum_to_bias

if TYPE_CHECKING:
    from cupy_dma.calls.types import AttentionBackwardCall


def attention_backward(runtime: Runtime, call: AttentionBackwardCall) -> tuple[Any, Any, Any, Any]:
    """Gradients of query, key, value and bias (4-D, its given shape and type); None for what is not needed."""
    return _Backward(runtime, call).run()


class _Backward:
    """One call: what its launches share."""

    def __init__(self, runtime: Runtime, call: AttentionBackwardCall):
        self.runtime, self.call, self.problem = runtime, call, Problem(call.forward)
        self.query, self.key, self.sequences = call.forward.query, call.forward.key, call.forward.sequences
        if self.sequences is not None and self.sequences.page_table is not None:
            raise NotImplementedError("block_table must be None: paged attention has no backward pass")
        self.library, self.device = self.query.library, self.query.device
        self.element, self.softcap = ELEMENTS[self.query.dtype], call.forward.softcap > 0.0
        self.stream = self.library.stream(self.device)
        self.vector = self.problem.vector and rows_aligned(call.dout, call.out)
        self.dense_bias = "bias" in call.needs and self.problem.bias_kind == BIAS_DENSE
        #: of what backward_dkv makes; the gradient of a dense bias is made elsewhere
        self.wanted = ("key" in call.needs, "value" in call.needs, "bias" in call.needs and not self.dense_bias)
        served = runtime, call, self.problem, self.vector
        #: whether the Hopper kernels make these; and the gradient of the queries, or at least delta
        self.hopper_keys, self.hopper_query = sm90_backward.serves_keys(*served), sm90_backward.serves_query(*served)
        self.supers: SuperLists | None = None
        self.dense: DenseSupers | None = None
        self.one_pass = False  # whether the Hopper key pass makes the gradient of the queries, too
        self.queries_first = False  # whether the Hopper query pass is the first kernel: it makes delta, too
        self.parts = sm90_backward.Parts()
        self.bias_heads = self.query.shape[2]  # of the dbias that kernels write
        #: addresses of zeros: sums of dq in one pass and of dbias in parts, if there are; a counter of each kernel
        self.query_sums = self.bias_sums = self.tickets = 0
        self.cleared = bytes(16)  # by backward_preprocess: from which address, and how many 16 bytes, as its parameters

    def run(self) -> tuple[Any, Any, Any, Any]:
        call, library = self.call, self.library
        (batch, query_length, *_), key_length = self.query.shape, self.key.shape[1]
        some = batch and query_length and key_length
        with self.runtime.on(self.device):
            if some:
                self.problem.move_mask_to_rows(self.runtime, self.stream)
            if some and any(self.wanted):
                self._find_lists()
                self.hopper_keys = self.hopper_keys and (self.one_pass or sm90_backward.has_enough_tiles(
                    self.runtime, call, self.problem, self._entries()))
                if self.hopper_keys:
                    self._find_parts()

            def result(name: str, operand: Operand) -> Any:
                if name not in call.needs:
                    return None
                whole = self.supers is None and self.sequences is None
                if some and (name == "query" or whole):  # every element is written
                    return library.empty(operand.shape, operand.dtype, self.device)
                return library.full(operand.shape, 0.0, operand.dtype, self.device)

            grads = {name: result(name, operand) for name, operand in (
                ("query", self.query), ("key", self.key), ("value", call.forward.value))}
            dbias = rows = None
            if self.hopper_keys or self.hopper_query:
                self._find_zeros()
            if self.dense_bias:
                rows = self._dense_gradient(bool(some))
            elif "bias" in call.needs:
                shape = batch, self.bias_heads, key_length
                dbias = (library.empty(shape, "float32", self.device) if self.parts.count > 1 else
                         library.full(shape, 0.0, "float32", self.device))
            if some:
                self._launch({f"d{name}": grad for name, grad in grads.items()} | {"dbias": dbias, "dbias_rows": rows})
            if call.forward.bias is not None and dbias is not None:
                dbias = sum_to_bias(self.runtime, dbias, call.forward.bias, (batch, self.bias_heads, key_length))
            elif call.forward.bias is not None and rows is not None:
                dbias = library.astype(rows, call.forward.bias.dtype)
        return grads["query"], grads["key"], grads["value"], dbias

    def _launch(self, results: dict[str, Any]) -> None:
        call, dout, out = self.call, self.call.dout, self.call.out
        batch, query_length, heads, _ = self.query.shape
        delta = self.library.empty((batch, heads, query_length), "float32", self.device)
        fields = {
            "lse": call.lse.pointer, "delta": self.library.pointer(delta),
            "dlse": call.dlse.pointer if call.dlse else 0, "dout": dout.pointer, "dout_batch": dout.strides[0],
            "dout_row": dout.strides[1], "dout_head": dout.strides[2], "out": out.pointer,
            "out_batch": out.strides[0], "out_row": out.strides[1], "out_head": out.strides[2],
            **{name: self.library.pointer(array) for name, array in results.items() if array is not None}}
        if self.queries_first:
            sm90_backward.launch_dq(self.runtime, call, self.problem, fields, self.tickets)
        else:
            _preprocess_kernel(self.runtime, self.device.index, self.element, self.query.shape[3], self.vector).launch(
                blocks(batch * query_length * heads, REDUCE_WARPS), REDUCE_THREADS,
                self.problem.pack(None, **fields) + self.cleared, self.stream)
            if "query" in call.needs and not self.one_pass:
                if self.hopper_query:
                    sm90_backward.launch_dq(self.runtime, call, self.problem, fields, self.tickets)
                else:
                    self._query_gradient(fields)
        if any(self.wanted):
            self._key_gradients(fields)
        if self.dense_bias and not self._bias_is_own():
            self._bias_gradient(fields)

    def _bias_is_own(self) -> bool:
        """Whether every pair of every head has a bias of its own, so that the query pass can write its gradient."""
        bias, query = self.call.forward.bias, self.query
        assert bias is not None
        return bias.shape == (query.shape[0], query.shape[2], query.shape[1], self.key.shape[1]) and (
            "query" in self.call.needs)

    def _dense_gradient(self, some: bool) -> Any:
        """An array for the gradient of a dense bias, zeros where no kernel writes."""
        bias, problem = self.problem.bias, self.problem
        assert bias is not None
        hides = problem.mask is not None or problem.causal
        if some and (problem.bits or not (self._bias_is_own() and hides)):  # clear_bias goes by the lists of bits
            return self.library.empty(bias.shape, bias.dtype, self.device)
        return self.library.full(bias.shape, 0.0, bias.dtype, self.device)

    def _bias_gradient(self, fields: dict[str, Any]) -> None:
        problem, bias = self.problem, self.problem.bias
        assert bias is not None
        _, query_length, _, head_dim = self.query.shape
        tile = backward_dbias_tile(head_dim, self.runtime.shared_memory_limit(self.device.index), problem.size,
                                   problem.bias_element)
        tiles, sum_keys = blocks(query_length, tile.block_m), bias.shape[3] == 1
        packed = problem.packed_mask(self.runtime, self.stream)
        kernel = _dbias_kernel(self.runtime, self.device.index, self.element, head_dim, self.vector, tile,
                               problem.tests_causality, self.softcap, packed is not None,
                               problem.bias_element, problem.tests_intervals, sum_keys)
        grid = bias.shape[0] * bias.shape[1] * tiles * (1 if sum_keys else blocks(self.key.shape[1], tile.block_n))
        kernel.launch(grid, 32 * tile.warps, problem.pack(
            None, tiles=tiles, dbias_batch=bias.shape[0], dbias_heads=bias.shape[1],
            **fields, **(packed.fields if packed else {})), self.stream, pdl=False)

    def _query_gradient(self, fields: dict[str, Any]) -> None:
        problem = self.problem
        batch, query_length, heads, head_dim = self.query.shape
        tile = backward_dq_tile(head_dim, self.runtime.shared_memory_limit(self.device.index), problem.size,
                                problem.bias_of_tiles)
        queries = tile.block_m // problem.tile_heads
        tiles = tile_count(query_length, queries, self.problem.count)
        lists = problem.key_lists(self.runtime, queries, tile.block_n, self.stream)
        makes_bias = self.dense_bias and self._bias_is_own()
        params = problem.pack(lists, tiles=tiles, **fields)
        for entry in ("clear_bias", "backward_dq") if makes_bias and problem.bits else ("backward_dq",):
            kernel = _dq_kernel(self.runtime, self.device.index, entry, self.element, head_dim, self.vector,
                                problem.tile_heads, tile, "KEYS_CONTIGUOUS" if lists is None else lists.keys,
                                problem.tests_causality, problem.bias_kind, self.softcap, problem.bits,
                                problem.bias_element, problem.count > 0, makes_bias)
            kernel.launch(tiles * (heads // problem.tile_heads) * batch, 32 * tile.warps, params, self.stream,
                          pdl=False)

    def _key_tile(self) -> KeyTile:
        return backward_dkv_tile(self.key.shape[3], self.runtime.shared_memory_limit(self.device.index),
                                 self.problem.size, self.problem.bias_of_tiles)

    def _find_lists(self) -> None:
        """The lists of super-tiles, where keys are gathered, and whether there is one pass."""
        problem, query_length = self.problem, self.query.shape[1]
        can_one_pass = self.hopper_keys and sm90_backward.can_one_pass(self.call, problem)
        packed = problem.packed_mask(self.runtime, self.stream)
        if packed is not None:
            self.dense = dense_supers(self.runtime, packed, problem.params["mask_heads"], self.key.shape[2],
                                      self.stream)
        elif problem.mask is not None and not problem.by_head and (
                not can_one_pass or sm90_backward.ONE_PASS
                or sm90_backward.lists_pay(self.runtime, self.call, problem)):
            block_n = sm90_backward.block_n(self.key.shape[3]) if self.hopper_keys else self._key_tile().block_n
            self.supers = super_lists(self.runtime, problem.mask, query_length, block_n, problem.causal, self.stream,
                                      self.sequences)
        self.one_pass = can_one_pass and (self.supers is None or bool(sm90_backward.ONE_PASS))

    def _find_parts(self) -> None:
        """The parts in which the Hopper kernel takes tiles, and to how many heads their sums of dbias are added up."""
        self.parts = sm90_backward.parts_of(self.runtime, self.call, self.problem, self._entries(), self.one_pass)
        bias, (batch, length, *_) = self.call.forward.bias, self.key.shape
        if self.parts.count > 1 and bias is not None and (bias.shape[0], bias.shape[3]) == (batch, length):
            self.bias_heads = bias.shape[1]

    def _find_zeros(self) -> None:
        """In one array, which backward_preprocess clears, if it is launched."""
        (batch, _, heads, head_dim), parts = self.query.shape, self.parts.count
        self.queries_first = self.hopper_query and not self.one_pass and head_dim <= sm90_backward.MAX_NARROW_DIM
        sums = sm90_backward.query_sums(self.call, self.problem) if self.one_pass else 0
        bias_sums = parts * batch * heads * self.key.shape[1] if parts > 1 and self.wanted[2] else 0
        make = functools.partial(self.library.full, value=0.0) if self.queries_first else self.library.empty
        pieces = blocks(sums + bias_sums + 2, 4)
        self.zeros = make((pieces, 4), dtype="float32", device=self.device)
        begin = self.library.pointer(self.zeros)
        self.cleared = begin.to_bytes(8, "little") + (0 if self.queries_first else pieces).to_bytes(8, "little")
        self.query_sums, self.bias_sums = begin if sums else 0, begin + 4 * sums
        self.tickets = self.bias_sums + 4 * bias_sums

    def _key_gradients(self, fields: dict[str, Any]) -> None:
        problem, bits = self.problem, self.dense is not None
        batch, key_length, kv_heads, head_dim = self.key.shape
        if self.parts.count > 1:
            self._in_parts(fields)
            return
        (lists, partial), entries = self._lists(), self._entries()
        sizes = dict(zip(("partial_key", "partial_value", "partial_bias"),
                         (head_dim, head_dim, self.query.shape[2] // kv_heads)))
        partials = {name: self.library.empty((entries * size,), "float32", self.device)
                    for (name, size), wanted in zip(sizes.items(), self.wanted) if wanted and partial}
        fields = {**fields, **lists, **{name: self.library.pointer(array) for name, array in partials.items()}}
        if self.hopper_keys:
            sm90_backward.launch_dkv(self.runtime, self.call, problem, entries, fields, self.tickets + 4, self.parts,
                                     self.query_sums)
        else:
            self._portable_key_gradients(fields, entries)
        if entries:
            _reduce_kernel(self.runtime, self.device.index, self.element, head_dim, self.vector,
                           problem.tests_causality, *self.wanted, problem.count > 0, bits).launch(
                batch * kv_heads * blocks(key_length, REDUCE_WARPS), REDUCE_THREADS, problem.pack(None, **fields),
                self.stream)

    def _in_parts(self, fields: dict[str, Any]) -> None:
        """The gradients of keys in their own order from sums over parts of the queries, of dbias over some heads."""
        batch, length, parts, group = *self.key.shape[:2], self.parts, self.query.shape[2] // self.bias_heads
        size, rows = math.prod(self.key.shape), batch * self.bias_heads
        names = [name for name, wanted in zip(("key", "value", "bias"), self.wanted) if wanted]
        partials = {name: self.library.empty((parts.count * size,), "float32", self.device)
                    for name in names if name != "bias"}
        sums = {"bias": self.bias_sums} | {name: self.library.pointer(array) for name, array in partials.items()}
        fields = fields | {f"partial_{name}": sums[name] for name in names}
        sm90_backward.launch_dkv(self.runtime, self.call, self.problem, 0, fields, self.tickets + 4, parts,
                                 self.query_sums)
        add_parts(self.runtime, self.library, self.device, self.key.dtype,
                  {**{of + name: fields[of + name] for name in names for of in ("partial_", "d")},
                   "size": size, "parts": parts.count, "rows": rows, "group": group, "length": length})

    def _entries(self) -> int:
        """Of the lists of super-tiles; 0: there are none."""
        lists = self.supers or self.dense
        return 0 if lists is None else self.key.shape[0] * self.key.shape[2] * lists.entries

    def _lists(self) -> tuple[dict[str, int], bool]:
        """The lists of super-tiles in the kernels' parameters, and whether sums over a super-tile are partial ones."""
        if self.dense is not None:
            packed = self.problem.packed_mask(self.runtime, self.stream)
            assert packed is not None
            return {**packed.fields, **self.dense.fields}, self.dense.partial
        return ({}, False) if self.supers is None else (self.supers.fields, True)

    def _portable_key_gradients(self, fields: dict[str, Any], entries: int) -> None:
        problem, tile, bits = self.problem, self._key_tile(), self.dense is not None
        batch, key_length, kv_heads, head_dim = self.key.shape
        dim_slices = 2 if head_dim > 128 else 1
        kernel = _dkv_kernel(self.runtime, self.device.index, self.element, head_dim, self.vector, tile,
                             "KEYS_LISTED" if entries else "KEYS_CONTIGUOUS", problem.tests_intervals,
                             problem.tests_causality, problem.bias_kind, self.softcap, dim_slices, *self.wanted,
                             bits, problem.bias_element, problem.count > 0)
        tiles = (entries // tile.block_n if entries
                 else batch * kv_heads * tile_count(key_length, tile.block_n, problem.count))
        kernel.launch(tiles * dim_slices, 32 * tile.warps, problem.pack(None, **fields), self.stream, pdl=False)


# ---- kernels by the fields of their configurations, which hash faster than the configurations ----
@functools.cache
def _preprocess_kernel(runtime: Runtime, index: int, element: str, head_dim: int, vector: bool) -> LoadedKernel:
    config = BackwardPreprocessConfig(element=element, head_dim=head_dim, vector=vector)
    return runtime.load(config, "backward_preprocess", index)


@functools.cache
def _dq_kernel(runtime: Runtime, index: int, entry: str, element: str, head_dim: int, vector: bool, heads: int,
               tile: Tile, keys: str, causal: bool, bias: int, softcap: bool, bits: bool, bias_element: str,
               sequences: bool, dbias: bool) -> LoadedKernel:
    runtime.check_layout(index)
    config = BackwardDqConfig(element=element, head_dim=head_dim, vector=vector, heads=heads, **tile._asdict(),
                              keys=keys, causal=causal, bias=bias, softcap=softcap, bits=bits,
                              bias_element=bias_element, sequences=sequences, dbias=dbias)
    return runtime.load(config, entry, index, config.shared_bytes)


@functools.cache
def _dkv_kernel(runtime: Runtime, index: int, element: str, head_dim: int, vector: bool, tile: KeyTile, keys: str,
                intervals: bool, causal: bool, bias: int, softcap: bool, dim_slices: int, dkey: bool, dvalue: bool,
                dbias: bool, bits: bool, bias_element: str, sequences: bool) -> LoadedKernel:
    runtime.check_layout(index)
    config = BackwardDkvConfig(element=element, head_dim=head_dim, vector=vector, **tile._asdict(), keys=keys,
                               intervals=intervals, causal=causal, bias=bias, softcap=softcap, dim_slices=dim_slices,
                               dkey=dkey, dvalue=dvalue, dbias=dbias, bits=bits, bias_element=bias_element,
                               sequences=sequences)
    return runtime.load(config, "backward_dkv", index, config.shared_bytes)


@functools.cache
def _dbias_kernel(runtime: Runtime, index: int, element: str, head_dim: int, vector: bool, tile: Tile, causal: bool,
                  softcap: bool, bits: bool, bias_element: str, intervals: bool, sum_keys: bool) -> LoadedKernel:
    runtime.check_layout(index)
    config = BackwardDbiasConfig(element=element, head_dim=head_dim, vector=vector, heads=1, **tile._asdict(),
                                 keys="KEYS_CONTIGUOUS", causal=causal, bias=BIAS_DENSE, softcap=softcap, bits=bits,
                                 bias_element=bias_element, intervals=intervals, sum_keys=sum_keys)
    return runtime.load(config, "backward_dbias", index, config.shared_bytes)


@functools.cache
def _reduce_kernel(runtime: Runtime, index: int, element: str, head_dim: int, vector: bool, causal: bool, dkey: bool,
                   dvalue: bool, dbias: bool, sequences: bool, bits: bool) -> LoadedKernel:
    config = BackwardReduceConfig(element=element, head_dim=head_dim, vector=vector, causal=causal, dkey=dkey,
                                  dvalue=dvalue, dbias=dbias, sequences=sequences, bits=bits)
    return runtime.load(config, "backward_reduce", index)
