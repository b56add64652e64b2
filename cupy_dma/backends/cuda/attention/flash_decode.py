"""Split-KV attention of few queries, whose tiles alone would leave most of a GPU idle.

The keys are split among blocks, and the last block combines the results (``kernels/decode/flash_decode.cu``).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.attention import sm90
from cupy_dma.backends.cuda.attention.problem import Problem
from cupy_dma.backends.cuda.attention.split import ROW_BYTES, WARPS, SplitConfig, choose_splits, min_blocks
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.builder import Array, Builder
from cupy_dma.backends.cuda.runtime.configs import BIAS_DENSE, BIAS_OF_KEYS, ELEMENTS, blocks
from cupy_dma.backends.cuda.runtime.device import Runtime
from cupy_dma.backends.cuda.select.last_queries import KeyList
from cupy_dma.calls.types import AttentionCall

NAME = "few queries"
MAX_ROWS, TILE_ROWS = 64, 16  # queries times heads of a GQA group: at most, and per block
MIN_KEYS = 512  # below this a tile is as fast
# Without a mask, calls of at least MANY_KEYS keys may have more rows: one row of all GQA groups per 1024 keys and SM,
# up to MANY_ROWS.
MANY_KEYS, MANY_ROWS = 4096, 8
# With intervals, on an H200, in us: to test a key for a tile of rows, and to attend to a visible one; to list keys
# for the Hopper kernel, which then attends to each once: fixed, per visible key and per key.
LOOK, SEE = 5.5e-5, 1.5e-4
LIST, LIST_SEEN, LIST_KEY = 12.0, 5.5e-3, 5e-6


@dataclass(frozen=True)
class FlashDecodeConfig(SplitConfig):
    source = "decode/flash_decode.cu"
    listed: bool
    intervals: bool
    causal: bool
    bias: bool
    delay: bool = False  # of the bias

    def shared_bytes(self, num_splits: int) -> int:
        """``struct FlashDecodeShared`` and the weights."""
        return super().shared_bytes(num_splits) + 16


def reasons(build: Builder, call: AttentionCall, problem: Problem) -> list[str]:
    """Why not to use this kernel for the call; empty if it can run it and is faster than the others."""
    wanted, equal_dims = build.overrides.decode, call.value_dim == call.head_dim
    if wanted is False and equal_dims:
        return ["Overrides.decode is False"]
    found = _cannot(call, problem)
    if not found and wanted is None:
        if not _pays(build.runtime, build.device.index, call):
            found = ["tiles of queries fill the GPU, or there are few keys"]
        elif equal_dims and _tiles_pay(call, problem) and not sm90.reasons(build, call, problem):
            found = ["the Hopper kernel is faster"]
    return found


def takes_value_dim(runtime: Runtime, call: Any) -> bool:
    """Whether a call with ``Dv != D`` comes here: the other kernels need equal head dims."""
    if not isinstance(call, AttentionCall) or 0 in call.query.shape or call.query.dtype not in ELEMENTS:
        return False
    return can_serve(runtime, call.query.device.index, call, Problem(call))


def can_serve(runtime: Runtime, index: int, call: AttentionCall, problem: Problem) -> bool:
    """Whether this kernel can run the call and tiles of queries would not fill the GPU."""
    return not _cannot(call, problem) and _pays(runtime, index, call)


def _cannot(call: AttentionCall, problem: Problem) -> list[str]:
    against = {"packed sequences": call.sequences is not None, "a dense mask": problem.bits,
               "a dense bias": problem.bias_kind == BIAS_DENSE,
               "masks or biases per query head": problem.by_head, "no keys": problem.key_length == 0}
    return [reason for reason, holds in against.items() if holds]


def _pays(runtime: Runtime, index: int, call: AttentionCall) -> bool:
    rows, groups = call.query_length * (call.heads // call.kv_heads), call.batch * call.kv_heads
    num_sms = runtime.num_sms(index)
    if rows > MAX_ROWS:
        plain = call.mask is None or call.mask._causal_only
        most = min(call.key_length // 1024, MANY_ROWS) * num_sms
        return plain and call.key_length >= MANY_KEYS and rows * groups <= most
    return call.key_length >= MIN_KEYS and (rows <= TILE_ROWS or 2 * groups <= num_sms)


def _tiles_pay(call: AttentionCall, problem: Problem) -> bool:
    """Whether the Hopper kernel is faster. It is if more than half a tile of rows sees all keys and its own tiles,
    split along the keys, read them no more often; or if so many keys must be tested that making key lists for this call
    alone pays: for keys scattered by scores, where kv heads have their own intervals. Of consecutive keys, blocks that
    no query sees are skipped anyway."""
    group, groups, row_bytes = call.heads // call.kv_heads, call.batch * call.kv_heads, call.head_dim * problem.size
    rows = call.query_length * group
    tiles = sets_of(rows, row_bytes)
    if problem.mask is None:
        return 2 * rows > _rows_together(row_bytes) and tiles >= group // problem.tile_heads
    if problem.mask._bound is None or problem.mask.shape[1] == 1:
        return False
    seen = min(call.key_length, problem.mask._bound[0])
    here = groups * tiles * (LOOK * call.key_length + SEE * seen)
    return here > LIST + LIST_SEEN * seen + LIST_KEY * groups * call.key_length


def attention(build: Builder, call: AttentionCall, problem: Problem, out: Array, lse: Array,
              listed: KeyList | None = None) -> None:
    """Launches a call without ``reasons`` against it; writes ``out`` and ``lse``. ``listed``: key lists instead of the
    mask."""
    batch, length, heads, head_dim = call.query.shape
    value_dim, kv_heads = call.value_dim, call.kv_heads
    row_bytes = max(head_dim, value_dim) * problem.size
    slots = problem.key_length if listed is None else listed.count
    rows = length * (heads // kv_heads)
    sets = sets_of(rows, row_bytes)
    tile_rows, tiles = blocks(rows, sets), batch * kv_heads * sets
    # With 4 there would be more splits, which take longer to combine.
    resident = min(3, min_blocks(head_dim, value_dim, call.query.dtype, tile_rows))
    num_splits, split_size = choose_splits(tiles, slots, resident * build.num_sms)
    fields: dict[str, Any] = {
        "out": out.ref, "lse": lse.ref, "group": heads // kv_heads, "sets": sets,
        "num_splits": num_splits, "split_size": split_size, "slots": slots}
    if num_splits > 1:
        partial_rows = tiles * num_splits * tile_rows
        partial = build.empty((partial_rows * (value_dim + 2),), "float32").ref
        fields |= {"partial": partial, "partial_state": partial + 4 * partial_rows * value_dim,
                   "tickets": build.zeros((tiles,), "int32").ref if listed is None else listed.tickets}
    mask, intervals, causal = problem.mask, problem.mask is not None, problem.causal
    if listed is not None:
        fields["list"] = listed.list.ref
        intervals, causal = listed.interval is not None, False
        if listed.interval is not None:
            fields["list_interval"] = listed.interval.ref
    elif mask is not None:
        for name, operand in (("start", mask._start), ("stop", mask._stop)):
            fields |= {name: operand.pointer, f"{name}_batch": _step(operand, 0), f"{name}_group": _step(operand, 1)}
    config = FlashDecodeConfig(
        element=ELEMENTS[call.query.dtype], head_dim=head_dim, value_dim=value_dim, vector=problem.vector,
        rows=tile_rows, warps=WARPS, softcap=call.softcap > 0.0, min_blocks=resident, listed=listed is not None,
        intervals=intervals, causal=causal, bias=problem.bias_kind == BIAS_OF_KEYS, delay=problem.delay)
    params = jit.params("decode/flash_decode.cu", "FlashDecodeParams")
    shared = {name: problem.params[name] for name in params.names if name in problem.params and name not in fields}
    build.launch(build.load(config, "flash_decode", config.shared_bytes(num_splits)), tiles * num_splits, 32 * WARPS,
                 params.pack_some(shared, fields))


def _step(operand: Operand, axis: int) -> int:
    return operand.strides[axis] if operand.shape[axis] > 1 else 0


def sets_of(rows: int, row_bytes: int) -> int:
    """Tiles per kv head for ``rows`` query rows and keys of ``row_bytes`` bytes."""
    return blocks(rows, _rows_together(row_bytes))


def _rows_together(row_bytes: int) -> int:
    return 8 if row_bytes > ROW_BYTES else TILE_ROWS
