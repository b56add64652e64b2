"""A decoder whose attention can be exchanged, for benchmarks/routines/training.py.

    x  = embed(tokens)                                            (B, N, width)
    x += attention(norm(x)),  x += down(silu(gate(h)) * up(h)),  h = norm(x)      in each layer
    loss = mean cross-entropy of norm(x) @ embed.weight^T and the next token

Projections, rotary positions and norms of queries and keys are those of ``DynamicMaskSelfAttention`` for every peer;
only the core, from query, key and value to output, differs:

    dma     DynamicMaskAttention
    sdpa    causal scaled_dot_product_attention over all keys, by cuDNN where it can
    flex    the selection of DynamicMaskAttention, its block mask built in every step, and FlexAttention
    none    query + key + value, without attention: what the rest of the step costs

Logits are computed for ``CHUNK`` tokens at a time, and again in the backward pass, so they fit for any number of
tokens. A parameter's name seeds its initial values, so peers share equal parameters.
"""
import contextlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as checkpointed

from benchmarks.harness import peers
from cupy_dma import IntervalMask, distributed
from cupy_dma.torch import DynamicMaskAttention, DynamicMaskSelfAttention

CHUNK = 8192  # tokens of which logits are held at a time
COMPILER = "inductor"
BLOCK = 128  # of FlexAttention's block mask


@dataclass(frozen=True)
class Sizes:
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int  # width of the MLP
    window: int
    vocabulary: int = 32768
    learning_rate: float = 3e-4


MODELS = {
    "80m": Sizes(layers=12, width=768, heads=6, kv_heads=3, head_dim=128, inner=1536, window=1024),
    "1.7b": Sizes(layers=4, width=2048, heads=16, kv_heads=8, head_dim=128, inner=6144, window=1024,
                  learning_rate=5e-5),
    "tiny": Sizes(layers=2, width=64, heads=4, kv_heads=2, head_dim=16, inner=128, window=32, vocabulary=256)}


class DenseCore(nn.Module):
    """Causal attention over all keys. ``grouped``: the backend supports fewer kv heads than query heads."""

    def __init__(self, grouped: bool):
        super().__init__()
        self.grouped = grouped

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        group = q.shape[1] // k.shape[1]
        if group > 1 and not self.grouped:
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1 and self.grouped)
        return out.transpose(1, 2)


class FlexCore(DynamicMaskAttention):
    """The same selection, then FlexAttention compiled separately: if the graph also computes the scores, compiled
    FlexAttention silently returns no gradient for them (torch 2.13)."""

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.attend = torch.compile(peers.flex_intervals, dynamic=False, backend=COMPILER)

    @torch.compiler.disable
    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        scores = self.scores(value)
        mask = IntervalMask.top_w(scores.detach(), self.window)
        return self.attend(query, key, value, mask.start, mask.stop, scores, BLOCK)


class NoCore(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        added = (key + value).unsqueeze(3)  # (B, N, Hkv, 1, D)
        return (query.unflatten(2, (key.shape[2], -1)) + added).flatten(2, 3)


def dense_backend(sizes: Sizes, device: str, dtype: torch.dtype) -> tuple[SDPBackend | None, bool, str]:
    """The first backend of ``sdpa`` that gives gradients, whether it supports grouped kv heads, and a note."""
    if not device.startswith("cuda"):
        return None, True, "torch's choice"
    shapes = [(1, heads, 2 * BLOCK, sizes.head_dim) for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)]
    q, k, v = (torch.zeros(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
    for backend, grouped, note in ((SDPBackend.CUDNN_ATTENTION, True, "cuDNN"),
                                   (SDPBackend.CUDNN_ATTENTION, False, "cuDNN, kv heads expanded in the step"),
                                   (SDPBackend.FLASH_ATTENTION, True, "FlashAttention")):
        try:
            with sdpa_kernel(backend):
                out = DenseCore(grouped)(*(x.transpose(1, 2) for x in (q, k, v)))
                torch.autograd.grad(out.sum(), (q, k, v))
            return backend, grouped, note
        except RuntimeError:
            continue
    return None, True, "torch's choice"


class Block(nn.Module):
    def __init__(self, sizes: Sizes, core: nn.Module):
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(sizes.width, eps=1e-6), nn.RMSNorm(sizes.width, eps=1e-6)
        self.attention = DynamicMaskSelfAttention(sizes.width, sizes.heads, sizes.kv_heads, sizes.window,
                                                  head_dim=sizes.head_dim, qk_norm=True)
        self.attention.attention = core
        self.gate, self.up = (nn.Linear(sizes.width, sizes.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """``forward(tokens (B, N + 1))`` is the loss. ``checkpoint`` recomputes each layer in the backward pass."""

    def __init__(self, sizes: Sizes, core: Callable[[], nn.Module], checkpoint: bool = False):
        super().__init__()
        self.checkpoint = checkpoint
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, core()) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-6)
        self.of_chunk: Callable[..., Tensor] = self._loss_of_chunk
        self.group: Any = None

    def share(self, group: Any) -> None:
        """Split every sequence over the ranks of ``group``; each rank is still given whole batches."""
        self.group = group
        for block in self.blocks:
            block.attention.process_group = group

    def forward(self, tokens: Tensor) -> Tensor:
        ids, wanted = tokens[:, :-1], tokens[:, 1:]
        if self.group is not None:
            ids, wanted = (distributed.shard_sequence(part, self.group) for part in (ids, wanted))
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpointed(block, x, use_reentrant=False, preserve_rng_state=False) if self.checkpoint else block(x)
        rows, targets = x.flatten(0, 1), wanted.flatten()
        losses = [checkpointed(self.of_chunk, part, its, use_reentrant=False, preserve_rng_state=False)
                  for part, its in zip(rows.split(CHUNK), targets.split(CHUNK))]
        total = torch.stack(losses).sum()
        return total / len(targets) if self.group is None else distributed.shard_mean(total, len(targets), self.group)

    def _loss_of_chunk(self, rows: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(self.norm(rows), self.embed.weight)
        return F.cross_entropy(logits.float(), targets, reduction="sum")

    def compile_parts(self, fullgraph: bool) -> None:
        """Compile each layer, in one graph if ``fullgraph``, and the loss of a chunk. Equal layers compile once."""
        options: dict[str, Any] = {"dynamic": False, "backend": COMPILER}
        for block in self.blocks:
            block.compile(fullgraph=fullgraph, **options)
        self.of_chunk = torch.compile(self._loss_of_chunk, fullgraph=True, **options)

    @torch.no_grad()
    def initialise(self) -> None:
        for name, x in self.named_parameters():
            generator = torch.Generator(x.device).manual_seed(zlib.crc32(name.encode()))
            if name.endswith(".A"):
                x.fill_(0.1)  # larger ones let one key win every row
            elif x.ndim == 2:
                x.normal_(std=x.shape[1]**-0.5 if "dt_proj" in name else 0.02, generator=generator)


@contextlib.contextmanager
def decoder(sizes: Sizes, peer: str, *, compiled: bool, checkpoint: bool, device: str,
            dtype: torch.dtype) -> Iterator[tuple[Decoder, str]]:
    """The model of a peer and a note; inside the context, scaled_dot_product_attention uses the peer's backend."""
    backend, note = None, ""
    own = sizes.kv_heads, sizes.head_dim, sizes.window
    if peer == "dma":
        core: Callable[[], nn.Module] = lambda: DynamicMaskAttention(*own)  # noqa: E731
    elif peer == "sdpa":
        backend, grouped, note = dense_backend(sizes, device, dtype)
        core = lambda: DenseCore(grouped)  # noqa: E731
    elif peer == "flex":
        note = "FlexAttention compiled by itself"
        core = lambda: FlexCore(*own)  # noqa: E731
    else:
        core = NoCore
    with torch.device("meta"):
        made = Decoder(sizes, core, checkpoint)
    made = made.to(dtype).to_empty(device=device)
    for module in made.modules():
        if isinstance(module, nn.RMSNorm):
            module.reset_parameters()
    made.initialise()
    if compiled:
        made.compile_parts(fullgraph=peer != "flex")
    with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
        yield made, note


def trainer(loss_of: Callable[[], Tensor], parameters: Any, rate: float,
            decay: float = 0.1) -> tuple[Callable[[], None], list[Tensor]]:
    """A step of AdamW, and a list to which each step adds its loss."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, fused=True)
    losses: list[Tensor] = []

    def step() -> None:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    return step, losses


def batch_of(sizes: Sizes, batch: int, length: int, step: int, device: str) -> Tensor:
    """Tokens ``(batch, length + 1)``; the r-th token is drawn about 1/r as often as the first."""
    generator = torch.Generator(device).manual_seed(step)
    drawn = torch.rand(batch, length + 1, device=device, generator=generator)
    return (sizes.vocabulary**drawn).long().clamp_(1, sizes.vocabulary) - 1
