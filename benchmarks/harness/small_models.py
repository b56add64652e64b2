"""Small decoders with exchangeable attention, several trained at once: for mqar.py, language_model.py and needle.py.

    x  = embed(tokens)                                                    (M, B, N, width), M models
    x += attention(mix(norm(x))),  x += down(gelu(up(norm(x))))           in each layer
    logits = norm(x) @ embed^T

A stack of ``M`` models of one shape, with different seeds and learning rates, is one model whose parameters have a
leading axis; together they fill a GPU that one model would leave idle. They share nothing, and the loss of the stack is
the sum of their losses. ``mix`` is a causal convolution of ``Sizes.conv`` tokens for each channel, so that a token
carries the tokens before it, as in the models of the zoology papers; ``conv=0`` gives the usual transformer,
``inner=0`` no MLP.

A model's attention is an ``Attention``:

    full        all keys, by scaled_dot_product_attention window      a sliding window of the last ``window`` keys
    random      ``window`` keys by random scores, redrawn for every head, sequence and step bias        all keys, the
    scores added to the logits: scores without selection selection   the ``window`` best keys by score, the scores not
    added: selection without the bias dynamic     dynamic mask attention: the ``window`` best keys, and the scores added
    global      the same with ``keys="global"``, cut by causality: selects by later keys too, so it cannot decode

Scores are those of ``DynamicMaskAttention``; each model has its own ``A`` and ``dt_proj``. ``selection`` and
``dynamic`` also keep ``sinks`` and ``recent`` keys, besides the ``window``. Initial values of a parameter depend only
on its name and the model's seed, so parameters that two kinds of attention share start equal.
"""
import functools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cupy_dma as dma
from cupy_dma import IntervalMask
from cupy_dma.torch.rotary import Rotation

COMPILER = "inductor"
KINDS = ("full", "window", "random", "bias", "selection", "dynamic", "global")
SCORED = ("bias", "selection", "dynamic", "global")  # have A and dt_proj


@dataclass(frozen=True)
class Sizes:
    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int = 0  # width of the MLP
    conv: int = 0  # tokens
    rope: float | None = 10000.0


@dataclass(frozen=True)
class Attention:
    kind: str
    window: int = 0
    recent: int = 0
    sinks: int = 0
    form: str = "exp"
    start: float = 0.0  # of A
    drawn: bool = False  # draw A uniformly from -start to start
    fixed: bool = False  # A is not trained

    @property
    def budget(self) -> int:
        """Keys that a query sees; 0: all."""
        return 0 if self.kind in ("full", "bias") else self.window + self.recent + self.sinks


# A model's sequences are concatenated, (M, T, ...), whatever their length, so few shapes are compiled.
def norm(x: Tensor, gain: Tensor) -> Tensor:
    """RMSNorm of ``x (M, T, width)`` with ``gain (M, width)``."""
    return F.rms_norm(x, x.shape[-1:], eps=1e-6) * gain[:, None]


def mixed(x: Tensor, position: Tensor, gain: Tensor, conv: Tensor | None, kind: torch.dtype) -> Tensor:
    """``norm``, then the convolution with ``conv (M, tokens, width)``, whose first entry weighs the token itself;
    ``position (T)`` is that in the sequence. The result has the type ``kind``."""
    x = norm(x, gain)
    if conv is None:
        return x.to(kind)
    out = x * conv[:, :1]
    for i in range(1, conv.shape[1]):
        before = F.pad(x, (0, 0, i, 0))[:, :x.shape[1]] * conv[:, i, None]
        out = out + torch.where(position[:, None] < i, 0, before)
    return out.to(kind)


def placed(x: Tensor, rotation: Rotation | None) -> Tensor:
    """Queries or keys ``(M, T, heads, D)``, normalised and rotated."""
    normed = F.rms_norm(x, x.shape[-1:], eps=1e-6)
    return (normed if rotation is None else rotation(normed)).to(x.dtype)


def scored(value: Tensor, dt_proj: Tensor, A: Tensor, form: str) -> Tensor:
    """Scores ``(M, Hkv, T)`` as ``cupy_dma.key_scores`` gives them for each model's ``value (M, T, Hkv * D)``, with
    ``dt_proj (M, Hkv * D, Hkv)`` and ``A (M, Hkv)``; in float32."""
    value = value.float()
    step = torch.stack([(value * dt_proj[:, None, :, head]).sum(-1) for head in range(A.shape[1])], 1)
    scores = F.softplus(step) * A[..., None]
    return scores.exp() if form == "exp" else scores


def inner(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


@functools.cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One compiled function for all models, so that each shape is compiled once."""
    return torch.compile(function, dynamic=False, backend=COMPILER)


class Layer(nn.Module):
    def __init__(self, count: int, sizes: Sizes, attention: Attention, compile: bool):
        super().__init__()
        self.norm, self.mixed, self.placed, self.scored, self.inner = (
            compiled(part) if compile else part for part in (norm, mixed, placed, scored, inner))
        self.sizes, self.attention, self.dim = sizes, attention, sizes.width // sizes.heads
        narrow = sizes.kv_heads * self.dim

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(count, *shape))

        self.gain = made(sizes.width)
        self.conv = made(sizes.conv, sizes.width) if sizes.conv else None
        self.q, self.k, self.v = made(sizes.width, sizes.width), made(sizes.width, narrow), made(sizes.width, narrow)
        self.o = made(sizes.width, sizes.width)
        if attention.kind in SCORED:
            self.A, self.dt_proj = made(sizes.kv_heads), made(narrow, sizes.kv_heads)
            self.A.requires_grad_(not attention.fixed)
        if sizes.inner:
            self.mlp_gain = made(sizes.width)
            self.up, self.down = made(sizes.width, sizes.inner), made(sizes.inner, sizes.width)
        self.mask: IntervalMask | None = None  # of the last pass

    def forward(self, x: Tensor, length: int, position: Tensor, rotation: Rotation | None) -> Tensor:
        """``x (M, T, width)``: concatenated sequences of ``length`` tokens."""
        h = self.mixed(x, position, self.gain, self.conv, autocast_type(x))
        q, k, v = (torch.bmm(h, weight) for weight in (self.q, self.k, self.v))
        scores = None
        if self.attention.kind in SCORED:
            scores = self.scored(v, self.dt_proj, self.A, self.attention.form)
            scores = scores.unflatten(2, (-1, length)).transpose(1, 2).flatten(0, 1)  # (M * B, Hkv, N)
        q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in (q, k, v))
        q, k = self.placed(q, rotation), self.placed(k, rotation)
        out = self._attended(*(part.reshape(-1, length, *part.shape[2:]) for part in (q, k, v)), scores)
        x = x + torch.bmm(out.reshape(*x.shape[:2], -1), self.o)
        if self.sizes.inner:
            x = x + torch.bmm(self.inner(torch.bmm(self.norm(x, self.mlp_gain), self.up)), self.down)
        return x

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, scores: Tensor | None) -> Tensor:
        how, n = self.attention, k.shape[1]
        if how.kind == "full":
            out = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True,
                                                 enable_gqa=q.shape[2] != k.shape[2])
            return out.transpose(1, 2)
        bias = None if how.kind == "selection" else scores
        if how.kind == "bias":
            return dma.attention(q, k, v, bias=bias, causal=True)
        if how.kind == "window":
            mask = IntervalMask.sliding_window(n, how.window, like=k)
        else:
            ranked = torch.rand(len(k), k.shape[2], n, device=k.device) if scores is None else scores.detach()
            mask = IntervalMask.top_w(ranked, how.window, keys="global" if how.kind == "global" else "prefix")
        if how.recent:
            mask |= IntervalMask.sliding_window(n, how.recent, like=k)
        if how.sinks:
            mask |= IntervalMask.sinks(n, how.sinks, like=k)
        self.mask = mask
        return dma.attention(q, k, v, mask=mask, bias=bias, causal=how.kind == "global")


class Models(nn.Module):
    """A stack of models, one for each of ``seeds``. ``forward(tokens (M, B, N))`` gives their final hidden states ``(M,
    B, N, width)``, or ``(M, B, R, width)`` at the positions ``rows (M, B, R)``; ``logits`` takes either."""

    def __init__(self, seeds: list[int], sizes: Sizes, attention: Attention, device: str,
                 compile: bool = False):
        super().__init__()
        self.seeds, self.sizes, self.attention = seeds, sizes, attention
        with torch.device("meta"):
            self.embed = nn.Parameter(torch.empty(len(seeds), sizes.vocabulary, sizes.width))
            self.layers = nn.ModuleList(Layer(len(seeds), sizes, attention, compile) for _ in range(sizes.layers))
            self.gain = nn.Parameter(torch.empty(len(seeds), sizes.width))
        self.to_empty(device=device)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        for name, x in self.named_parameters():
            last = name.rpartition(".")[2]
            for own, seed in zip(x, self.seeds):
                generator = torch.Generator(x.device).manual_seed(zlib.crc32(f"{name} {seed}".encode()))
                if last in ("gain", "mlp_gain"):
                    own.fill_(1)
                elif last == "A":
                    start = self.attention.start
                    own.uniform_(-start if self.attention.drawn else start, start, generator=generator)
                elif last in ("conv", "dt_proj"):  # as nn.Linear and nn.Conv1d do
                    own.uniform_(-(len(own)**-0.5), len(own)**-0.5, generator=generator)
                else:
                    scale = 0.02 if last == "embed" else len(own)**-0.5
                    scale *= (2 * self.sizes.layers)**-0.5 if last in ("o", "down") else 1
                    own.normal_(std=scale, generator=generator)

    def forward(self, tokens: Tensor, rows: Tensor | None = None) -> Tensor:
        models, batch, length = tokens.shape
        offset = torch.arange(models, device=tokens.device)[:, None, None] * self.sizes.vocabulary
        x = F.embedding((tokens + offset).flatten(1), self.embed.flatten(0, 1))
        position, rotation = torch.arange(length, device=tokens.device), None
        if self.sizes.rope is not None:
            rotation = Rotation.at(position, self.layers[0].dim, self.sizes.rope)
            rotation = Rotation(*(part.repeat(batch, 1, 1) for part in rotation))
        position = position.repeat(batch)
        for layer in self.layers:
            x = layer(x, length, position, rotation)
        x = x.unflatten(1, (batch, length))
        if rows is not None:
            x = x.gather(2, rows[..., None].expand(-1, -1, -1, x.shape[-1]))
        return norm(x.flatten(1, 2), self.gain).unflatten(1, x.shape[1:3])

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``(M, B, R, vocabulary)`` of hidden states ``(M, B, R, width)``."""
        return torch.bmm(hidden.flatten(1, 2), self.embed.transpose(1, 2)).unflatten(1, hidden.shape[1:3])

    def score_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, x) for name, x in self.named_parameters() if name.endswith((".A", ".dt_proj")))


@dataclass
class Adam:
    """AdamW for a stack: ``rates`` of the models, multiplied by ``scores_rates`` for ``A`` and ``dt_proj``. Gradients
    of each model are clipped to a norm of 1. Weight decay applies to matrices other than those of the scores."""

    models: Models
    rates: Tensor  # (M,)
    scores_rates: Tensor  # (M,)
    decay: float = 0.0
    steps: int = 0
    moments: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    betas: tuple[float, float] = 0.9, 0.95

    @torch.no_grad()
    def step(self, factor: float = 1.0) -> None:
        """Do a step with the rates multiplied by ``factor``."""
        self.steps += 1
        scores = {name for name, _ in self.models.score_parameters()}
        found = [(name, x, x.grad) for name, x in self.models.named_parameters() if x.grad is not None]
        total = torch.stack([gradient.flatten(1).square().sum(1) for _, _, gradient in found]).sum(0).sqrt()  # (M,)
        shrink = 1 / total.clamp(min=1)
        for name, x, gradient in found:
            shape = (-1, *[1] * (x.ndim - 1))
            if name not in self.moments:
                self.moments[name] = torch.zeros_like(x), torch.zeros_like(x)
            first, second = self.moments[name]
            gradient = gradient * shrink.view(shape)
            first.lerp_(gradient, 1 - self.betas[0])
            second.mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])
            change = first / (1 - self.betas[0]**self.steps)
            change /= (second / (1 - self.betas[1]**self.steps)).sqrt() + 1e-8
            rate = factor * (self.rates * self.scores_rates if name in scores else self.rates)
            if x.ndim > 2 and name not in scores:
                change += self.decay * x
            x.sub_(rate.view(shape) * change)
            x.grad = None


def autocast_type(x: Tensor) -> torch.dtype:
    """The type of matrix products."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def autocast(device: str) -> Any:
    """bfloat16 on a GPU, float32 elsewhere."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=device.startswith("cuda"))
