"""The gradients on Hopper GPUs (``kernels/sm90/backward_dq.cu`` and ``backward_dkv.cu``), with warpgroup MMAs (wgmma):
of queries query-major over the key lists of tiles; of keys, values and key biases key-stationary over the same
super-tile lists as the portable kernel. Where there are no such lists, and results need not be deterministic, the
key-stationary kernel makes all of them in one pass, with five products instead of seven.

They serve 16-bit elements in aligned rows without a dense bias, and softcaps that are not so large that their
formula loses the logits; the portable kernels do the rest and give the same numbers within rounding.
"""
from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.attention.problem import Problem
from cupy_dma.backends.cuda.attention.tma import queries_map
from cupy_dma.backends.cuda.lists.intervals import Fields
from cupy_dma.backends.cuda.lists.varlen import tile_count
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.builder import Builder
from cupy_dma.backends.cuda.runtime.configs import BIAS_DENSE, BIAS_NONE, ELEMENTS, blocks
from cupy_dma.backends.cuda.runtime.device import Runtime
from cupy_dma.backends.cuda.runtime.params import Packed, Ref, pack_pointer

if TYPE_CHECKING:
    from cupy_dma.backends.cuda.attention.sm90_splits import KeyPlan, QuerySplits
    from cupy_dma.calls.types import AttentionBackwardCall

MAX_NARROW_DIM = 128  # above it (WIDE in the kernels) there is no one pass, and launch_dq does not make delta
MIN_SOFTCAP, MAX_SOFTCAP = 1.0, 4096.0  # capped logits, and 1e-7 of an lse over the softcap, must be precise
MAX_DENSE_QUERIES = 131072  # of a dense mask (MAX_STEPS in the kernels)
STAGES = 2  # of queries, of backward_dkv.cu
BLOCK_M = 128  # of backward_dq.cu: rows of a tile
THREADS = 384  # of either
UNIT_QUERIES, POSTPROCESS_THREADS = 64, 256  # of backward_dq_postprocess.cu
PLAN_THREADS, ADD_THREADS, ADD_PIECES = 512, 256, 8  # of backward_dkv_plan.cu
NAME_QUERY, NAME_KEYS = "Hopper gradient of queries", "Hopper gradients of keys"
#: costs of lists of super-tiles with two passes, relative to one pass over keys in their own order: pairs per kept
#: pair, and extra steps of 64 x 128 per SM (docs/lab/grid.md)
LISTED_PAIR, LISTED_STEPS = 1.4, 6.0
#: tiles of launch_dkv on each SM: with fewer, in two passes up to MAX_NARROW_DIM, the portable kernel with its smaller
#: tiles is faster (docs/lab/backward.md, generation 44)
MIN_TILES = 1.0


@dataclass(frozen=True)
class _Config(jit.Config):
    """What both kernels are specialised in."""

    element: str
    head_dim: int
    stages: int
    keys: str
    causal: bool
    bias: int  # BIAS_NONE or BIAS_OF_KEYS
    softcap: bool
    sequences: bool
    bits: bool
    delay: bool  # of the bias


@dataclass(frozen=True)
class HopperBackwardDqConfig(_Config):
    source = "sm90/backward_dq.cu"
    heads: int  # of a GQA group in one tile
    block_m: int
    block_n: int

    @property
    def shared_bytes(self) -> int:
        """Size of ``struct Shared`` in the kernel's files, rounded up, and room to align it."""
        rows = (3 if self.head_dim <= MAX_NARROW_DIM else 2) * self.block_m + 2 * self.stages * self.block_n
        numbers = 1 + blocks(self.block_m // self.heads, 32) if self.bits else 3 + self.delay  # of a key
        return (1024 + blocks(self.head_dim, 64) * 128 * rows + self.stages * (4 * numbers * self.block_n + 32)
                + 8 * self.block_m + 96)


@dataclass(frozen=True)
class HopperBackwardDkvConfig(_Config):
    source = "sm90/backward_dkv.cu"
    block_q: int
    key_stages: int
    intervals: bool
    dquery: bool
    stored: bool = False  # dS is (sm90_stored.py)

    @property
    def shared_bytes(self) -> int:
        """As above."""
        keys = block_n(self.head_dim)
        rows = 2 * self.key_stages * keys + 2 * self.stages * self.block_q
        size = (1024 + blocks(self.head_dim, 64) * 128 * rows + 8 * self.stages * self.block_q
                + self.key_stages * ((16 + 4 * self.delay) * keys + 128) + 256)
        if self.head_dim > MAX_NARROW_DIM:
            size += 4 * keys * self.block_q
        if self.bits:
            size += self.stages * (keys * self.block_q // 8 + 4)
            size += self.key_stages * MAX_DENSE_QUERIES // self.block_q // 4
        if self.dquery:
            size += 4 * keys * self.block_q + 4 * self.block_q // UNIT_QUERIES * unit_sums(self.head_dim) + 64
        return size


@dataclass(frozen=True)
class HopperBackwardDqPostprocessConfig(HopperBackwardDkvConfig):
    source = "sm90/backward_dq_postprocess.cu"


@dataclass(frozen=True)
class HopperBackwardDkvPlanConfig(HopperBackwardDkvConfig):
    source = "sm90/backward_dkv_plan.cu"


def _against(build: Builder, call: AttentionBackwardCall, problem: Problem, vector: bool) -> list[str]:
    """Why neither takes a call. ``vector``: all rows are aligned."""
    softcap = call.forward.softcap
    against = {
        "Overrides.hopper is False": build.overrides.hopper is False, "no Hopper GPU": not build.is_hopper,
        "float32 elements": problem.size != 2, "rows that are not aligned to 16 bytes": not vector,
        "a dense bias": problem.bias_kind == BIAS_DENSE,
        "a delayed bias under a dense mask": problem.bits and problem.delay,
        f"a softcap outside {MIN_SOFTCAP:g} to {MAX_SOFTCAP:g}":
            softcap != 0.0 and not MIN_SOFTCAP <= softcap <= MAX_SOFTCAP}
    return [reason for reason, holds in against.items() if holds]


def reasons_query(build: Builder, call: AttentionBackwardCall, problem: Problem, vector: bool) -> list[str]:
    """Why ``launch_dq`` does not take the gradient of a call's queries, or ``delta`` alone."""
    found = _against(build, call, problem, vector)
    if not found and (BLOCK_M % problem.tile_heads or
                      _maps(call, BLOCK_M // problem.tile_heads, problem.tile_heads, out=True) is None):
        found = ["rows that TMA cannot read"]
    return found


def reasons_keys(build: Builder, call: AttentionBackwardCall, problem: Problem, vector: bool) -> list[str]:
    """Why ``launch_dkv`` does not take the gradients of a call's keys, values and bias."""
    found = _against(build, call, problem, vector)
    if problem.by_head:
        found.append("masks or biases per query head")
    if problem.bits and call.forward.query.shape[1] > MAX_DENSE_QUERIES:
        found.append(f"a dense mask of more than {MAX_DENSE_QUERIES} queries")
    return found or ([] if _maps(call, UNIT_QUERIES, 1) is not None else ["rows that TMA cannot read"])


def can_one_pass(call: AttentionBackwardCall, problem: Problem) -> bool:
    """Whether ``launch_dkv``, which takes the call, can make that of the queries, too, its terms in any order."""
    own = call.forward
    return own.head_dim <= MAX_NARROW_DIM and not problem.bits and not own.deterministic and "query" in call.needs


def lists_pay(runtime: Runtime, call: AttentionBackwardCall, problem: Problem) -> bool:
    """Whether lists of super-tiles and two passes take less time than keys in their own order in one pass. Of packed
    sequences, whose lengths are not known, they do."""
    own, bound = call.forward, None if problem.mask is None else problem.mask._bound
    if bound is None or problem.count:
        return True
    positions = max(0, own.key_length - own.query_length), own.key_length

    def pairs(most: int) -> int:
        """Of a head, where the query at position i sees i + 1 keys or ``most``."""
        first, last = (min(n, most) * (min(n, most) + 1) // 2 + max(0, n - most) * most for n in positions)
        return last - first

    saved = own.batch * own.heads * (pairs(own.key_length) - LISTED_PAIR * pairs(bound[0]))
    return saved > LISTED_STEPS * 64 * 128 * runtime.num_sms(own.query.device.index)


def has_enough_tiles(runtime: Runtime, call: AttentionBackwardCall, problem: Problem, entries: int) -> bool:
    """Whether ``launch_dkv`` keeps the GPU busy in two passes, if not by query splits; ``entries`` as there."""
    query = call.forward.query
    return (query.shape[3] > MAX_NARROW_DIM or not (entries or problem.count)
            or key_tiles(call, problem, entries) > MIN_TILES * runtime.num_sms(query.device.index))


def key_tiles(call: AttentionBackwardCall, problem: Problem, entries: int) -> int:
    batch, key_length, kv_heads, head_dim = call.forward.key.shape
    size = block_n(head_dim)
    return entries // size if entries else batch * kv_heads * tile_count(key_length, size, problem.count)


def block_n(head_dim: int) -> int:
    """Keys of a tile of ``launch_dkv``."""
    return 128 if head_dim <= MAX_NARROW_DIM else 64


def block_q(head_dim: int, one_pass: bool, narrow: bool) -> int:
    """Queries of a step of ``launch_dkv``; ``narrow``: its keys come from lists, or its bias has a delay, with which
    wide steps spill 2.5 KB."""
    return 128 if head_dim <= 64 and (one_pass or not narrow) else 64


def key_stages(head_dim: int, one_pass: bool) -> int:
    """Stages of keys of ``launch_dkv``: in one pass, and of wide heads, there is room for one."""
    return 1 if one_pass or head_dim > MAX_NARROW_DIM else 2


def unit_sums(head_dim: int) -> int:
    """Float32 sums of dq of ``UNIT_QUERIES`` queries, ``DQ_UNIT`` in the kernel's files."""
    return UNIT_QUERIES * (128 if head_dim > 64 else 16 if head_dim <= 16 else 32 * blocks(head_dim, 32))


def dq_block_n(head_dim: int) -> int:
    """Keys of a block of ``launch_dq``."""
    return 128 if head_dim <= 64 else 64 if head_dim <= 192 else 32


def dq_stages(head_dim: int) -> int:
    """Stages of such blocks."""
    return 3 if head_dim <= MAX_NARROW_DIM else 2


def launch_dq(build: Builder, call: AttentionBackwardCall, problem: Problem, fields: Fields, tickets: Ref) -> None:
    """Writes ``delta`` (of wide heads: reads it) and, if it is asked for, the gradient of the queries. ``fields``: what
    the call's launches share; ``tickets``: a counter in memory, 0 before."""
    query, heads = call.forward.query, problem.tile_heads
    head_dim, queries = query.shape[3], BLOCK_M // heads
    lists = problem.key_lists(build, queries, dq_block_n(head_dim)) if "query" in call.needs else None
    tiles = tile_count(query.shape[1], queries, problem.count)
    config = HopperBackwardDqConfig(
        element=ELEMENTS[query.dtype], head_dim=head_dim, heads=heads, block_m=BLOCK_M, block_n=dq_block_n(head_dim),
        stages=dq_stages(head_dim), keys="KEYS_CONTIGUOUS" if lists is None else lists.keys,
        causal=problem.tests_causality, bias=problem.bias_kind, softcap=call.forward.softcap > 0.0,
        sequences=problem.count > 0, bits=problem.bits, delay=problem.delay)
    all_tiles = tiles * (query.shape[2] // heads) * query.shape[0]
    params = problem.pack(lists, tiles=tiles, **fields) + _tickets(tickets, all_tiles)
    build.launch(build.load(config, "backward_dq", config.shared_bytes), min(all_tiles, build.num_sms), THREADS,
                 _packed(_maps(call, queries, heads, out=True), params), pdl=False)


def query_sums(call: AttentionBackwardCall, problem: Problem) -> int:
    """Float32 sums of dq in one pass."""
    query = call.forward.query
    tiles = tile_count(query.shape[1], UNIT_QUERIES, problem.count)
    return call.forward.key.shape[0] * query.shape[2] * tiles * unit_sums(query.shape[3])


def launch_dkv(build: Builder, call: AttentionBackwardCall, problem: Problem, keys: str, entries: int, fields: Fields,
               tickets: Ref, splits: QuerySplits, sums: Ref | None, stored: tuple[int, Packed] | None = None,
               plan: KeyPlan | None = None) -> None:
    """Writes the gradients of keys, values and bias, or with lists of super-tiles, of so many ``entries``, their sums
    over these, or those of ``splits``; and with ``sums``, the address of so many zeros as ``query_sums``, that of
    queries, from ``delta``. ``keys``: their order. ``fields`` and ``tickets`` as in ``launch_dq``, with the lists and
    where sums over tiles or splits go. ``stored``: of how many tiles dS is stored, which are all that are taken, and
    the parameters of that (``StoredDs`` in the kernel's files). ``plan``: of keys in the order of their lifetimes; it
    adds the sums of their splits, too."""
    query, key, one_pass = call.forward.query, call.forward.key, sums is not None
    head_dim = key.shape[3]
    narrow = keys != "KEYS_CONTIGUOUS" or problem.delay
    config = HopperBackwardDkvConfig(
        element=ELEMENTS[query.dtype], head_dim=head_dim, block_q=block_q(head_dim, one_pass, narrow), stages=STAGES,
        key_stages=key_stages(head_dim, one_pass), keys=keys,
        intervals=problem.tests_intervals, causal=problem.tests_causality, bias=problem.bias_kind,
        softcap=call.forward.softcap > 0.0, sequences=problem.count > 0, bits=problem.bits, delay=problem.delay,
        dquery=one_pass, stored=stored is not None)
    tiles, of_stored = stored or (key_tiles(call, problem, entries), b"")
    query_units = tile_count(query.shape[1], UNIT_QUERIES, problem.count)
    params = problem.pack(None, **fields) + _tickets(tickets, tiles * splits.count) + query_units.to_bytes(4, "little")
    params += pack_pointer(sums or 0) + splits.steps.to_bytes(4, "little") + tiles.to_bytes(4, "little")
    params += of_stored if plan is None else plan.packed
    packed = _packed(_maps(call, block_q(head_dim, one_pass, narrow), 1), params)
    slots = 0 if plan is None else plan.slots
    plain = asdict(config) | {"intervals": False, "causal": False, "bias": BIAS_NONE, "softcap": False, "delay": False}
    if plan is not None:
        build.launch(build.load(HopperBackwardDkvPlanConfig(**plain), "plan_tickets"), 1, PLAN_THREADS, packed)
    build.launch(build.load(config, "backward_dkv", config.shared_bytes),
                 min(tiles * splits.count + slots, build.num_sms), THREADS, packed, pdl=False)
    if slots:
        build.launch(build.load(HopperBackwardDkvPlanConfig(**plain), "add_slots"), slots // 2 * ADD_PIECES,
                     ADD_THREADS, packed)
    if one_pass:
        last = HopperBackwardDqPostprocessConfig(**plain | {"keys": "KEYS_CONTIGUOUS"})
        build.launch(build.load(last, "backward_dq_postprocess"), key.shape[0] * query.shape[2] * query_units,
                     POSTPROCESS_THREADS, packed)


def _maps(call: AttentionBackwardCall, queries: int, heads: int, out: bool = False) -> Packed | None:
    """The TMA descriptors of query, dout and, if asked for, ``out``; None where TMA cannot read them."""
    rows: tuple[Operand, ...] = (call.forward.query, call.dout, call.out) if out else (call.forward.query, call.dout)
    maps = Packed(b"")
    for operand in rows:
        found = queries_map(operand, queries, heads)
        if found is None:
            return None
        maps += found
    return maps


def _tickets(pointer: Ref, tiles: int) -> Packed:
    """The fields behind the attention's parameters."""
    return pack_pointer(pointer) + tiles.to_bytes(4, "little")


def _packed(maps: Packed | None, params: Packed) -> Packed:
    """A kernel's argument: the maps first, and all of it a multiple of their alignment."""
    assert maps is not None  # or the kernel would not have taken the call
    return (maps + params).padded(64)
