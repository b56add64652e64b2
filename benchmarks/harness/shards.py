"""One sequence over several ranks: inputs that every rank can draw for every shard, and checks of a shard's output."""
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness import decoder, measure
from benchmarks.harness.check import TokenCheck, best_keys
from cupy_dma.distributed import empty_with_room, shard_lengths
from cupy_dma.distributed.agreement import Agreement

ROWS = 6  # checked in each shard
GRADIENT_ROUNDINGS = 8.0  # of the largest entry, in its type: allowed difference from a gradient of one GPU
PIECE = 2**26  # entries compared at once: 4M keys in float64 are too many for a GPU that also holds the rest


@dataclass(frozen=True)
class Problem:
    """A sequence of ``length`` tokens over ``world`` ranks, B = 1. All inputs are normal numbers, with one seed per
    shard."""

    length: int
    world: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    dtype: torch.dtype
    device: str

    @property
    def lengths(self) -> list[int]:
        return shard_lengths(self.length, self.world)

    def begin(self, rank: int) -> int:
        return sum(self.lengths[:rank])

    def _draw(self, name: str, rank: int, into: Tensor) -> Tensor:
        generator = torch.Generator(into.device).manual_seed(zlib.crc32(f"{name} {rank} {self.length}".encode()))
        return into.normal_(generator=generator)

    def shard(self, name: str, rank: int, room: bool = False) -> Tensor:
        """query, key, value, dout ``(1, n, heads, D)`` or scores ``(1, Hkv, n)`` of a rank; a key or value may have
        room before its rows."""
        n, heads = self.lengths[rank], self.heads if name in ("query", "dout") else self.kv_heads
        if name == "scores":
            return self._draw(name, rank, torch.empty((1, heads, n), device=self.device))
        rows = self.window if room and name in ("key", "value") else 0
        return self._draw(name, rank, empty_with_room(1, n, heads, self.head_dim, rows, dtype=self.dtype,
                                                      device=self.device))

    def whole(self, name: str) -> Tensor:
        """The shards of all ranks, concatenated."""
        shards = [self.shard(name, rank) for rank in range(self.world)]
        return torch.cat(shards, 2 if name == "scores" else 1)

    def inputs(self, rank: int | None, room: bool, grad: bool) -> list[Tensor]:
        """query, key, value, scores of a rank, or of all."""
        names = ("query", "key", "value", "scores")
        found = [self.whole(name) if rank is None else self.shard(name, rank, room) for name in names]
        return [x.requires_grad_(grad) for x in found]

    def bytes_needed(self, peer: str, grad: bool) -> int:
        """Estimated peak memory of a rank of this peer, including checks; with gradients 1.4 times its arrays (76 GB
        for 56 GB of arrays at 2M keys per rank, 16/8 D128)."""
        group = self.heads // self.kv_heads if peer == "ring" else 1
        of_heads, of_kv_heads = (4, 5) if grad else (2, 3)  # arrays of a shard
        of_kv_heads = of_kv_heads * group + 2 * (peer == "copies")
        arrays = max(self.lengths) * self.head_dim * self.dtype.itemsize * (
            of_heads * self.heads + of_kv_heads * self.kv_heads)
        return arrays * 7 // 5 if grad else arrays

    def check(self, out: Tensor, rank: int, query: Tensor) -> dict[str, Any]:
        """Check rows of a rank's output, including the first and last, against float64 attention over the exact
        selection."""
        n, first, group = self.lengths[rank], self.begin(rank), self.heads // self.kv_heads
        drawn = np.random.default_rng(rank).integers(0, max(n, 1), ROWS - 2).tolist() if n else []
        rows = sorted({*drawn, *((0, n - 1) if n else ())})
        scores = torch.cat([self.shard("scores", q)[0] for q in range(rank + 1)], 1)
        kept = {(row, g): best for row in rows
                for g, best in enumerate(best_keys(scores[:, :first + row + 1], self.window))}
        keys, values = (self._rows(name, kept, rank) for name in ("key", "value"))
        query, found = query.detach(), TokenCheck()
        for (row, g), index in kept.items():
            own = slice(g * group, (g + 1) * group)
            found.compare(out[0, row, own], None, query[0, row, own], keys[row, g][:, None], values[row, g][:, None],
                          scores[g:g + 1, index])
        return {"rows": len(rows), **found.result()}

    def _rows(self, name: str, kept: dict[Any, Tensor], rank: int) -> dict[Any, Tensor]:
        """The kept rows of a key or value from all shards, one shard at a time."""
        found: dict[Any, list[Tensor]] = {at: [] for at in kept}
        for q in range(rank + 1):
            x, begin = self.shard(name, q)[0], self.begin(q)
            for (row, g), index in kept.items():
                own = index[(index >= begin) & (index < begin + self.lengths[q])] - begin
                found[row, g].append(x[own, g])
        return {at: torch.cat(parts) for at, parts in found.items()}


def gradients_differ(ours: list[Tensor], one: list[Tensor]) -> tuple[float, float]:
    """The largest difference between gradients, relative to the largest entry, and the allowed one. NaN if a gradient
    holds NaN: torch's max passes it on, Python's does not."""
    def apart(a: Tensor, b: Tensor) -> Tensor:
        pieces = zip(a.flatten().split(PIECE), b.flatten().split(PIECE))
        difference = torch.stack([(x.double() - y.double()).abs().max() for x, y in pieces]).max()
        return difference / b.abs().max().double().clamp(min=1e-30)

    worst = torch.stack([apart(a, b) for a, b in zip(ours, one)]).max().item()
    return worst, GRADIENT_ROUNDINGS * torch.finfo(ours[0].dtype).eps


class Counting:
    """Bytes that this rank receives from others in each collective of ``cupy_dma.distributed``."""

    def __init__(self, moved: list[tuple[str, int]] | None):
        self.moved = moved

    def __enter__(self) -> None:
        self.replaced, moved = Agreement.started, self.moved
        if moved is None:
            return

        def started(agreement: Any, collective: Any, output: Any, *rest: Any, **options: Any) -> Any:
            gathers = "all_to_all" not in collective.__name__
            moved.append((collective.__name__, output.nbytes - (output.nbytes // agreement.world if gathers else 0)))
            return self.replaced(agreement, collective, output, *rest, **options)

        Agreement.started = started  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        Agreement.started = self.replaced  # type: ignore[method-assign]


def ring(problem: Any, inputs: list[Any]) -> tuple[list[Any], Callable[[], Any], str]:
    """Inputs, call and kernel of torch's ring attention. It has no GQA, so kv heads are repeated before timing; the
    shards are treated as if its load balancer had cut them."""
    query, key, value = (x.detach().transpose(1, 2) for x in inputs[:3])
    group, kernel = problem.heads // problem.kv_heads, SDPBackend.CUDNN_ATTENTION
    if problem.device == "cpu":
        kernel = SDPBackend.FLASH_ATTENTION
    given = [x.contiguous().requires_grad_(inputs[0].requires_grad)
             for x in (query, *(x.repeat_interleave(group, 1) for x in (key, value)))]

    def call() -> Any:
        with sdpa_kernel(kernel):
            return torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True).transpose(1, 2)

    return given, call, kernel.name.lower()


@functools.cache
def _mesh(kind: str, world: int) -> Any:
    return init_device_mesh(kind, (world,))


def as_ring(problem: Any) -> Any:
    """Inside the context, SDPA is ring attention."""
    buffer = torch.empty(2 * problem.world, device=problem.device)  # ring attention requires a buffer
    return context_parallel(_mesh(problem.device.partition(":")[0], problem.world), buffers=[buffer],
                            buffer_seq_dims=[0], no_restore_buffers={buffer})


NEAR = 5e-3  # nats: allowed difference of a step's loss, since bfloat16 sums depend on the number of ranks


def model_steps(sizes: decoder.Sizes, batch: int, length: int, count: int, device: str, group: Any = None,
          everyone: Any = None, row: slice = slice(None)) -> dict[str, Any]:
    """Time ``count`` training steps (forward, backward with recomputed layers, AdamW) of ``batch`` sequences of
    ``length`` tokens, after two untimed ones: times, losses and peak memory of this rank. ``group``: the ranks that
    share a sequence (None on one GPU); ``everyone``: all ranks that train; ``row``: the sequences of this rank (all on
    one GPU)."""
    with decoder.decoder(sizes, "dma", compiled=False, checkpoint=True, device=device,
                         dtype=torch.bfloat16) as (model, _):
        model.share(group)
        forward = model if group is None else DistributedDataParallel(model, process_group=everyone)
        batches = iter([decoder.batch_of(sizes, batch, length, i, device)[row] for i in range(2 + count)])
        step, losses = decoder.trainer(lambda: forward(next(batches)), model.parameters(), 3e-4)
        step()
        step()
        return {**measure.timed(step, count, device), "losses": [loss.item() for loss in losses]}


def differ(ours: list[float], one: list[float]) -> tuple[float, float]:
    """The largest difference of a step's loss, and the allowed one."""
    return max(abs(a - b) for a, b in zip(ours, one)), NEAR
