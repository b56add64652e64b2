"""The CUDA backend: this project's raw kernels (``kernels/``), compiled for the device at run time.

Work runs on the caller's current stream, memory comes from the caller's library, and nothing synchronizes. Tile shapes
and launch plans are chosen once per kind of call and kept.
"""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cupy_dma import jit
from cupy_dma.arrays import Device, Operand

if TYPE_CHECKING:
    from cupy_dma.attention import AttentionCall
    from cupy_dma.masks import IntervalMask

_ELEMENTS = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float"}


# ---- configurations of the kernels ----
@dataclass(frozen=True)
class LayoutConfig(jit.Config):
    source = "layout.cu"
    element: str


@dataclass(frozen=True)
class ScoreConfig(jit.Config):
    source = "scores.cu"
    value: str
    weight: str
    head_dim: int
    kv_heads: int
    head_tile: int
    vector: bool
    exp_form: bool


@dataclass(frozen=True)
class SelectConfig(jit.Config):
    source = "select.cu"
    documents: bool
    padding: bool


@dataclass(frozen=True)
class ListConfig(jit.Config):
    source = "lists.cu"
    causal: bool
    block_n: int


@dataclass(frozen=True)
class ForwardConfig(jit.Config):
    source = "forward.cu"
    element: str
    head_dim: int
    vector: bool
    heads: int  # of a group in one tile
    block_m: int
    block_n: int
    warps: int
    min_blocks: int
    keys: str
    causal: bool
    bias: bool
    softcap: bool

    @property
    def shared_bytes(self) -> int:
        """Size of ``struct Shared`` in forward.cu."""
        row = (self.head_dim + 15) // 16 * 16 + 8
        return 2 * row * (self.block_m + 4 * self.block_n) + 4 * 9 * self.block_n

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        return self.block_m // self.heads


SELECT_THREADS = {"local_top": 1024, "filter_arrivals": 1024, "sweep_arrivals": 512}  # as in select.cu
ARRIVALS = 256
LIST_THREADS, LIST_CHUNK, LIST_TILES = 256, 2048, 8  # as in lists.cu


# ---- what can run here ----
@functools.cache
def unavailable() -> str | None:
    """Why this backend cannot run here, or None."""
    try:
        import cupy
    except ImportError:
        return ("CuPy is not installed: pip install 'cupy_dma[cuda12]' (CUDA 12 drivers) or 'cupy_dma[cuda13]' "
                "(CUDA 13 drivers)")
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"
    if count == 0:
        return "no CUDA device"
    capability = cupy.cuda.Device(0).compute_capability
    if int(capability) < 80:
        return f"the device has compute capability {capability}, at least 8.0 (Ampere) is needed"
    try:
        jit.find_headers()
    except jit.CompileError as error:
        return str(error)
    return None


@contextlib.contextmanager
def _other_device(device: Device):
    import cupy

    with cupy.cuda.Device(device.index):
        yield


_same_device = contextlib.nullcontext()


def _on(device: Device):
    """A context in which launches go to ``device``."""
    return _same_device if _current_device() == device.index else _other_device(device)


@functools.cache
def _device_getter() -> Callable[[], int]:
    import cupy

    return cupy.cuda.runtime.getDevice


def _current_device() -> int:
    return _device_getter()()


@functools.cache
def _params(source: str, name: str) -> jit.Params:
    return jit.Params(source, name)


def _blocks(length: int, size: int) -> int:
    return -(-length // size)


# ---- key scores ----
def key_scores(value: Operand, dt_proj: Operand, A: Operand, dt_bias: Operand | None, form: str) -> Any:
    """Key scores (SPEC section 2): float32 ``(B, Hkv, Lk)``."""
    if value.dtype not in _ELEMENTS:
        raise TypeError(f"value must be float16, bfloat16 or float32 on CUDA, got {value.dtype}")
    place, device = value.library, value.device
    batch, length, kv_heads, head_dim = value.shape
    dt_proj = dt_proj if dt_proj.dtype in _ELEMENTS else _as_float32(dt_proj)
    A = _as_float32(A)
    dt_bias = None if dt_bias is None else _as_float32(dt_bias)
    out = place.empty((batch, kv_heads, length), "float32", device)
    if batch == 0 or length == 0:
        return out
    size = 4 if value.dtype == "float32" else 2
    vector = (head_dim % 4 == 0 and value.pointer % (4 * size) == 0 and
              all(stride % 4 == 0 for stride in value.strides[:3]))
    tile = next(t for t in (8, 4, 2, 1) if t <= kv_heads)
    config = ScoreConfig(_ELEMENTS[value.dtype], _ELEMENTS[dt_proj.dtype], head_dim, kv_heads, tile, vector,
                         form == "exp")
    blocks = _blocks(length, 8 * (32 // tile) * (4 if tile == 8 else 1))
    params = _params("scores.cu", "ScoreParams").pack(
        value=value.pointer, dt_proj=dt_proj.pointer, A=A.pointer, dt_bias=dt_bias.pointer if dt_bias else 0,
        score=place.describe(out, "scores").pointer, value_batch=value.strides[0], value_row=value.strides[1],
        value_head=value.strides[2], weight_row=dt_proj.strides[0], key_length=length, key_blocks=blocks)
    with _on(device):
        jit.load(config, "key_scores", device.index).launch((batch * blocks, _blocks(kv_heads, tile), 1), 256, params,
                                              place.stream(device))
    return out


def _as_float32(operand: Operand) -> Operand:
    if operand.dtype == "float32":
        return operand
    return operand.library.describe(operand.library.astype(operand.array, "float32"), operand.name)


# ---- selection ----
def selection_chunk(length: int) -> int:
    """Keys per chunk: about N^(2/3), which balances the chunks' lists against merging them; a power of two."""
    return 1 << max(10, (int(1.5 * length ** (2 / 3)) - 1).bit_length())


def prefix_stop(scores: Operand, window: int, padding: Operand | None, document: Operand | None) -> Any:
    """First position that no longer keeps a key (SPEC section 3): int32 ``(B, Hkv, Lk)``."""
    place, device = scores.library, scores.device
    batch, kv_heads, length = scores.shape
    rows = batch * kv_heads
    stop = place.empty(scores.shape, "int32", device)
    if rows == 0 or length == 0:
        return stop
    window = min(window, length)
    chunk = selection_chunk(length)
    chunks = _blocks(length, chunk)
    capacity = min(window, chunk)
    # Per chunk: local, kept and arrivals of 8 bytes an entry, two counts of 4.
    workspace = place.empty((rows * chunks * (2 * (capacity + window + chunk) + 2),), "int32", device)
    local = place.describe(workspace, "workspace").pointer
    kept = local + 8 * rows * chunks * capacity
    arrivals = kept + 8 * rows * chunks * window
    kept_count = arrivals + 8 * rows * chunks * chunk
    params = _params("select.cu", "SelectParams").pack(
        score=scores.pointer, padding=padding.pointer if padding else 0, document=document.pointer if document else 0,
        local=local, kept=kept, kept_count=kept_count, arrivals=arrivals,
        arrival_count=kept_count + 4 * rows * chunks, stop=place.describe(stop, "stop").pointer,
        score_batch=scores.strides[0], score_head=scores.strides[1], score_key=scores.strides[2],
        padding_batch=padding.strides[0] if padding else 0, document_batch=document.strides[0] if document else 0,
        kv_heads=kv_heads, key_length=length, window=window, chunk=chunk, chunks=chunks, local_capacity=capacity)
    config = SelectConfig(document is not None, padding is not None)
    grids = {"local_top": rows * chunks if chunks > 1 else 0, "filter_arrivals": rows * chunks,
             "sweep_arrivals": rows * chunks * _blocks(chunk, ARRIVALS)}
    stream = place.stream(device)
    with _on(device):
        for entry, blocks in grids.items():
            jit.load(config, entry, device.index).launch((blocks, 1, 1), SELECT_THREADS[entry], params, stream)
    return stop


# ---- key lists ----
@dataclass(frozen=True)
class KeyLists:
    """What the attention kernels need of a mask, on the device. Addresses point into ``workspace``."""

    keys: str  # KEYS_LISTED or KEYS_SHARED
    capacity: int  # entries of a tile's list
    list: int
    list_lengths: int
    summaries: int
    workspace: Any


def _tile_capacity(mask: IntervalMask, queries: int) -> int | None:
    """Entries that a list of ``queries`` consecutive queries can need; None if one list must serve all tiles."""
    if mask._bound is None:
        return None
    base, per_position = mask._bound
    capacity = base + per_position * (queries - 1)
    return capacity if capacity < mask.key_length else None


def key_lists(mask: IntervalMask, query_length: int, queries: int, block_n: int, causal: bool, stream: int) -> KeyLists:
    """The key lists of a mask for tiles of ``queries`` queries; kept on the mask, per stream."""
    identity = (query_length, queries, block_n, causal, stream)
    lists = mask._cache.get(identity)
    if lists is None:
        lists = mask._cache[identity] = _build_lists(mask, query_length, queries, block_n, causal, stream)
    return lists


def _build_lists(mask: IntervalMask, query_length: int, queries: int, block_n: int, causal: bool,
                 stream: int) -> KeyLists:
    place, device, length = mask.library, mask.device, mask.key_length
    batch, heads, _ = mask.shape
    rows, chunks, tiles = batch * heads, _blocks(length, LIST_CHUNK), _blocks(query_length, queries)
    capacity = _tile_capacity(mask, queries)
    listed = capacity is not None
    blocks = _blocks(length, block_n)
    sizes = (4 * rows * chunks, 0 if listed else 4 * rows * blocks, 2 * rows * length, rows * length, rows,
             rows * tiles * capacity if listed else 0, 2 * rows * tiles if listed else 0)  # in int32
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + _blocks(size, 4) * 4)
    workspace = place.empty((max(offsets[-1], 1),), "int32", device)
    base = place.describe(workspace, "workspace").pointer
    info, summaries, interval, seen, seen_count, entries, lengths = [base + 4 * offset for offset in offsets[:-1]]
    start, stop = mask._start, mask._stop
    params = _params("lists.cu", "ListParams").pack(
        start=start.pointer, stop=stop.pointer, chunk_info=info, seen=seen, interval=interval, seen_count=seen_count,
        list=entries, list_lengths=lengths, summaries=summaries, start_batch=start.strides[0],
        start_head=start.strides[1], stop_batch=stop.strides[0], stop_head=stop.strides[1], heads=heads,
        key_length=length, query_length=query_length, chunks=chunks, queries=queries, tiles=tiles,
        capacity=capacity or 0, summary_blocks=blocks)
    grids = {"count_seen": rows * chunks, "compact_seen": rows * chunks}
    if listed:
        grids["tile_lists"] = rows * _blocks(tiles, LIST_TILES)
    else:
        grids["summarize"] = rows * _blocks(blocks, LIST_THREADS // 32)
    for entry, count in grids.items():
        jit.load(ListConfig(causal, block_n), entry, device.index).launch((count, 1, 1), LIST_THREADS, params, stream)
    if listed:
        return KeyLists("KEYS_LISTED", capacity, entries, lengths, 0, workspace)
    return KeyLists("KEYS_SHARED", 0, seen, seen_count, summaries, workspace)


# ---- attention ----
# Tile shapes (block_m, block_n, warps, min_blocks) by head dim, the fastest first; the first that fits is taken.
_TILES = {
    64: ((128, 64, 4, 2),),
    128: ((128, 64, 4, 2), (128, 32, 4, 1)),
    192: ((128, 64, 8, 1), (128, 32, 8, 1), (64, 32, 4, 1)),
    256: ((128, 64, 8, 1), (128, 32, 8, 1), (64, 16, 4, 1)),
}


def tile_shape(head_dim: int, shared_limit: int, heads: int = 1) -> tuple[int, int, int, int]:
    """(block_m, block_n, warps, min_blocks) for a head dim, within ``shared_limit`` bytes of shared memory."""
    shapes = next(shapes for largest, shapes in _TILES.items() if head_dim <= largest)
    for shape in shapes:
        config = ForwardConfig("", head_dim, True, heads, *shape, "", False, False, False)
        if config.shared_bytes <= shared_limit:
            return shape
    raise RuntimeError(f"no tile of head dim {head_dim} fits into {shared_limit} bytes of shared memory")


def heads_per_tile(group: int) -> int:
    """Heads of a group that share a gathered tile: the largest divisor up to 4 (more would make lists too many)."""
    return max(h for h in (1, 2, 3, 4) if group % h == 0)


@dataclass(frozen=True)
class _Plan:
    """What is the same for all calls of a kind."""

    kernel: jit.Kernel
    config: ForwardConfig
    params: jit.Params


@functools.cache
def _plan(config: ForwardConfig, index: int) -> _Plan:
    check_fragment_layout(index)
    return _Plan(jit.load(config, "attention_forward", index, config.shared_bytes), config, _params("forward.cu", "ForwardParams"))


@functools.cache
def check_fragment_layout(index: int) -> None:
    """Verify once per device the register layout that arch.cuh states; the only call that waits for the device."""
    import cupy

    for element in ("__half", "__nv_bfloat16"):
        with cupy.cuda.Device(index), cupy.cuda.Stream(non_blocking=True) as stream:
            # Small integers, exact in both types; bfloat16 is the upper half of a float32.
            x = cupy.arange(256, dtype=cupy.float32) - 128
            bits = x.astype(cupy.float16).view(cupy.uint16) if element == "__half" else x.view(cupy.uint16)[1::2].copy()
            ok = cupy.zeros(1, cupy.int32)
            params = _params("layout.cu", "LayoutParams").pack(x=bits.data.ptr, ok=ok.data.ptr)
            jit.load(LayoutConfig(element), "fragment_layout", index).launch((1, 1, 1), 32, params, stream.ptr)
            found = int(ok.get()[0])
        if found != 32:
            raise RuntimeError(f"this GPU (cuda:{index}) keeps wmma fragments in a layout the kernels do not know "
                               f"({element}: {found} of 32 lanes as expected); please report it")


def attention(call: AttentionCall) -> tuple[Any, Any]:
    """Attention forward (SPEC section 5) over gathered keys: ``out`` and ``lse``."""
    query, key, value, mask, bias = call.query, call.key, call.value, call.mask, call.bias
    if query.dtype not in ("float16", "bfloat16"):
        raise TypeError(f"query must be float16 or bfloat16 on CUDA, got {query.dtype} (backend='numpy' takes it; "
                        f"float32 through TF32 arrives with a later version)")
    if isinstance(mask, Operand):
        raise NotImplementedError("dense masks on CUDA arrive with a later version: mask must be an IntervalMask or "
                                  "None, got a dense array (backend='numpy' takes it)")
    if bias is not None and bias.shape[2] != 1:
        raise NotImplementedError(f"dense biases on CUDA arrive with a later version: bias must be one number per key, "
                                  f"(1|B, 1|Hkv|H, 1, 1|Lk), got {bias.shape} (backend='numpy' takes it)")
    place, device = query.library, query.device
    batch, query_length, heads, head_dim = query.shape
    key_length, kv_heads = key.shape[1], key.shape[2]
    out = place.empty(query.shape, query.dtype, device)
    lse = place.empty((batch, heads, query_length), "float32", device)
    if batch == 0 or query_length == 0:
        return out, lse

    if bias is not None and bias.dtype != "float32":
        bias = _bias_as_float32(bias)
    if mask is not None and mask._causal_only:
        mask, causal = None, True
    else:
        causal = call.causal and (mask is None or mask._starts != "key")
    group = heads // kv_heads
    per_head = (mask is not None and mask.shape[1] not in (1, kv_heads)) or (
        bias is not None and bias.shape[1] not in (1, kv_heads))
    shared_heads = 1 if per_head else heads_per_tile(group)
    for operand in (key, value):
        if operand.shape[1] > 1 and abs(operand.strides[1]) >= 2**31:
            raise NotImplementedError(f"{operand.name} must have a row stride below 2^31 elements on CUDA, got "
                                      f"{operand.strides[1]}")
    vector = head_dim % 8 == 0 and _rows_aligned(query) and _rows_aligned(key) and _rows_aligned(value)
    shape = tile_shape(head_dim, jit.shared_memory_limit(device.index), shared_heads)
    queries, block_n = shape[0] // shared_heads, shape[1]
    stream = place.stream(device)
    with _on(device):
        lists = None if mask is None or key_length == 0 else key_lists(mask, query_length, queries, block_n, causal,
                                                                       stream)
        plan = _plan(ForwardConfig(_ELEMENTS[query.dtype], head_dim, vector, shared_heads, *shape,
                                   lists.keys if lists else "KEYS_CONTIGUOUS", causal, bias is not None,
                                   call.softcap > 0.0), device.index)
        tiles = _blocks(query_length, queries)
        fields = {"bias": 0, "bias_batch": 0, "bias_group": 0, "bias_head": 0, "bias_key": 0, "start": 0, "stop": 0,
                  "list": 0, "list_lengths": 0, "summaries": 0, "start_batch": 0, "start_head": 0, "stop_batch": 0,
                  "stop_head": 0, "mask_batch": 0, "mask_group": 0, "mask_head": 0, "mask_heads": 1, "capacity": 0}
        if bias is not None:
            by_group = bias.shape[1] == kv_heads
            fields.update(bias=bias.pointer, bias_batch=bias.strides[0], bias_key=bias.strides[3],
                          bias_group=bias.strides[1] if by_group else 0, bias_head=0 if by_group else bias.strides[1])
        if lists is not None:
            start, stop, mask_heads = mask._start, mask._stop, mask.shape[1]
            fields.update(start=start.pointer, stop=stop.pointer, start_batch=start.strides[0],
                          start_head=start.strides[1], stop_batch=stop.strides[0], stop_head=stop.strides[1],
                          list=lists.list, list_lengths=lists.list_lengths, summaries=lists.summaries,
                          mask_batch=mask_heads if mask.shape[0] > 1 else 0, mask_heads=mask_heads,
                          mask_group=int(1 < mask_heads == kv_heads), mask_head=int(mask_heads not in (1, kv_heads)),
                          capacity=lists.capacity)
        params = plan.params.pack(
            query=query.pointer, key=key.pointer, value=value.pointer, out=place.describe(out, "out").pointer,
            lse=place.describe(lse, "lse").pointer,
            query_batch=query.strides[0], query_row=query.strides[1], query_head=query.strides[2],
            key_batch=key.strides[0], key_row=key.strides[1] if key_length > 1 else 0, key_head=key.strides[2],
            value_batch=value.strides[0], value_row=value.strides[1] if key_length > 1 else 0, value_head=value.strides[2],
            query_length=query_length, key_length=key_length, heads=heads, kv_heads=kv_heads, tiles=tiles,
            scale=call.scale, softcap=call.softcap, **fields)
        plan.kernel.launch((tiles * (heads // shared_heads) * batch, 1, 1), 32 * shape[2], params, stream)
    return out, lse


def _rows_aligned(operand: Operand) -> bool:
    """Whether every row starts on 16 bytes (strides of axes of size 1 do not matter)."""
    batch, row, head, _ = operand.strides
    b, n, h, _ = operand.shape
    return (operand.pointer % 16 == 0 and (batch % 8 == 0 or b == 1) and (row % 8 == 0 or n == 1)
            and (head % 8 == 0 or h == 1))


def _bias_as_float32(bias: Operand) -> Operand:
    """A key bias (1|B, 1|Hkv|H, 1, 1|Lk) as float32; its array may have three or four axes."""
    place = bias.library
    seen = place.describe(place.astype(bias.array, "float32"), "bias")
    strides = seen.strides if len(seen.strides) == 4 else (*seen.strides[:2], 0, seen.strides[2])
    strides = tuple(0 if size == 1 else stride for size, stride in zip(bias.shape, strides))
    return Operand("bias", seen.array, place, bias.shape, strides, "float32", bias.device, seen.pointer)


# ---- compiling ahead ----
def usual_configs(head_dims: tuple[int, ...] = (64, 128), dtypes: tuple[str, ...] = ("float16", "bfloat16"),
                  groups: tuple[int, ...] = (1, 2, 4), shared_limit: int = 99 * 1024) -> list[jit.Config]:
    """The kernels that ordinary calls need."""
    configs: list[jit.Config] = [LayoutConfig(_ELEMENTS[dtype]) for dtype in ("float16", "bfloat16")]
    configs += [SelectConfig(documents=False, padding=padding) for padding in (False, True)]
    for head_dim in head_dims:
        for group in groups:
            heads = heads_per_tile(group)
            shape = tile_shape(head_dim, shared_limit, heads)
            configs.append(ListConfig(causal=False, block_n=shape[1]))
            for dtype in dtypes:
                for keys, causal, bias in (("KEYS_CONTIGUOUS", True, False), ("KEYS_CONTIGUOUS", True, True),
                                           ("KEYS_CONTIGUOUS", False, False), ("KEYS_LISTED", False, True),
                                           ("KEYS_SHARED", False, True)):
                    configs.append(ForwardConfig(_ELEMENTS[dtype], head_dim, True, heads, *shape, keys, causal, bias,
                                                 False))
    return list(dict.fromkeys(configs))


def warmup_jobs(head_dims: tuple[int, ...] = (64, 128), dtypes: tuple[str, ...] = ("float16", "bfloat16"),
                groups: tuple[int, ...] = (1, 2, 4)) -> list[tuple[str, Callable[..., Any]]]:
    """(label, job) pairs; ``job(arch=None)`` compiles one kernel for ``arch``, by default for the current device."""
    def job(config: jit.Config, arch: str | None = None) -> Any:
        return jit.compile(config, arch or jit.device_arch(_current_device()))

    limit = jit.shared_memory_limit(_current_device()) if unavailable() is None else 227 * 1024
    return [(f"{config.source} {'' if not isinstance(config, ForwardConfig) else config.head_dim}".strip(),
             functools.partial(job, config)) for config in usual_configs(head_dims, dtypes, groups, limit)]
