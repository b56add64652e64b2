"""Which kernels a call is to take, where a test, a tuning script or a user does not want the fastest ones."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cupy_dma.backends.cuda.attention.sm90_backward import QuerySplits
    from cupy_dma.backends.cuda.attention.sm90_schedule import Schedule
    from cupy_dma.backends.cuda.attention.sm90_tiles import HopperTile


@dataclass(frozen=True)
class Overrides:
    """None: what is fastest. Kernels that cannot take a call are not taken, whatever is asked for.

    Attributes
    ----------
    hopper : bool or None
        False: only the portable kernels. True: those of Hopper GPUs, also where others are faster.
    decode : bool or None
        Whether the kernel for few queries is taken.
    tile, schedule
        Of the Hopper forward.
    one_pass : bool or None
        Whether the Hopper backward is one pass where it need not be deterministic.
    stored : bool or None
        True: in two passes of the Hopper backward over key lists, the key pass stores dS, from which the query pass
        makes its gradient (up to 2 GiB of workspace).
    parts
        Of the tiles of keys in the Hopper backward.
    counted : bool or None
        Whether the selection is one kernel in which each key meets all others.
    shared_memory : int or None
        Bytes of shared memory that a block may have, as on another card: 163 KiB on an A100, 99 KiB on consumer cards.
        Tiles are those of that card, and as many blocks share an SM as there.
    """

    hopper: bool | None = None
    decode: bool | None = None
    tile: HopperTile | None = None
    schedule: Schedule | None = None
    one_pass: bool | None = None
    stored: bool | None = None
    parts: QuerySplits | None = None
    counted: bool | None = None
    shared_memory: int | None = None


NONE = Overrides()
