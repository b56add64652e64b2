"""The decode cache, one token at a time (SPEC section 7): one launch per token, whatever the history.

The slots of a (sequence, kv head) are split among blocks; the last block to finish combines their results and updates
the state (``kernels/decode/step.cu``). Blocks exchange results through arrays that are made at the first step and kept
with the state, so that later steps allocate nothing and a CUDA graph of a step can be replayed. These arrays need no
initial values, except the tickets, which are made with the state. On Hopper the blocks of a step with few heads form
clusters and exchange results in shared memory, unless numbers of slots differ: then heads have as many blocks as their
slots fill, and an array says to which head a block belongs.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.attention.problem import rows_aligned
from cupy_dma.backends.cuda.attention.split import (
    BLOCK_STEPS,
    STEP,
    WARPS,
    SplitConfig,
    choose_split_size,
    choose_splits,
    min_blocks,
    rows_of_group,
)
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.configs import ELEMENT_BYTES, ELEMENTS, blocks
from cupy_dma.backends.cuda.runtime.device import LoadedKernel, Runtime
from cupy_dma.cache.state import CacheState, ExtendCall
from cupy_dma.masks.runs import NEVER

STEPS = 8  # calls of up to this many tokens run token by token
CLUSTER, CLUSTER_WARPS, CLUSTER_STEPS = 8, 8, 3  # blocks of a cluster, warps of such a block, and its BLOCK_STEPS
CANDIDATE_WORDS = 6  # of struct Candidate


@dataclass(frozen=True)
class StepConfig(SplitConfig):
    source = "decode/step.cu"
    attend: bool
    cluster: int  # blocks of a cluster, 1 = none
    delay: bool = False  # whether the bias is delayed
    ragged: bool = False  # whether numbers of slots differ

    def shared_bytes(self, num_splits: int) -> int:
        """``struct StepShared`` and the weights."""
        pieces = 16 // ELEMENT_BYTES[self.element]
        token = 16 * (4 * blocks(self.head_dim, 4 * pieces) + 8 * blocks(self.value_dim, 8 * pieces))
        found = self.cluster * (4 * self.rows * (self.value_dim + 2) + 24) + 16 if self.cluster > 1 else 0
        return super().shared_bytes(num_splits) + token + found + 24 * self.warps + 32


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
    return call.cu_seqlens is None and 1 <= call.length <= STEPS and state.key.dtype in ELEMENTS


def step(runtime: Runtime, state: CacheState, call: ExtendCall) -> tuple[Any, Any]:
    """``out (B, L, H, Dv)`` and ``lse (B, H, L)`` of a call that ``serves``, None if not requested; updates the state.
    One launch per token."""
    library, device, query = state.library, state.device, call.query
    index, batch, length = device.index, state.batch, call.length
    heads = 0 if query is None else query.shape[2]
    out = lse = None
    if query is not None:
        shape = batch, length, heads, state.value_dim
        out = call.out.array if call.out else library.empty(shape, query.dtype, device)
        if call.lse:
            lse = call.lse.array
        elif call.return_lse:
            lse = library.empty((batch, heads, length), "float32", device)
    if batch == 0:
        return out, lse
    group = heads // state.kv_heads
    if state.segments is None:
        plan = split(state.key.shape, state.value_dim, group, state.key.dtype, runtime.num_sms(index),
                     runtime.hopper(index))
    else:
        plan = _split_segments(state, group, runtime.num_sms(index))
    operands = (call.key, call.value) if query is None else (query, call.key, call.value)
    kernel = _kernel(runtime, index, plan.num_splits, ELEMENTS[state.key.dtype], state.head_dim, state.value_dim,
                     rows_aligned(*operands), plan.rows, plan.warps, call.softcap > 0.0,
                     min_blocks(state.head_dim, state.value_dim, state.key.dtype, plan.rows, plan.cluster),
                     query is not None, plan.cluster, call.bias_delay > 0 or not call.is_biased,
                     state.segments is not None)
    fixed, scratch = _fixed(state, plan, heads)
    fields = {**fixed, **_moving(call)}
    if out is not None:
        fields["out"] = library.pointer(out)
    if lse is not None:
        fields["lse"] = library.pointer(lse)
    pack, stream = jit.params("decode/step.cu", "StepParams").pack_some, library.stream(device)
    with runtime.on(device):
        for token in range(length):
            kernel.launch(plan.grid, 32 * plan.warps, pack(fields, {"token": token}), stream)
    del scratch  # a captured step needs it until here
    return out, lse


@functools.lru_cache(maxsize=1024)
def split(shape: tuple[int, int, int, int], value_dim: int, group: int, dtype: str, num_sms: int,
          clusters: bool) -> SplitPlan:
    """The blocks of a step for keys ``(B, Hkv, R, D)`` and GQA groups of ``group`` query heads; in ``clusters``, if the
    GPU has them and there are few heads."""
    batch, kv_heads, slots, head_dim = shape
    rows, sets = rows_of_group(group, head_dim, value_dim, dtype)
    tiles = batch * kv_heads * sets
    num_splits, split_size = choose_splits(tiles, slots, num_sms * min_blocks(head_dim, value_dim, dtype, rows))
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
        rows, sets = rows_of_group(group, state.head_dim, state.value_dim, state.key.dtype)
        sizes, fitting = state.segments.sizes, min_blocks(state.head_dim, state.value_dim, state.key.dtype, rows)
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
            delay: bool, ragged: bool) -> LoadedKernel:
    config = StepConfig(element=element, head_dim=head_dim, value_dim=value_dim, vector=vector, rows=rows, warps=warps,
                        softcap=softcap, min_blocks=min_blocks, attend=attend, cluster=cluster, delay=delay,
                        ragged=ragged)
    return runtime.load(config, "decode_step", index, config.shared_bytes(num_splits))


def _fixed(state: CacheState, plan: SplitPlan, heads: int) -> tuple[dict[str, Any], list[Operand]]:
    """Parameters that are the same at every step of this state; kept with it, and the arrays that they point to.

    If a step is captured before any has run, its arrays belong to the graph: they are returned, not kept.
    """
    name, arrays = ("decode step", heads), {}
    found = state.workspace.get(name)
    if found is None:
        pairs, splits = state.batch * state.kv_heads, plan.grid // plan.sets  # of all pairs
        tiles = plan.grid if plan.grid > pairs and plan.cluster == 1 else 0  # a single split needs none
        sizes = {"partial": tiles * plan.rows * state.value_dim if heads else 0,
                 "partial_state": 2 * tiles * plan.rows, "candidates": CANDIDATE_WORDS * splits}
        arrays = {key: _made(state, f"{name} {key}", size) for key, size in sizes.items()}
        segments = {}
        if state.segments is not None:
            arrays["segments"] = _segments(state, plan, name)
            segments = {"num_splits": splits, "pairs": pairs}
        found = {key: array.pointer for key, array in arrays.items()} | {
            "tickets": state.tickets.pointer,
            "key": state.key.pointer, "value": state.value.pointer, "score": state.scores.pointer,
            "position": state.positions.pointer, "in_top": state.in_top.pointer, "lengths": state.lengths.pointer,
            "lowest": state.lowest.pointer, "lowest_score": state.lowest_score.pointer, "free": state.free.pointer,
            "kv_heads": state.kv_heads, "group": heads // state.kv_heads, "sets": plan.sets,
            "num_splits": plan.num_splits, "split_size": plan.split_size, "slots": state.rows,
            "sinks": state.sinks, "recent": state.recent, "threshold": state.threshold} | segments
        if not state.library.is_capturing(state.device):
            state.workspace.update({array.name: array for array in arrays.values()} | {name: found})
    return found, list(arrays.values())


def _segments(state: CacheState, plan: SplitPlan, name: Any) -> Operand:
    """For each split of all, ``struct Segment`` of what it belongs to: int32 ``(splits, 4)``, made on the device."""
    library, device, splits = state.library, state.device, plan.grid // plan.sets
    assert state.segments is not None
    with library.on(device):
        found = library.full((splits, 4), 0, "int32", device)
        start, slots = (x.array.reshape(-1) for x in (state.segments.start, state.segments.count))
        each = (slots + (plan.split_size - 1)) // plan.split_size
        end = library.cumsum(each)
        pair = library.astype(library.search_right(end, library.arange(0, splits, device)), "int64")
        for column, values in enumerate((start[pair], slots[pair], pair, (end - each)[pair])):
            found[:, column] = values
    return library.describe(found, f"{name} segments")


def _made(state: CacheState, name: str, size: int) -> Operand:
    """An array of 4-byte words."""
    library = state.library
    return library.describe(library.empty((max(size, 2),), "int32", state.device), name)


def _moving(call: ExtendCall) -> dict[str, Any]:
    key, value, scores, query, counts = call.key, call.value, call.scores, call.query, call.lengths
    fields: dict[str, Any] = {
        "new_key": key.pointer, "new_value": value.pointer, "new_score": scores.pointer,
        "key_batch": key.strides[0], "key_row": key.strides[1], "key_head": key.strides[2],
        "value_batch": value.strides[0], "value_row": value.strides[1], "value_head": value.strides[2],
        "score_batch": scores.strides[0], "score_head": scores.strides[1], "score_token": scores.strides[2],
        "length": call.length, "scale": call.scale, "softcap": call.softcap,
        "delay": call.bias_delay if call.is_biased else NEVER}
    if query is not None:
        fields.update(query=query.pointer, query_batch=query.strides[0], query_row=query.strides[1],
                      query_head=query.strides[2])
    if counts is not None:
        fields.update(counts=counts.pointer, count_words=2 if counts.dtype == "int64" else 1)
    return fields
