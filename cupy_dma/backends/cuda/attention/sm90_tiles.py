"""Tile shapes of the Hopper forward (``kernels/sm90``): candidates for a call, and the properties they depend on.

``sm90_schedule.tile_shape`` chooses the fastest by measured costs (``sm90_costs``).
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cupy_dma.backends.cuda.attention.problem import Problem
from cupy_dma.backends.cuda.runtime.configs import BIAS_DENSE

if TYPE_CHECKING:
    from cupy_dma.calls.types import AttentionCall


class HopperTile(NamedTuple):
    """The tile of a CTA: rows (queries times heads), keys of a block, stages of keys, of values and of queries, and
    whether the consumer warpgroups take turns issuing MMAs (ping-pong)."""

    block_m: int
    block_n: int
    stages: int
    value_stages: int
    query_stages: int
    ping_pong: bool = False


# By the kind of a call's keys and the largest head dim, measured by `python -m benchmarks tune_sm90`: one or two
# candidates. Without ping-pong the consumer warpgroups drift into step and compete for the tensor cores; with two of
# them and little other work, ping-pong costs more than it gains. A tile of few keys ends before the next but one has
# its queries, which need the stage of its output: there a third query stage pays.
WIDE_64, WIDE_128 = HopperTile(192, 96, 5, 5, 2, ping_pong=True), HopperTile(192, 64, 4, 3, 2, ping_pong=True)
TILES: dict[str, dict[int, tuple[HopperTile, ...]]] = {
    "short intervals": {
        64: (HopperTile(192, 64, 6, 6, 3, ping_pong=True), HopperTile(128, 64, 6, 6, 3, ping_pong=True)),
        128: (HopperTile(192, 64, 2, 2, 3, ping_pong=True), HopperTile(128, 64, 4, 4, 2, ping_pong=True))},
    "intervals": {
        64: (WIDE_64, HopperTile(128, 128, 4, 4, 2, ping_pong=True)),
        128: (WIDE_128, HopperTile(128, 64, 4, 4, 2, ping_pong=True)),
        192: (HopperTile(128, 64, 2, 2, 2, ping_pong=True),), 256: (HopperTile(128, 32, 2, 2, 2, ping_pong=True),)},
    "intervals with softcap": {
        64: (WIDE_64, HopperTile(128, 128, 4, 4, 2)),
        128: (WIDE_128, HopperTile(128, 64, 4, 4, 2, ping_pong=True)),
        192: (HopperTile(128, 64, 2, 2, 2, ping_pong=True),), 256: (HopperTile(128, 32, 2, 2, 2, ping_pong=True),)},
    "bits": {
        64: (HopperTile(128, 128, 4, 4, 2),), 128: (HopperTile(128, 128, 2, 2, 2, ping_pong=True),),
        192: (HopperTile(128, 64, 2, 2, 2),), 256: (HopperTile(128, 32, 2, 2, 2, ping_pong=True),)},
    "contiguous": {
        64: (HopperTile(192, 128, 3, 3, 2, ping_pong=True), HopperTile(128, 128, 4, 4, 2)),
        128: (HopperTile(128, 128, 2, 2, 2, ping_pong=True),),
        192: (HopperTile(128, 64, 2, 2, 2),), 256: (HopperTile(128, 32, 2, 2, 2),)},
    "contiguous with bias": {
        64: (WIDE_64, HopperTile(128, 128, 4, 4, 2)), 128: (HopperTile(128, 128, 2, 2, 2),),
        192: (HopperTile(128, 64, 2, 2, 2),), 256: (HopperTile(128, 32, 2, 2, 2, ping_pong=True),)},
    "contiguous with bias and softcap": {
        64: (WIDE_64, HopperTile(128, 128, 4, 4, 2)), 128: (HopperTile(128, 128, 2, 2, 2),),
        192: (HopperTile(128, 64, 2, 2, 2),), 256: (HopperTile(128, 32, 2, 2, 2, ping_pong=True),)},
}
SHORT_LISTS = {64: 192, 128: 128}  # intervals are short up to this many keys per query


class ScheduleKey(NamedTuple):
    """The properties of a call that its tiles depend on."""

    keys: str  # a name of ``TILES``
    head_dim: int
    tile_heads: int  # query heads of a GQA group in one tile
    group_sets: int  # sets of ``tile_heads`` heads in a GQA group
    groups: int  # kv heads of the whole batch
    query_length: int
    key_length: int
    seen: int  # keys that a query may see
    sequences: int  # packed ones; 0: none
    bits: bool  # there is a dense mask
    listed: bool  # there is an interval mask
    causal: bool  # there is none, and queries see the keys up to their own position

    @property
    def sets(self) -> int:
        """Sets of ``tile_heads`` heads in the batch."""
        return self.groups * self.group_sets


def schedule_key(call: AttentionCall, problem: Problem) -> ScheduleKey:
    bound = None if problem.mask is None else problem.mask._bound
    seen = call.key_length if bound is None else min(call.key_length, bound[0])
    listed = problem.mask is not None
    return ScheduleKey(_keys(call, problem, seen), call.head_dim, problem.tile_heads,
                 call.heads // call.kv_heads // problem.tile_heads, call.batch * call.kv_heads, call.query_length,
                 call.key_length, seen, problem.count, problem.bits, listed, problem.causal and not listed)


def _keys(call: AttentionCall, problem: Problem, seen: int) -> str:
    if is_dense(problem):
        return "bits"
    if problem.mask is not None:
        if call.softcap > 0.0:
            return "intervals with softcap"
        return "short intervals" if seen <= (entry(SHORT_LISTS, call.head_dim) or 0) else "intervals"
    if problem.bias is None:
        return "contiguous"
    return "contiguous with bias" if call.softcap == 0.0 else "contiguous with bias and softcap"


def is_dense(problem: Problem) -> bool:
    """A dense mask, a dense bias, or both: most blocks have consecutive keys."""
    return problem.bits or problem.bias_kind == BIAS_DENSE


def tiles_of(keys: str, head_dim: int) -> tuple[HopperTile, ...]:
    """The candidate tiles for a name of ``TILES``; empty if there are none for this head dim."""
    return entry(TILES[keys], head_dim) or ()


def entry(table: dict[int, Any], head_dim: int) -> Any:
    return next((entry for largest, entry in table.items() if head_dim <= largest), None)
