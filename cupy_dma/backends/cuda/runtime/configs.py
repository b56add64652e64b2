"""The compile-time options of each kernel file, and the constants it shares with the host."""
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cupy_dma.backends.cuda.runtime import jit

ELEMENTS = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float"}
ELEMENT_BYTES = {"__half": 2, "__nv_bfloat16": 2, "float": 4}


@dataclass(frozen=True)
class LayoutConfig(jit.Config):
    source = "common/check_fragment_layout.cu"
    element: str


@dataclass(frozen=True)
class ScoreConfig(jit.Config):
    source = "select/key_scores.cu"
    value: str
    weight: str
    parameter: str  # type of A and dt_bias
    head_dim: int
    kv_heads: int
    head_tile: int
    vector: bool
    exp_form: bool
    gradient: bool
    tensor_cores: bool

    @property
    def block_keys(self) -> int:
        return 128 if self.tensor_cores else 8 * (32 // self.head_tile) * (4 if self.head_tile == 8 else 1)

    @property
    def head_tiles(self) -> int:
        """Blocks that share the same keys."""
        return 1 if self.tensor_cores else blocks(self.kv_heads, self.head_tile)


@dataclass(frozen=True)
class ScoreBackwardConfig(jit.Config):
    source = "select/key_scores_backward.cu"
    value: str
    weight: str
    parameter: str
    head_dim: int
    kv_heads: int
    head_tile: int


@dataclass(frozen=True)
class SelectConfig(jit.Config):
    source = "select/prefix_top_w.cu"
    documents: bool
    padding: bool
    head_windows: bool = False


@dataclass(frozen=True)
class DocumentConfig(jit.Config):
    source = "select/documents.cu"
    id: str = "int"  # type of the array with the beginnings of documents


@dataclass(frozen=True)
class ListConfig(jit.Config):
    source = "lists/intervals.cu"
    causal: bool
    block_n: int
    sequences: bool = False


@dataclass(frozen=True)
class LifetimesConfig(jit.Config):
    source = "lists/lifetimes.cu"
    causal: bool
    sequences: bool = False


@dataclass(frozen=True)
class SequenceConfig(jit.Config):
    source = "lists/varlen.cu"
    causal: bool


class Tile(NamedTuple):
    """The tile of a block: rows (queries times heads), keys at a time, warps, blocks per SM."""

    block_m: int
    block_n: int
    warps: int
    min_blocks: int


@dataclass(frozen=True)
class ForwardConfig(jit.Config):
    source = "sm80/forward.cu"
    element: str
    head_dim: int
    vector: bool
    heads: int  # of a GQA group in one tile
    block_m: int
    block_n: int
    warps: int
    min_blocks: int
    keys: str
    causal: bool
    bias: int  # BIAS_NONE, BIAS_OF_KEYS, BIAS_DENSE
    softcap: bool
    bits: bool = False  # a dense mask
    bias_element: str = "float"
    sequences: bool = False
    page_size: int = 0  # 0: keys are not paged
    delay: bool = False  # of the key bias

    @property
    def shared_bytes(self) -> int:
        """Size of ``struct Shared`` in the kernel file."""
        return self._shared_bytes(self.block_m)

    def _shared_bytes(self, rows: int) -> int:
        size = tile_bytes(ELEMENT_BYTES[self.element], self.head_dim, rows, self.block_n)
        if self.bits:
            size += 8 * self.block_n * (blocks(self.queries, 32) - 2)
        if self.delay:
            size += 8 * self.block_n
        if self.bias == BIAS_DENSE:
            size += bias_bytes(blocks(self.block_m, self.heads), self.block_n, self.bias_element)
        return size

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        return self.block_m // self.heads


@dataclass(frozen=True)
class BackwardDqConfig(ForwardConfig):
    source = "sm80/backward_dq.cu"
    dbias: bool = False

    @property
    def shared_bytes(self) -> int:
        return self._shared_bytes(2 * self.block_m)


@dataclass(frozen=True)
class BackwardDbiasConfig(ForwardConfig):
    source = "sm80/backward_dbias.cu"
    intervals: bool = False
    sum_keys: bool = False

    @property
    def shared_bytes(self) -> int:
        return bias_pass_bytes(ELEMENT_BYTES[self.element], self.head_dim, self.block_m, self.block_n,
                               self.bias_element)


class KeyTile(NamedTuple):
    """The tile of a block of the key gradients: keys, queries at a time, warps, blocks per SM."""

    block_n: int
    block_q: int
    warps: int
    min_blocks: int


@dataclass(frozen=True)
class BackwardDkvConfig(jit.Config):
    source = "sm80/backward_dkv.cu"
    element: str
    head_dim: int
    vector: bool
    block_n: int
    block_q: int
    warps: int
    min_blocks: int
    keys: str
    intervals: bool
    causal: bool
    bias: int
    softcap: bool
    dim_slices: int
    dkey: bool
    dvalue: bool
    dbias: bool
    bits: bool = False
    bias_element: str = "float"
    sequences: bool = False
    delay: bool = False

    @property
    def shared_bytes(self) -> int:
        """Size of ``struct Shared`` in sm80/backward_dkv.cu."""
        size = key_tile_bytes(ELEMENT_BYTES[self.element], self.head_dim, self.block_n, self.block_q)
        size += 4 * self.block_n * self.delay
        if self.bits:
            size += 8 * blocks(self.block_q, 32) * self.block_n
        return size + (bias_bytes(self.block_q, self.block_n, self.bias_element) if self.bias == BIAS_DENSE else 0)


@dataclass(frozen=True)
class BackwardPreprocessConfig(jit.Config):
    source = "sm80/backward_preprocess.cu"
    element: str
    head_dim: int
    vector: bool


@dataclass(frozen=True)
class BackwardReduceConfig(jit.Config):
    source = "sm80/backward_reduce.cu"
    element: str
    head_dim: int
    vector: bool
    causal: bool
    dkey: bool
    dvalue: bool
    dbias: bool
    sequences: bool = False
    bits: bool = False


@dataclass(frozen=True)
class DenseConfig(jit.Config):
    source = "lists/dense_mask.cu"
    queries: int
    vector: bool = False
    intervals: bool = False
    causal: bool = False


@dataclass(frozen=True)
class DenseSupersConfig(jit.Config):
    source = "lists/dense_macro_tiles.cu"


# Threads of a block and sizes, as in the kernel files.
BIAS_NONE, BIAS_OF_KEYS, BIAS_DENSE = 0, 1, 2
STATE_KEYS, PACK_KEYS = 64, 4
RESERVED = 1024  # bytes of an SM's shared memory that each block takes besides its own
SCORE_THREADS, SCORE_BLOCK_KEYS, SCORE_MAX_SLICE = 256, 32, 512
SELECT_THREADS = {"local_top": 1024, "filter_arrivals": 1024, "sweep_arrivals": 512, "count_better": 128}
ARRIVALS = 256
DOCUMENT_THREADS, DOCUMENT_CHUNK = 256, 4096
LIST_THREADS, LIST_CHUNK, LIST_WARPS, LIFETIME_KINDS = 256, 2048, 8, 19
REDUCE_THREADS, REDUCE_WARPS = 256, 8
PREPROCESS_QUERIES = 8  # of a warp, as in backward_preprocess.cu
SEQUENCE_THREADS, SUPER_UNIT = 256, 128


# Bytes of the ``struct Shared`` of the attention kernels.
def row_bytes(size: int, head_dim: int) -> int:
    """A row of ``head_dim`` elements of ``size`` bytes (kernels/common/smem_rows.cuh)."""
    return size * ((head_dim + 15) // 16 * 16) + 16


def tile_bytes(size: int, head_dim: int, rows: int, block_n: int) -> int:
    """A tile of ``rows`` query rows and its keys (kernels/sm80/gather.cuh), with intervals and a bias of keys."""
    return row_bytes(size, head_dim) * (rows + 4 * block_n) + 4 * 9 * block_n


def key_tile_bytes(size: int, head_dim: int, block_n: int, block_q: int) -> int:
    """sm80/backward_dkv.cu without a dense mask and bias."""
    return row_bytes(size, head_dim) * (2 * block_n + 4 * block_q) + 4 * (6 * block_q + 4 * block_n)


def bias_bytes(rows: int, columns: int, element: str) -> int:
    """Two tiles of a dense bias (kernels/common/bias.cuh)."""
    return 2 * rows * (columns + 8) * ELEMENT_BYTES[element]


def bias_pass_bytes(size: int, head_dim: int, block_m: int, block_n: int, element: str) -> int:
    """sm80/backward_dbias.cu; ``element`` is the bias's."""
    return (2 * row_bytes(size, head_dim) * (block_m + block_n) + 4 * block_n * (2 + blocks(block_m, 32))
            + bias_bytes(block_m, block_n, element) // 2)


def blocks(length: int, size: int) -> int:
    """Blocks of ``size`` that cover ``length``."""
    return -(-length // size)
