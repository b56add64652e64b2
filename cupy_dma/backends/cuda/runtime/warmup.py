"""Compiling ahead of the first call."""
from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from cupy_dma.backends.cuda.attention import sm90, sm90_tiles, split
from cupy_dma.backends.cuda.attention.tiles import heads_per_tile, tile_shape
from cupy_dma.backends.cuda.decode import chunk, step
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.configs import (
    BIAS_NONE,
    BIAS_OF_KEYS,
    ELEMENT_BYTES,
    ELEMENTS,
    DocumentConfig,
    ForwardConfig,
    LayoutConfig,
    LifetimesConfig,
    ListConfig,
    SelectConfig,
)


def shared_memory_limit(arch: str) -> int:
    """Bytes of shared memory a block may have (CUDA C++ Programming Guide, technical specifications per compute
    capability); the smallest for unknown ones."""
    kib = {"sm_80": 163, "sm_87": 163, "sm_90a": 227, "sm_100": 227, "sm_101": 227, "sm_103": 227, "sm_110": 227}
    return 1024 * kib.get(arch, 99)


def _aligned(head_dim: int, dtype: str) -> bool:
    """Whether rows of contiguous arrays are read 16 bytes at a time."""
    return head_dim * ELEMENT_BYTES[ELEMENTS[dtype]] % 16 == 0


def usual_configs(head_dims: tuple[int, ...] = (64, 128), dtypes: tuple[str, ...] = ("float16", "bfloat16"),
                  groups: tuple[int, ...] = (1, 2, 4), shared_limit: int = 99 * 1024) -> list[jit.Config]:
    """The kernels of ordinary calls. Key scores are specialised in the number of heads and compiled when called."""
    configs: list[jit.Config] = [LayoutConfig(element=element) for element in ELEMENTS.values()]
    configs += [SelectConfig(*flags) for flags in itertools.product((False, True), repeat=2)]
    configs += [DocumentConfig(kind) for kind in ("int", "long long")]
    configs.append(LifetimesConfig(causal=False))
    configs.append(ListConfig(causal=False, block_n=64))  # of lists per tile, whatever their block size
    for head_dim in head_dims:
        tiles = {dtype: tile_shape(head_dim, shared_limit, size=ELEMENT_BYTES[ELEMENTS[dtype]]) for dtype in dtypes}
        configs += [ListConfig(causal=False, block_n=tile.block_n) for tile in tiles.values()]
        for heads in sorted({heads_per_tile(group) for group in groups}):
            for dtype in dtypes:
                for keys, causal, bias in (("KEYS_CONTIGUOUS", True, BIAS_NONE),
                                           ("KEYS_CONTIGUOUS", True, BIAS_OF_KEYS),
                                           ("KEYS_CONTIGUOUS", False, BIAS_NONE), ("KEYS_LISTED", False, BIAS_OF_KEYS),
                                           ("KEYS_SHARED", False, BIAS_OF_KEYS)):
                    configs.append(ForwardConfig(
                        element=ELEMENTS[dtype], head_dim=head_dim, vector=_aligned(head_dim, dtype), heads=heads,
                        **tiles[dtype]._asdict(), keys=keys, causal=causal, bias=bias, softcap=False))
    return list(dict.fromkeys(configs))


def hopper_configs(head_dims: tuple[int, ...] = (64, 128), dtypes: tuple[str, ...] = ("float16", "bfloat16"),
                   groups: tuple[int, ...] = (1, 2, 4)) -> list[jit.Config]:
    """The kernels of ``kernels/sm90`` for the same calls; masks of few keys still use the portable ones."""
    configs: list[jit.Config] = []
    elements = [ELEMENTS[dtype] for dtype in dtypes if ELEMENT_BYTES[ELEMENTS[dtype]] == 2]
    for kind, keys, causal, bias in (("contiguous", "KEYS_CONTIGUOUS", True, BIAS_NONE),
                                     ("contiguous with bias", "KEYS_CONTIGUOUS", True, BIAS_OF_KEYS),
                                     ("contiguous", "KEYS_CONTIGUOUS", False, BIAS_NONE),
                                     ("intervals", "KEYS_LISTED", False, BIAS_OF_KEYS),
                                     ("short intervals", "KEYS_LISTED", False, BIAS_OF_KEYS),
                                     ("intervals", "KEYS_SHARED", False, BIAS_OF_KEYS)):
        for head_dim in filter(lambda size: _aligned(size, "bfloat16"), head_dims):
            for tile in sm90_tiles.tiles_of(kind, head_dim):
                if keys != "KEYS_CONTIGUOUS":
                    configs.append(ListConfig(causal=False, block_n=tile.block_n))
                served = [(element, heads) for heads in sorted({heads_per_tile(group) for group in groups})
                          for element in elements]
                # Split are: the last tiles without a mask, all tiles of few queries under causality or over long lists.
                splits = kind == "contiguous" or kind == "intervals" and keys == "KEYS_LISTED"
                configs += [sm90.HopperForwardConfig(
                    element=element, head_dim=head_dim, heads=heads, **tile._asdict(), keys=keys, causal=causal,
                    bias=bias, softcap=False, bits=False, bias_element="float", sequences=False,
                    kv_tma=keys == "KEYS_CONTIGUOUS", query_tma=tile.block_m % heads == 0, runs=False, split=split_keys)
                    for split_keys in (False, True)[:1 + splits] for element, heads in served]
                if splits:
                    configs += [sm90.CombineConfig(element=element, head_dim=head_dim, heads=heads,
                                                   block_m=tile.block_m) for element, heads in served]
    return list(dict.fromkeys(configs))


def decode_configs(head_dims: tuple[int, ...] = (64, 128), dtypes: tuple[str, ...] = ("float16", "bfloat16"),
                   groups: tuple[int, ...] = (1, 2, 4), clusters: bool = False) -> list[jit.Config]:
    """The step of the decode cache, with ``clusters`` also that for few heads, and its chunks."""
    units = {16 if _aligned(head_dim, dtype) else ELEMENT_BYTES[ELEMENTS[dtype]]
             for head_dim, dtype in itertools.product(head_dims, dtypes)}
    configs: list[jit.Config] = [chunk.ChunkConfig(chunk.UNITS[unit], 0) for unit in sorted(units)]
    for head_dim, group, dtype in itertools.product(head_dims, groups, dtypes):
        rows, sets = split.rows_of_group(group, head_dim, head_dim, dtype)
        configs += [step.StepConfig(
            element=ELEMENTS[dtype], head_dim=head_dim, value_dim=head_dim, vector=_aligned(head_dim, dtype), rows=rows,
            warps=warps, softcap=False, min_blocks=split.min_blocks(head_dim, head_dim, dtype, rows, cluster),
            attend=True, cluster=cluster)
            for warps, cluster in ((split.WARPS, 1), (step.CLUSTER_WARPS, step.CLUSTER))[:1 + (clusters and sets == 1)]]
    return configs


def jobs(arch: str, shared_limit: int | None = None, head_dims: tuple[int, ...] = (64, 128),
         dtypes: tuple[str, ...] = ("float16", "bfloat16"),
         groups: tuple[int, ...] = (1, 2, 4)) -> list[tuple[str, Callable[[], Any]]]:
    """(label, job) pairs; ``job()`` compiles one kernel file for ``arch``.

    ``shared_limit``: bytes of shared memory a block may have, by default those of ``arch``.
    """
    configs = [*usual_configs(head_dims, dtypes, groups, shared_limit or shared_memory_limit(arch)),
               *decode_configs(head_dims, dtypes, groups, arch == "sm_90a")]
    if arch == "sm_90a":
        configs += hopper_configs(head_dims, dtypes, groups)
    return [(f"{config.source} D={config.head_dim}" if hasattr(config, "head_dim") else config.source,
             functools.partial(jit.compile, config, arch)) for config in dict.fromkeys(configs)]
