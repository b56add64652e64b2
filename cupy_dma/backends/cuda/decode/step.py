"""The decode cache, one token at a time (SPEC section 7): one launch a token, whatever the history.

Blocks share the slots of a (sequence, kv head); the last of them adds up what they found and changes the state
(``kernels/decode/step.cu``). What they leave for each other lies in arrays that are made at the first step and stay with the
state, so that later steps allocate nothing and a CUDA graph of a step can be replayed. On Hopper the blocks of a step
with few heads are clusters, which leave it in shared memory.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.attention.problem import rows_aligned
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.configs import ELEMENT_BYTES, ELEMENTS, blocks
from cupy_dma.backends.cuda.runtime.device import LoadedKernel, Runtime
from cupy_dma.cache.state import CacheState, ExtendCall

STEPS = 8  # tokens of a call that are taken one by one
ROW_BYTES = 256  # of keys or values: longer ones leave registers for 8 query heads, and none to load ahead
WARPS, STEP = 4, 16  # of a block; keys a warp takes at a time
MAX_SPLITS = 512  # blocks that share the slots of a kv head
BLOCK_STEPS = 4  # what beginning and ending a block takes, in steps of its warps
CLUSTER, CLUSTER_WARPS, CLUSTER_STEPS = 8, 8, 3  # blocks of a cluster, warps of such a block, and its BLOCK_STEPS
CANDIDATE_WORDS = 6  # of struct Candidate


@dataclass(frozen=True)
class SplitConfig(jit.Config):
    """What kernels/decode/split_kv.cuh asks for."""

    element: str
    head_dim: int
    value_dim: int
    vector: bool
    rows: int
    warps: int
    softcap: bool
    min_blocks: int

    def shared_bytes(self, num_splits: int) -> int:
        """``struct SplitShared`` and the weights of ``num_splits`` parts."""
        chunks = blocks(self.head_dim, 64 // ELEMENT_BYTES[self.element])
        query = 512 * chunks * (2 if self.rows > 8 else 1)
        return query + 4 * self.rows * (self.warps * (self.value_dim + 2) + 1 + max(num_splits, self.warps)) + 16


@dataclass(frozen=True)
class StepConfig(SplitConfig):
    source = "decode/step.cu"
    attend: bool
    cluster: int  # blocks of a cluster, 1 = none

    def shared_bytes(self, num_splits: int) -> int:
        """``struct StepShared`` and the weights."""
        pieces = 16 // ELEMENT_BYTES[self.element]
        token = 16 * (4 * blocks(self.head_dim, 4 * pieces) + 8 * blocks(self.value_dim, 8 * pieces))
        found = self.cluster * (4 * self.rows * (self.value_dim + 2) + 24) + 16 if self.cluster > 1 else 0
        return super().shared_bytes(num_splits) + token + found + 24 * self.warps + 32


@dataclass(frozen=True)
class Split:
    """How the slots of a cache are cut."""

    rows: int  # query heads of a block
    sets: int  # of query heads
    num_splits: int
    split_size: int  # slots of a part
    grid: int
    warps: int  # of a block
    cluster: int  # blocks of a cluster, 1 = none


def serves(state: CacheState, call: ExtendCall) -> bool:
    """Whether ``step`` takes the call: few tokens a sequence, and a type that the kernels know."""
    return call.cu_seqlens is None and 1 <= call.length <= STEPS and state.key.dtype in ELEMENTS


def step(runtime: Runtime, state: CacheState, call: ExtendCall) -> tuple[Any, Any]:
    """``out (B, L, H, Dv)`` and ``lse (B, H, L)`` of a call that ``serves``, None for what nobody asked for; changes
    the state. One launch per token."""
    library, device, query = state.library, state.device, call.query
    index, batch, length = device.index, state.batch, call.length
    heads = 0 if query is None else query.shape[2]
    out = lse = None
    if query is not None:
        out = call.out.array if call.out else library.empty((batch, length, heads, state.value_dim), query.dtype, device)
        if call.lse:
            lse = call.lse.array
        elif call.return_lse:
            lse = library.empty((batch, heads, length), "float32", device)
    if batch == 0:
        return out, lse
    cut = split(state.key.shape, state.value_dim, heads // state.kv_heads, state.key.dtype,
                runtime.num_sms(index), runtime.hopper(index))
    operands = (call.key, call.value) if query is None else (query, call.key, call.value)
    kernel = _kernel(runtime, index, cut.num_splits, ELEMENTS[state.key.dtype], state.head_dim, state.value_dim,
                     rows_aligned(*operands), cut.rows, cut.warps, call.softcap > 0.0,
                     min_blocks(state.head_dim, state.value_dim, state.key.dtype, cut.rows, cut.cluster),
                     query is not None, cut.cluster)
    fields = {**_fixed(state, cut, heads), **_moving(call)}
    if out is not None:
        fields["out"] = library.pointer(out)
    if lse is not None:
        fields["lse"] = library.pointer(lse)
    pack, stream = jit.params("decode/step.cu", "StepParams").pack_some, library.stream(device)
    with runtime.on(device):
        for token in range(length):
            kernel.launch(cut.grid, 32 * cut.warps, pack(fields, {"token": token}), stream)
    return out, lse


@functools.lru_cache(maxsize=1024)
def split(shape: tuple[int, int, int, int], value_dim: int, group: int, dtype: str, num_sms: int,
          clusters: bool) -> Split:
    """The blocks of a step for keys ``(B, Hkv, R, D)`` and ``group`` query heads a kv head; in ``clusters``, if the GPU
    has such, where there are few heads."""
    batch, kv_heads, slots, head_dim = shape
    long = max(head_dim, value_dim) * ELEMENT_BYTES[ELEMENTS[dtype]] > ROW_BYTES
    sets = max(1, blocks(group, 8 if long else 16))
    rows = max(1, blocks(group, sets))
    tiles = batch * kv_heads * sets
    num_splits, split_size = choose_splits(tiles, slots, num_sms * min_blocks(head_dim, value_dim, dtype, rows))
    if clusters and sets == 1 and clusters_pay(tiles, slots, num_splits, split_size, num_sms):
        return Split(rows, sets, CLUSTER, cluster_split_size(slots), tiles * CLUSTER, CLUSTER_WARPS, CLUSTER)
    return Split(rows, sets, num_splits, split_size, tiles * num_splits, WARPS, 1)


def clusters_pay(tiles: int, slots: int, num_splits: int, split_size: int, num_sms: int) -> bool:
    """Whether a cluster for each of the ``tiles`` ends sooner than ``num_splits`` blocks, each with a ``split_size`` of the
    slots. A cluster must find room in one group of SMs: more than half of all are not filled with them."""
    if num_splits == 1 or 2 * tiles * CLUSTER > num_sms:
        return False
    steps = blocks(cluster_split_size(slots), CLUSTER_WARPS * STEP)
    return CLUSTER_STEPS + steps < BLOCK_STEPS + blocks(split_size, WARPS * STEP)


def cluster_split_size(slots: int) -> int:
    """Slots of a block in a cluster; the last blocks may have none."""
    return blocks(blocks(slots, CLUSTER), STEP) * STEP


def choose_splits(tiles: int, slots: int, resident: int) -> tuple[int, int]:
    """How many blocks share the slots of each of so many tiles, and how many slots a block then has, where ``resident``
    blocks run at a time: what takes the fewest steps, one round of blocks after the other, and of these the fewest."""
    best = None
    for wanted in range(1, min(blocks(slots, WARPS * STEP), MAX_SPLITS) + 1):
        split_size = blocks(blocks(slots, wanted), STEP) * STEP
        num_splits = blocks(slots, split_size)
        cost = blocks(tiles * num_splits, resident) * (BLOCK_STEPS + blocks(split_size, WARPS * STEP))
        if best is None or cost < best[0]:
            best = cost, num_splits, split_size
    assert best is not None
    return best[1:]


def min_blocks(head_dim: int, value_dim: int, dtype: str, rows: int, cluster: int = 1) -> int:
    """Blocks per SM that registers are shared out for: what the operands of a step leave room for. There
    are never more blocks in clusters than SMs."""
    if cluster > 1:
        return 1
    row_bytes = max(head_dim, value_dim) * ELEMENT_BYTES[ELEMENTS[dtype]]
    return 1 if row_bytes > ROW_BYTES else 2 if rows > 8 or row_bytes > ROW_BYTES // 2 else 3


@functools.cache
def _kernel(runtime: Runtime, index: int, num_splits: int, *fields: Any) -> LoadedKernel:
    config = StepConfig(*fields)
    return runtime.load(config, "decode_step", index, config.shared_bytes(num_splits))


def _fixed(state: CacheState, cut: Split, heads: int) -> dict[str, Any]:
    """Parameters that are the same at every step of this state; kept with it, and the arrays that they name."""
    name = ("decode step", heads)
    if name not in state.workspace:
        pairs = state.batch * state.kv_heads
        tiles = cut.grid if cut.grid > pairs and cut.cluster == 1 else 0  # a single part leaves nothing
        sizes = {"partial": tiles * cut.rows * state.value_dim if heads else 0,
                 "partial_state": 2 * tiles * cut.rows, "candidates": CANDIDATE_WORDS * pairs * cut.num_splits,
                 "tickets": pairs + state.batch}
        arrays = {key: _made(state, f"{name} {key}", size) for key, size in sizes.items()}
        state.workspace[name] = {key: array.pointer for key, array in arrays.items()} | {
            "key": state.key.pointer, "value": state.value.pointer, "score": state.scores.pointer,
            "position": state.positions.pointer, "in_top": state.in_top.pointer, "lengths": state.lengths.pointer,
            "lowest": state.lowest.pointer, "lowest_score": state.lowest_score.pointer, "free": state.free.pointer,
            "kv_heads": state.kv_heads,
            "group": heads // state.kv_heads, "sets": cut.sets, "num_splits": cut.num_splits, "split_size": cut.split_size,
            "slots": state.rows, "window": state.window, "sinks": state.sinks, "recent": state.recent}
    return state.workspace[name]


def _made(state: CacheState, name: str, size: int) -> Operand:
    """An array of 4-byte zeros that stays with the state."""
    library = state.library
    made = library.describe(library.full((max(size, 2),), 0, "int32", state.device), name)
    state.workspace[name] = made
    return made


def _moving(call: ExtendCall) -> dict[str, Any]:
    key, value, scores, query, counts = call.key, call.value, call.scores, call.query, call.lengths
    fields: dict[str, Any] = {
        "new_key": key.pointer, "new_value": value.pointer, "new_score": scores.pointer,
        "key_batch": key.strides[0], "key_row": key.strides[1], "key_head": key.strides[2],
        "value_batch": value.strides[0], "value_row": value.strides[1], "value_head": value.strides[2],
        "score_batch": scores.strides[0], "score_head": scores.strides[1], "score_token": scores.strides[2],
        "length": call.length, "scale": call.scale, "softcap": call.softcap}
    if query is not None:
        fields.update(query=query.pointer, query_batch=query.strides[0], query_row=query.strides[1],
                      query_head=query.strides[2])
    if counts is not None:
        fields.update(counts=counts.pointer, count_words=2 if counts.dtype == "int64" else 1)
    return fields
