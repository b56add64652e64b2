"""Compiling ahead of the first call."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from cupy_dma import jit
from cupy_dma.backends.cuda.configs import (
    BIAS_NONE,
    BIAS_OF_KEYS,
    ELEMENT_BYTES,
    ELEMENTS,
    ForwardConfig,
    LayoutConfig,
    ListConfig,
    SelectConfig,
)
from cupy_dma.backends.cuda.tiles import heads_per_tile, tile_shape


def usual_configs(head_dims: tuple[int, ...] = (64, 128), dtypes: tuple[str, ...] = ("float16", "bfloat16"),
                  groups: tuple[int, ...] = (1, 2, 4), shared_limit: int = 99 * 1024) -> list[jit.Config]:
    """The kernels that ordinary calls need. Key scores are specialised in the number of heads: compiled when called."""
    configs: list[jit.Config] = [LayoutConfig(element) for element in ELEMENTS.values()]
    configs += [SelectConfig(documents=False, padding=padding) for padding in (False, True)]
    for head_dim in head_dims:
        tiles = {dtype: tile_shape(head_dim, shared_limit, size=ELEMENT_BYTES[ELEMENTS[dtype]]) for dtype in dtypes}
        configs += [ListConfig(causal=False, block_n=tile.block_n) for tile in tiles.values()]
        for heads in sorted({heads_per_tile(group) for group in groups}):
            for dtype in dtypes:
                for keys, causal, bias in (("KEYS_CONTIGUOUS", True, BIAS_NONE),
                                           ("KEYS_CONTIGUOUS", True, BIAS_OF_KEYS),
                                           ("KEYS_CONTIGUOUS", False, BIAS_NONE), ("KEYS_LISTED", False, BIAS_OF_KEYS),
                                           ("KEYS_SHARED", False, BIAS_OF_KEYS)):
                    configs.append(ForwardConfig(ELEMENTS[dtype], head_dim, True, heads, *tiles[dtype], keys,
                                                 causal, bias, softcap=False))
    return list(dict.fromkeys(configs))


def warmup_jobs(head_dims: tuple[int, ...] = (64, 128), dtypes: tuple[str, ...] = ("float16", "bfloat16"),
                groups: tuple[int, ...] = (1, 2, 4)) -> list[tuple[str, Callable[..., Any]]]:
    """(label, job) pairs; ``job(arch=None)`` compiles one kernel file for ``arch``, by default the current device's."""
    from cupy_dma.backends import cuda

    if cuda.unavailable() is None:
        import cupy

        index = cupy.cuda.runtime.getDevice()
        own_arch, limit = jit.device_arch(index), cuda.runtime.shared_memory_limit(index)
    else:
        own_arch, limit = "sm_90a", 227 * 1024

    def job(config: jit.Config, arch: str | None = None) -> Any:
        return jit.compile(config, arch or own_arch)

    return [(f"{config.source} D={config.head_dim}" if isinstance(config, ForwardConfig) else config.source,
             functools.partial(job, config)) for config in usual_configs(head_dims, dtypes, groups, limit)]
