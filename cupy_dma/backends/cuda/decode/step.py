"""The decode cache, a few tokens at a time (SPEC section 7), whatever the history.

The slots of a (sequence, kv head) are split among blocks; the last block to finish combines their results and updates
the state (``kernels/decode/step.cu``). Blocks exchange results through arrays that are made at the first step and kept
with the state, so that later steps allocate nothing and a CUDA graph of a step can be replayed. These arrays need no
initial values, except the tickets, which are made with the state. On Hopper the blocks of a step with few heads form
clusters and exchange results in shared memory, unless numbers of slots differ: then heads have as many blocks as their
slots fill, and an array says to which head a block belongs.

One token takes one launch. Several take two: ``kernels/decode/plan.cu`` finds what each of them changes, then the step
attends from all of them, with the blocks of a single token, so that results do not depend on how tokens are grouped.
Where a tile of the tensor cores has no room for the query heads of all tokens, there are more launches of the step.
Where it has none for two tokens, each token takes a launch without a plan. A call that does not commit always has a
plan. A call of several tokens without queries is one launch, of the plan.

A cache with 8-bit rows takes one launch more, ahead of these: ``kernels/decode/quantize_rows.cu`` makes codes of the
new rows.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.attention.problem import rows_aligned
from cupy_dma.backends.cuda.attention.split import (
    BLOCK_STEPS,
    ROW_BYTES,
    STEP,
    WARPS,
    SplitConfig,
    choose_split_size,
    choose_splits,
    max_rows,
    min_blocks,
    rows_of_group,
)
from cupy_dma.backends.cuda.decode.codes import STORAGE, codes_of, made
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.configs import ELEMENT_BYTES, ELEMENTS, blocks
from cupy_dma.backends.cuda.runtime.device import LoadedKernel, Runtime
from cupy_dma.cache.state import CacheState, ExtendCall
from cupy_dma.masks.runs import NEVER

STEPS = 8  # the most tokens of a call; MAX_TOKENS of the kernels
CLUSTER, CLUSTER_WARPS, CLUSTER_STEPS = 8, 8, 3  # blocks of a cluster, warps of such a block, and its BLOCK_STEPS
CANDIDATE_WORDS, PLAN_WORDS = 6, 52  # of struct Candidate and struct Plan
PLAN_WARPS = 8  # of a block of the plan


@dataclass(frozen=True)
class StepConfig(SplitConfig):
    source = "decode/step.cu"
    attend: bool
    cluster: int  # blocks of a cluster, 1 = none
    delay: bool = False  # whether the bias is delayed
    ragged: bool = False  # whether numbers of slots differ
    slots: bool = False  # whether the call's sequences are some of the cache's
    planned: bool = False  # whether a plan says what the tokens change
    tokens: int = 1  # that a launch attends from; ``rows`` are those of all of them
    storage: int = 0  # of rows (``STORAGE``), 0 = as they are given

    def shared_bytes(self, num_splits: int) -> int:
        """``struct StepShared`` and the weights."""
        pieces = 16 // ELEMENT_BYTES[self.element]  # numbers of a piece
        token = 8 + (4 * blocks(self.head_dim, 4 * pieces) + 8 * blocks(self.value_dim, 8 * pieces)) * (
            pieces if self.storage else 16)
        tokens = STEPS * (token + 24) if self.planned else token
        found = self.cluster * (4 * self.rows * (self.value_dim + 2) + 24) + 16 if self.cluster > 1 else 0
        return super().shared_bytes(num_splits) + tokens + found + 24 * self.warps + 32


@dataclass(frozen=True)
class PlanConfig(SplitConfig):
    source = "decode/plan.cu"
    attend: bool
    ragged: bool
    slots: bool
    delay: bool = False
    storage: int = 0


@dataclass(frozen=True)
class SplitPlan:
    """How the slots of a cache are split."""

    rows: int  # query heads of a block, all of one GQA group
    sets: int  # of query heads
    num_splits: int  # of the tile with the most slots
    split_size: int  # slots of a split
    grid: int
    warps: int  # of a block
    cluster: int  # blocks of a cluster, 1 = none


def serves(state: CacheState, call: ExtendCall) -> bool:
    """Whether ``step`` supports the call: few tokens per sequence, and a type that the kernels support."""
    return call.cu_seqlens is None and 1 <= call.length <= STEPS and state.dtype in ELEMENTS


def step(runtime: Runtime, state: CacheState, call: ExtendCall) -> tuple[Any, Any]:
    """``out (n, L, H, Dv)`` and ``lse (n, H, L)`` of a call that ``serves``, None if not requested; updates the state
    if the call commits."""
    library, device, query = state.library, state.device, call.query
    index, batch, length = device.index, call.batch, call.length
    heads = 0 if query is None else query.shape[2]
    out = lse = None
    if query is not None:
        shape = batch, length, heads, state.value_dim
        out = call.out.array if call.out else library.empty(shape, query.dtype, device)
        if call.lse:
            lse = call.lse.array
        elif call.return_lse:
            lse = library.empty((batch, heads, length), "float32", device)
    if batch == 0 or not call.commits and query is None:
        return out, lse
    group, storage = heads // state.kv_heads, STORAGE[state.storage]
    if state.segments is None:
        plan = split((batch, state.kv_heads, state.rows, state.head_dim), state.value_dim, group, state.dtype,
                     runtime.num_sms(index), runtime.hopper(index))
    else:
        plan = _split_segments(state, group, runtime.num_sms(index))
    tokens = tokens_of_launch(length, plan.rows, plan.sets, state) if query is not None else length
    some, ragged = call.slots is not None, state.segments is not None
    planned = tokens > 1 or not call.commits or some and ragged
    operands = (call.key, call.value) if query is None else (query, call.key, call.value)
    kind = ELEMENTS[state.dtype], state.head_dim, state.value_dim, rows_aligned(*operands)
    fixed, scratch = _fixed(state, plan, heads, batch, tokens, planned)
    fields = {**fixed, **_moving(call)}
    codes = codes_of(state, call) if storage else None
    if codes is not None:
        fields |= codes.fields
        scratch += codes.arrays
    if out is not None:
        fields["out"] = library.pointer(out)
    if lse is not None:
        fields["lse"] = library.pointer(lse)
    pack, stream = jit.params("decode/step.cu", "StepParams").pack_some, library.stream(device)
    with runtime.on(device):
        if codes is not None:
            codes.make(runtime, index, *kind[:3], storage, stream)
        if planned:
            _plan_kernel(runtime, index, *kind, query is not None, ragged, some, storage).launch(
                batch * state.kv_heads, 32 * PLAN_WARPS, pack(fields), stream)
        if query is not None or not planned:
            rows = plan.rows * (tokens if planned else 1)
            kernel = _kernel(runtime, index, plan.num_splits, *kind, rows, plan.warps, call.softcap > 0.0,
                             min_blocks(state.head_dim, state.value_dim, state.dtype, rows, plan.cluster),
                             query is not None, plan.cluster, call.bias_delay > 0 or not call.is_biased, ragged, some,
                             planned, tokens, storage)
            for token in range(0, length, tokens):
                kernel.launch(plan.grid, 32 * plan.warps, pack(fields, {"token": token}), stream)
    del scratch  # a captured step needs it until here
    return out, lse


def tokens_of_launch(length: int, rows: int, sets: int, state: CacheState) -> int:
    """From how many of a call's ``length`` tokens a launch attends: a power of 2, so that there are few kernels. Rows
    of more than 512 bytes leave no registers for several."""
    row_bytes = max(state.head_dim, state.value_dim) * ELEMENT_BYTES[ELEMENTS[state.dtype]]
    fitting = 1 if sets > 1 or row_bytes > 2 * ROW_BYTES else max_rows(
        state.head_dim, state.value_dim, state.dtype) // rows
    return next(n for n in (1, 2, 4, 8) if n >= length or 2 * n > fitting)


@functools.lru_cache(maxsize=1024)
def split(shape: tuple[int, int, int, int], value_dim: int, group: int, dtype: str, num_sms: int,
          clusters: bool) -> SplitPlan:
    """The blocks of a step for keys ``(B, Hkv, R, D)`` and GQA groups of ``group`` query heads; in ``clusters``, if the
    GPU has them and there are few heads."""
    batch, kv_heads, slots, head_dim = shape
    rows, sets = rows_of_group(group, head_dim, value_dim, dtype)
    tiles = batch * kv_heads * sets
    resident = num_sms * min_blocks(head_dim, value_dim, dtype, rows)
    num_splits, split_size = choose_splits(tiles, slots, resident)
    if clusters and sets == 1 and clusters_pay(tiles, slots, num_splits, split_size, num_sms):
        return SplitPlan(rows=rows, sets=sets, num_splits=CLUSTER, split_size=cluster_split_size(slots),
                         grid=tiles * CLUSTER, warps=CLUSTER_WARPS, cluster=CLUSTER)
    return SplitPlan(rows=rows, sets=sets, num_splits=num_splits, split_size=split_size, grid=tiles * num_splits,
                     warps=WARPS, cluster=1)


def _split_segments(state: CacheState, group: int, num_sms: int) -> SplitPlan:
    """The same for a state with segments, with which it is kept."""
    found = state.workspace.get(("split", group))
    if found is None:
        assert state.segments is not None
        rows, sets = rows_of_group(group, state.head_dim, state.value_dim, state.dtype)
        sizes, fitting = state.segments.sizes, min_blocks(state.head_dim, state.value_dim, state.dtype, rows)
        size = choose_split_size(sizes, sets, num_sms * fitting)
        found = SplitPlan(rows=rows, sets=sets, num_splits=blocks(max(sizes), size), split_size=size,
                          grid=sets * sum(blocks(each, size) for each in sizes), warps=WARPS, cluster=1)
        state.workspace["split", group] = found
    return found


def clusters_pay(tiles: int, slots: int, num_splits: int, split_size: int, num_sms: int) -> bool:
    """Whether a cluster for each of the ``tiles`` finishes before ``num_splits`` blocks with ``split_size`` slots each.
    A cluster must fit into one group of SMs, so clusters are not used for more than half of all SMs."""
    if num_splits == 1 or 2 * tiles * CLUSTER > num_sms:
        return False
    steps = blocks(cluster_split_size(slots), CLUSTER_WARPS * STEP)
    return CLUSTER_STEPS + steps < BLOCK_STEPS + blocks(split_size, WARPS * STEP)


def cluster_split_size(slots: int) -> int:
    """Slots of a block in a cluster; the last blocks may have none."""
    return blocks(blocks(slots, CLUSTER), STEP) * STEP


@functools.cache  # keyed by fields, which hash faster than a configuration
def _kernel(runtime: Runtime, index: int, num_splits: int, element: str, head_dim: int, value_dim: int, vector: bool,
            rows: int, warps: int, softcap: bool, min_blocks: int, attend: bool, cluster: int,
            delay: bool, ragged: bool, slots: bool = False, planned: bool = False, tokens: int = 1,
            storage: int = 0) -> LoadedKernel:
    config = StepConfig(element=element, head_dim=head_dim, value_dim=value_dim, vector=vector, rows=rows, warps=warps,
                        softcap=softcap, min_blocks=min_blocks, attend=attend, cluster=cluster, delay=delay,
                        ragged=ragged, slots=slots, planned=planned, tokens=tokens, storage=storage)
    return runtime.load(config, "decode_step", index, config.shared_bytes(num_splits))


@functools.cache
def _plan_kernel(runtime: Runtime, index: int, element: str, head_dim: int, value_dim: int, vector: bool, attend: bool,
                 ragged: bool, slots: bool, storage: int) -> LoadedKernel:
    return runtime.load(PlanConfig(
        element=element, head_dim=head_dim, value_dim=value_dim, vector=vector, rows=1, warps=PLAN_WARPS, softcap=False,
        min_blocks=1, attend=attend, ragged=ragged, slots=slots, storage=storage), "decode_plan", index)


def _fixed(state: CacheState, plan: SplitPlan, heads: int, batch: int, tokens: int,
           planned: bool) -> tuple[dict[str, Any], list[Operand]]:
    """Parameters that are the same at every such step of this state; kept with it, and the arrays that they point to.

    If a step is captured before any has run, its arrays belong to the graph: they are returned, not kept.
    """
    name, arrays = ("decode step", heads, batch, tokens, planned), {}
    found = state.workspace.get(name)
    if found is None:
        pairs, splits = state.batch * state.kv_heads, plan.grid // plan.sets  # of all pairs
        tiles = plan.grid if plan.num_splits * plan.sets > 1 and plan.cluster == 1 else 0  # a single split needs none
        rows = plan.rows * (tokens if heads else 0)
        sizes = {"partial": tiles * rows * state.value_dim, "partial_state": 2 * tiles * rows}
        if planned:
            sizes["plans"] = PLAN_WORDS * batch * state.kv_heads
        else:
            sizes["candidates"] = CANDIDATE_WORDS * splits
        arrays = {key: made(state, f"{name} {key}", size) for key, size in sizes.items() if heads or not planned}
        segments = {}
        if state.segments is not None:
            arrays["segments"] = _segments(state, plan, name)
            segments = {"num_splits": splits, "segment_start": state.segments.start.pointer,
                        "segment_slots": state.segments.count.pointer}
        found = {key: array.pointer for key, array in arrays.items()} | {
            "tickets": state.tickets.pointer,
            "key": state.key.pointer, "value": state.value.pointer, "score": state.scores.pointer,
            "position": state.positions.pointer, "in_top": state.in_top.pointer, "lengths": state.lengths.pointer,
            "lowest": state.lowest.pointer, "lowest_score": state.lowest_score.pointer, "free": state.free.pointer,
            "kv_heads": state.kv_heads, "group": heads // state.kv_heads, "sets": plan.sets, "pairs": pairs,
            "num_splits": plan.num_splits, "split_size": plan.split_size, "slots": state.rows,
            "sinks": state.sinks, "recent": state.recent, "threshold": state.threshold} | segments
        if not state.library.is_capturing(state.device):
            state.workspace.update({array.name: array for array in arrays.values()} | {name: found})
    return found, list(arrays.values())


def _segments(state: CacheState, plan: SplitPlan, name: Any) -> Operand:
    """For each split of all, ``struct Segment`` of what it belongs to: int32 ``(splits, 4)``, made on the device. Those
    of the longest segments come first, so that no long block is the last to run."""
    library, device, splits = state.library, state.device, plan.grid // plan.sets
    assert state.segments is not None and state.segments.order is not None
    with library.on(device):
        found, order = library.full((splits, 4), 0, "int32", device), state.segments.order.array
        start, slots = (x.array.reshape(-1)[order] for x in (state.segments.start, state.segments.count))
        each = (slots + (plan.split_size - 1)) // plan.split_size
        end = library.cumsum(each)
        place = library.astype(library.search_right(end, library.arange(0, splits, device)), "int64")
        for column, values in enumerate((start, slots, order, end - each)):
            found[:, column] = values[place]
    return library.describe(found, f"{name} segments")


def _moving(call: ExtendCall) -> dict[str, Any]:
    key, value, scores, query, counts = call.key, call.value, call.scores, call.query, call.lengths
    fields: dict[str, Any] = {
        "new_key": key.pointer, "new_value": value.pointer, "new_score": scores.pointer,
        "key_batch": key.strides[0], "key_row": key.strides[1], "key_head": key.strides[2],
        "value_batch": value.strides[0], "value_row": value.strides[1], "value_head": value.strides[2],
        "score_batch": scores.strides[0], "score_head": scores.strides[1], "score_token": scores.strides[2],
        "length": call.length, "calls": call.batch, "commits": call.commits,
        "scale": call.scale, "softcap": call.softcap,
        "delay": call.bias_delay if call.is_biased else NEVER}
    if query is not None:
        fields.update(query=query.pointer, query_batch=query.strides[0], query_row=query.strides[1],
                      query_head=query.strides[2])
    if call.slots is not None:
        fields["slots_of"] = call.slots.pointer
    if counts is not None:
        fields.update(counts=counts.pointer, count_words=2 if counts.dtype == "int64" else 1)
    return fields
