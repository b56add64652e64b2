"""Kernels that a test, a tuning script or a user asks for in place of the fastest ones."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cupy_dma.backends.cuda.attention.sm90_schedule import Schedule
    from cupy_dma.backends.cuda.attention.sm90_splits import QuerySplits
    from cupy_dma.backends.cuda.attention.sm90_tiles import HopperTile


@dataclass(frozen=True)
class Overrides:
    """None means the fastest. A kernel that cannot run a call is never used, whatever is requested.

    Attributes
    ----------
    hopper : bool or None
        False: only the portable kernels. True: those of Hopper GPUs, even if others are faster.
    decode : bool or None
        Whether to use the kernel for few queries.
    tile, schedule
        Of the Hopper forward.
    one_pass : bool or None
        Whether the Hopper backward is one pass if it need not be deterministic.
    stored : bool or None
        Whether in two passes of the Hopper backward over key lists the key pass stores dS, from which the query pass
        makes its gradient (up to ``CUPY_DMA_STORED_MIB`` of workspace, 4 GiB by default).
    query_splits
        Of the tiles of keys in the Hopper backward; of keys in the order of their lifetimes only the steps of a split.
    counted : bool or None
        Whether the selection is one kernel that compares each key with all others.
    shared_memory : int or None
        Bytes of shared memory per block, as on another card: 163 KiB on an A100, 99 KiB on consumer cards. Tiles and
        blocks per SM are those of that card.
    """

    hopper: bool | None = None
    decode: bool | None = None
    tile: HopperTile | None = None
    schedule: Schedule | None = None
    one_pass: bool | None = None
    stored: bool | None = None
    query_splits: QuerySplits | None = None
    counted: bool | None = None
    shared_memory: int | None = None


NONE = Overrides()
