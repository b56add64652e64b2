"""Gradients of the attention on the device (SPEC section 6): two passes, no atomics, the same bits on every run. Only
Hopper has one pass, without such lists, where the call need not be deterministic (sm90_backward.py).

1. ``backward_preprocess``: ``delta_i = dout_i . out_i - dlse_i``; clears what later kernels add to.
2. ``backward_dq``: dq, query-major, over the same key lists as the forward; or behind 3, from dS that the Hopper key
   pass has stored (sm90_stored.py).
   Also the gradient of a dense bias that belongs to one head of one batch entry.
3. ``backward_dkv``: dk, dv and the bias gradient, key-stationary. Where few keys meet a tile, and under dense masks,
   the keys of each super-tile of queries are gathered and their sums kept in float32, which ``backward_reduce`` adds in
   order; else each key looks at every query that may see it, and keys are in their own order, or under a mask without a
   bound in that of their lifetimes.
4. ``backward_dbias``: the gradient of a dense bias that heads, batch entries or keys share, summed where it is made.

2 to 4 are launched without PDL: their blocks, of long work, would gather behind the many short ones of
``backward_preprocess`` (B1 H2/1 D64, 4096 tokens: 151 us for 119).
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.attention import sm90_backward, sm90_stored
from cupy_dma.backends.cuda.attention.problem import Problem, rows_aligned
from cupy_dma.backends.cuda.attention.sm90_splits import KeyPlan, QuerySplits, key_plan_of, query_splits_of
from cupy_dma.backends.cuda.attention.tiles import backward_dbias_tile, backward_dkv_tile, backward_dq_tile
from cupy_dma.backends.cuda.lists.dense_macro_tiles import DenseSupers, dense_supers
from cupy_dma.backends.cuda.lists.intervals import Fields, KeyOrder, SuperLists, key_order, super_lists
from cupy_dma.backends.cuda.lists.varlen import tile_count
from cupy_dma.backends.cuda.runtime.builder import Array, Builder
from cupy_dma.backends.cuda.runtime.configs import (
    BIAS_DENSE,
    ELEMENTS,
    PREPROCESS_QUERIES,
    REDUCE_THREADS,
    REDUCE_WARPS,
    BackwardDbiasConfig,
    BackwardDkvConfig,
    BackwardDqConfig,
    BackwardPreprocessConfig,
    BackwardReduceConfig,
    KeyTile,
    blocks,
)
from cupy_dma.backends.cuda.runtime.params import Packed, Ref, pack_pointer
from cupy_dma.backends.cuda.runtime.sums import add_splits, sum_to_bias

if TYPE_CHECKING:
    from cupy_dma.calls.types import AttentionBackwardCall

Gradients = tuple[Array | None, Array | None, Array | None, Array | None]


def attention_backward(build: Builder, call: AttentionBackwardCall) -> Gradients:
    """Gradients of query, key, value and bias (4-D, its given shape and type); None for what is not needed."""
    own, problem = call.forward, Problem(call.forward)
    if own.sequences is not None and own.sequences.page_table is not None:
        raise NotImplementedError("block_table must be None: paged attention has no backward pass")
    if 0 in (own.batch, own.query_length, own.key.shape[1]):
        operands = (("query", own.query), ("key", own.key), ("value", own.value), ("bias", own.bias))
        query, key, value, bias = (build.zeros(x.shape, x.dtype) if name in call.needs and x is not None else None
                                   for name, x in operands)
        return query, key, value, bias
    problem.move_mask_to_rows(build)
    return _Backward(build, call, problem, _passes(build, call, problem)).launch()


@dataclass(frozen=True)
class _Passes:
    """Which kernels make the gradients of a call."""

    wanted: tuple[bool, bool, bool]  # of key, value and bias by backward_dkv; a dense bias gets its gradient elsewhere
    dense_bias: bool  # its gradient is wanted
    vector: bool  # all rows are aligned
    hopper_keys: bool  # backward_dkv is the Hopper kernel
    hopper_query: bool  # likewise, of the gradient of the queries, or at least of delta
    one_pass: bool  # the Hopper key pass makes the gradient of the queries, too
    queries_first: bool  # the Hopper query pass is the first kernel: it makes delta, too
    supers: SuperLists | None  # of an interval mask, where keys are gathered
    dense: DenseSupers | None  # of a dense mask
    entries: int  # of those lists, of all rows
    order: KeyOrder | None  # of an interval mask without a bound
    stored: sm90_stored.Chunks | None  # of the lists, where the Hopper key pass stores dS
    splits: QuerySplits  # of the Hopper kernel's tiles of keys in their own order
    plan: KeyPlan | None  # of its tiles of keys in the order of their lifetimes
    bias_heads: int  # of the dbias that kernels write

    @property
    def keys(self) -> str:
        """In which order backward_dkv takes keys."""
        return "KEYS_LISTED" if self.entries else "KEYS_CONTIGUOUS" if self.order is None else "KEYS_SHARED"


def _passes(build: Builder, call: AttentionBackwardCall, problem: Problem) -> _Passes:
    own, needs = call.forward, call.needs
    dense_bias = "bias" in needs and problem.bias_kind == BIAS_DENSE
    wanted = "key" in needs, "value" in needs, "bias" in needs and not dense_bias
    vector = problem.vector and rows_aligned(call.dout, call.out)
    served, one_pass_wanted = (build, call, problem, vector), build.overrides.one_pass
    hopper_keys = build.takes(sm90_backward.NAME_KEYS, sm90_backward.reasons_keys(*served))
    hopper_query = build.takes(sm90_backward.NAME_QUERY, sm90_backward.reasons_query(*served))
    one_pass, supers, dense, entries, order, plan = False, None, None, 0, None, None
    splits, bias_heads = QuerySplits(), own.heads
    if any(wanted):
        can_one_pass = hopper_keys and one_pass_wanted is not False and sm90_backward.can_one_pass(call, problem)
        packed = problem.packed_mask(build)
        if packed is not None:
            dense = dense_supers(build, packed, problem.params["mask_heads"], own.kv_heads)
            entries = dense.entries
        elif problem.mask is not None and not problem.by_head and (
                not can_one_pass or one_pass_wanted
                or sm90_backward.lists_pay(build.runtime, call, problem)):
            block_n = sm90_backward.block_n(own.head_dim) if hopper_keys else _key_tile(build, call, problem).block_n
            supers = super_lists(build, problem.mask, own.query_length, block_n, problem.causal, own.sequences)
            entries = 0 if supers is None else supers.entries
        entries *= own.batch * own.kv_heads
        one_pass = can_one_pass and (supers is None or bool(one_pass_wanted))
        if hopper_keys and not one_pass and build.overrides.hopper is None:
            hopper_keys = build.takes(sm90_backward.NAME_KEYS, [] if sm90_backward.has_enough_tiles(
                build.runtime, call, problem, entries) else ["too few tiles for two passes"])
        if problem.mask is not None and packed is None and not problem.by_head:
            order = key_order(build, problem.mask, own.query_length, problem.causal, own.sequences)
        if hopper_keys and order is not None:
            plan = key_plan_of(build, call, problem, one_pass)
        elif hopper_keys:
            splits = build.overrides.query_splits or query_splits_of(build.runtime, call, problem, entries, one_pass)
            bias = own.bias
            if splits.count > 1 and bias is not None and (bias.shape[0], bias.shape[3]) == own.key.shape[:2]:
                bias_heads = bias.shape[1]
    stored = None
    if hopper_keys and not one_pass and build.overrides.stored is not False and build.takes(
            sm90_stored.NAME, sm90_stored.reasons(call, problem, supers, bool(build.overrides.stored))):
        stored = sm90_stored.chunks_of(call, supers)
    queries_first = hopper_query and not one_pass and stored is None and own.head_dim <= sm90_backward.MAX_NARROW_DIM
    return _Passes(wanted, dense_bias, vector, hopper_keys, hopper_query, one_pass, queries_first, supers, dense,
                   entries, order, stored, splits, plan, bias_heads)


def _key_tile(build: Builder, call: AttentionBackwardCall, problem: Problem) -> KeyTile:
    return backward_dkv_tile(call.forward.head_dim, build.shared_memory_limit, problem.size, problem.bias_of_tiles)


class _Backward:
    """The launches of a call that is not empty."""

    def __init__(self, build: Builder, call: AttentionBackwardCall, problem: Problem, passes: _Passes):
        self.build, self.call, self.problem, self.passes = build, call, problem, passes
        own = call.forward
        self.query, self.key, self.element = own.query, own.key, ELEMENTS[own.query.dtype]
        self.batch, self.length, self.heads, self.head_dim = own.query.shape
        #: what attention kernels are specialised in
        self.common: dict[str, Any] = {"element": self.element, "head_dim": self.head_dim, "vector": passes.vector,
                       "causal": problem.tests_causality}
        self.of_tiles: dict[str, Any] = {"bias": problem.bias_kind, "softcap": own.softcap > 0.0,
                                         "bias_element": problem.bias_element, "delay": problem.delay}

    def launch(self) -> Gradients:
        build, call, own, passes = self.build, self.call, self.call.forward, self.passes
        whole = passes.supers is not None or own.sequences is None

        def result(name: str, operand: Operand) -> Array | None:
            if name not in call.needs:
                return None
            make = build.empty if name == "query" or whole else build.zeros  # empty: every element is written
            return make(operand.shape, operand.dtype)

        grads = {name: result(name, x) for name, x in (("query", own.query), ("key", own.key), ("value", own.value))}
        sums, bias_sums, tickets, cleared = self._zeros()
        dbias = rows = None
        if passes.dense_bias:
            rows = self._dense_gradient()
        elif "bias" in call.needs:
            shape = self.batch, passes.bias_heads, self.key.shape[1]
            written = passes.splits.count > 1 or passes.supers is not None
            dbias = (build.empty if written else build.zeros)(shape, "float32")
        results = {f"d{name}": grad for name, grad in grads.items()} | {"dbias": dbias, "dbias_rows": rows}
        dout, out = call.dout, call.out
        fields: Fields = {
            "lse": call.lse.pointer, "delta": build.empty((self.batch, self.heads, self.length), "float32").ref,
            "dlse": call.dlse.pointer if call.dlse else 0, "dout": dout.pointer, "dout_batch": dout.strides[0],
            "dout_row": dout.strides[1], "dout_head": dout.strides[2], "out": out.pointer,
            "out_batch": out.strides[0], "out_row": out.strides[1], "out_head": out.strides[2],
            **{name: array.ref for name, array in results.items() if array is not None}}
        if passes.queries_first:
            assert tickets is not None
            sm90_backward.launch_dq(build, call, self.problem, fields, tickets)
        else:
            preprocess = BackwardPreprocessConfig(element=self.element, head_dim=self.head_dim, vector=passes.vector)
            build.launch(build.load(preprocess, "backward_preprocess"),
                         blocks(self.batch * blocks(self.length, PREPROCESS_QUERIES) * self.heads, REDUCE_WARPS),
                         REDUCE_THREADS,
                         self.problem.pack(None, **fields) + cleared)
            if "query" in call.needs and not passes.one_pass and passes.stored is None:
                if passes.hopper_query:
                    assert tickets is not None
                    sm90_backward.launch_dq(build, call, self.problem, fields, tickets)
                else:
                    self._query_gradient(fields)
        if any(passes.wanted):
            self._key_gradients(fields, sums, bias_sums, tickets)
        if passes.dense_bias and not self._bias_is_own():
            self._bias_gradient(fields)
        if dbias is not None and own.bias is not None:
            rows = sum_to_bias(build, dbias, own.bias, dbias.shape)  # type: ignore[arg-type]
        return grads["query"], grads["key"], grads["value"], rows

    def _zeros(self) -> tuple[Ref | None, Ref | None, Ref | None, Packed]:
        """What Hopper kernels add to: sums of dq in one pass and of dbias over query splits, if there are any, and a
        counter of each launch. In one array, which backward_preprocess clears if it is launched: from which address and
        how many 16 bytes, as its parameters say it."""
        passes, problem = self.passes, self.problem
        if not (passes.hopper_keys or passes.hopper_query):
            return None, None, None, Packed(bytes(16))
        sums = sm90_backward.query_sums(self.call, problem) if passes.one_pass else 0
        bias_sums = 0
        if passes.wanted[2] and passes.plan is not None:
            bias_sums = passes.plan.rows * (self.heads // self.key.shape[2])
        elif passes.wanted[2] and passes.splits.count > 1:
            bias_sums = passes.splits.count * self.batch * self.heads * self.key.shape[1]
        counters = 2 if passes.stored is None else 2 * passes.stored.number
        pieces = blocks(sums + bias_sums + counters, 4)
        begin = (self.build.zeros if passes.queries_first else self.build.empty)((pieces, 4), "float32").ref
        cleared = pack_pointer(begin) + (0 if passes.queries_first else pieces).to_bytes(8, "little")
        return begin if sums else None, begin + 4 * sums, begin + 4 * (sums + bias_sums), cleared

    # ---- queries ----
    def _query_gradient(self, fields: Fields) -> None:
        build, problem = self.build, self.problem
        tile = backward_dq_tile(self.head_dim, build.shared_memory_limit, problem.size, problem.bias_of_tiles)
        queries = tile.block_m // problem.tile_heads
        tiles = tile_count(self.length, queries, problem.count)
        lists = problem.key_lists(build, queries, tile.block_n)
        makes_bias = self.passes.dense_bias and self._bias_is_own()
        config = BackwardDqConfig(**self.common, **self.of_tiles, **tile._asdict(), heads=problem.tile_heads,
                                  keys="KEYS_CONTIGUOUS" if lists is None else lists.keys, bits=problem.bits,
                                  sequences=problem.count > 0, dbias=makes_bias)
        params = problem.pack(lists, tiles=tiles, **fields)
        build.check_layout()
        for entry in ("clear_bias", "backward_dq") if makes_bias and problem.bits else ("backward_dq",):
            build.launch(build.load(config, entry, config.shared_bytes),
                         tiles * (self.heads // problem.tile_heads) * self.batch, 32 * tile.warps, params, pdl=False)

    # ---- keys, values and a bias of keys ----
    def _key_gradients(self, fields: Fields, sums: Ref | None, bias_sums: Ref | None, tickets: Ref | None) -> None:
        build, problem, passes = self.build, self.problem, self.passes
        if passes.splits.count > 1:
            assert bias_sums is not None and tickets is not None
            self._split_key_gradients(fields, sums, bias_sums, tickets)
            return
        (_, key_length, kv_heads, head_dim), entries = self.key.shape, passes.entries
        (lists, partial) = self._lists()
        sizes = dict(zip(("partial_key", "partial_value", "partial_bias"),
                         (head_dim, head_dim, self.heads // kv_heads)))
        rows = passes.plan.rows if passes.plan is not None else entries if partial else 0
        partials = {name: build.empty((rows * size,), "float32").ref
                    for (name, size), wanted in zip(sizes.items(), passes.wanted) if wanted and rows}
        if passes.plan is not None and "partial_bias" in partials and bias_sums is not None:
            partials["partial_bias"] = bias_sums  # zeros: a split writes those of heads that it has steps of
        fields = {**fields, **lists, **partials}
        if passes.stored is not None:
            assert tickets is not None
            sm90_stored.launch(build, self.call, problem, passes.stored, entries, fields, tickets)
        elif passes.hopper_keys:
            assert tickets is not None
            sm90_backward.launch_dkv(build, self.call, problem, passes.keys, entries, fields, tickets + 4,
                                     passes.splits, sums, plan=passes.plan)
        else:
            self._portable_key_gradients(fields)
        if entries:
            dkey, dvalue, dbias = passes.wanted
            config = BackwardReduceConfig(**self.common, dkey=dkey, dvalue=dvalue, dbias=dbias,
                                          sequences=problem.count > 0, bits=passes.dense is not None)
            build.launch(build.load(config, "backward_reduce"),
                         self.batch * kv_heads * blocks(key_length, REDUCE_WARPS), REDUCE_THREADS,
                         problem.pack(None, **fields))

    def _split_key_gradients(self, fields: Fields, sums: Ref | None, bias_sums: Ref, tickets: Ref) -> None:
        """The gradients of keys in their own order from sums over query splits, of dbias over some heads."""
        splits, bias_heads, size = self.passes.splits, self.passes.bias_heads, math.prod(self.key.shape)
        names = [name for name, wanted in zip(("key", "value", "bias"), self.passes.wanted) if wanted]
        partials = {f"partial_{name}": bias_sums if name == "bias"
                    else self.build.empty((splits.count * size,), "float32").ref for name in names}
        fields = fields | partials
        sm90_backward.launch_dkv(self.build, self.call, self.problem, self.passes.keys, 0, fields, tickets + 4, splits,
                                 sums)
        add_splits(self.build, self.key.dtype,
                  {**{of + name: fields[of + name] for name in names for of in ("partial_", "d")}, "size": size,
                   "splits": splits.count, "rows": self.batch * bias_heads, "group": self.heads // bias_heads,
                   "length": self.key.shape[1]})

    def _lists(self) -> tuple[Fields, bool]:
        """The lists of super-tiles in the kernels' parameters, and whether sums over a super-tile are partial ones."""
        passes = self.passes
        if passes.dense is not None:
            packed = self.problem.packed_mask(self.build)
            assert packed is not None
            return {**packed.fields, **passes.dense.fields}, passes.dense.partial
        if passes.order is not None:
            fields, block_n = passes.order.fields, sm90_backward.block_n(self.head_dim)
            return {"list": fields["order"], "summaries": fields[f"summaries_{block_n}"]}, False
        return ({}, False) if passes.supers is None else (passes.supers.fields, True)

    def _portable_key_gradients(self, fields: Fields) -> None:
        build, problem, entries = self.build, self.problem, self.passes.entries
        tile, dim_slices = _key_tile(build, self.call, problem), 2 if self.head_dim > 128 else 1
        dkey, dvalue, dbias = self.passes.wanted
        config = BackwardDkvConfig(**self.common, **self.of_tiles, **tile._asdict(), keys=self.passes.keys,
                                   intervals=problem.tests_intervals, dim_slices=dim_slices, dkey=dkey, dvalue=dvalue,
                                   dbias=dbias, bits=self.passes.dense is not None, sequences=problem.count > 0)
        tiles = entries // tile.block_n if entries else (
            self.batch * self.key.shape[2] * tile_count(self.key.shape[1], tile.block_n, problem.count))
        build.check_layout()
        build.launch(build.load(config, "backward_dkv", config.shared_bytes), tiles * dim_slices, 32 * tile.warps,
                     problem.pack(None, **fields), pdl=False)

    # ---- a dense bias ----
    def _bias_is_own(self) -> bool:
        """Whether every pair of every head has a bias of its own, so that the query pass can write its gradient."""
        bias = self.call.forward.bias
        assert bias is not None
        return bias.shape == (self.batch, self.heads, self.length, self.key.shape[1]) and "query" in self.call.needs

    def _dense_gradient(self) -> Array:
        """An array for the gradient of a dense bias, zeros where no kernel writes."""
        bias, problem = self.problem.bias, self.problem
        assert bias is not None
        hides = problem.mask is not None or problem.causal
        written = problem.bits or not (self._bias_is_own() and hides)  # clear_bias goes by the lists of bits
        return (self.build.empty if written else self.build.zeros)(bias.shape, bias.dtype)

    def _bias_gradient(self, fields: Fields) -> None:
        build, problem, bias = self.build, self.problem, self.problem.bias
        assert bias is not None
        tile = backward_dbias_tile(self.head_dim, build.shared_memory_limit, problem.size, problem.bias_element)
        tiles, sum_keys = blocks(self.length, tile.block_m), bias.shape[3] == 1
        packed = problem.packed_mask(build)
        config = BackwardDbiasConfig(**self.common, **(self.of_tiles | {"bias": BIAS_DENSE}), **tile._asdict(), heads=1,
                                     keys="KEYS_CONTIGUOUS", bits=packed is not None,
                                     intervals=problem.tests_intervals, sum_keys=sum_keys)
        grid = bias.shape[0] * bias.shape[1] * tiles * (1 if sum_keys else blocks(self.key.shape[1], tile.block_n))
        build.check_layout()
        build.launch(build.load(config, "backward_dbias", config.shared_bytes), grid, 32 * tile.warps, problem.pack(
            None, tiles=tiles, dbias_batch=bias.shape[0], dbias_heads=bias.shape[1], **fields,
            **(packed.fields if packed else {})), pdl=False)
