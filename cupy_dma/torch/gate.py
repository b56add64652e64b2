"""Gates that decide which keys a layer keeps, from the layer's input.

    r = offset + gain * proj(rmsnorm(x))                   one logit per token and kv head
    training     log g = logsigmoid((r + noise) / temperature)       noise: logistic, the difference of two Gumbels
    evaluation   log g = 0 where r > 0, -inf elsewhere
    out          = attention(q, k, v, mask=from_gate(log g, delay, threshold), bias=log g, bias_delay=delay)

``log g (B, Hkv, N)`` is a delayed key bias (specification, section 16): keys nearer than ``delay`` are always visible;
farther keys count in proportion to their gates. Form, noise and constants are those of DMS (arXiv 2506.05345), which
expresses them as logits of eviction, ``-r``.
"""
from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from cupy_dma import checks
from cupy_dma.arrays import is_exported
from cupy_dma.masks.interval import IntervalMask
from cupy_dma.torch.attention import attention
from cupy_dma.torch.options import Check, Layer, at_least, optional
from cupy_dma.torch.registration import own_type

OPEN = 1e30  # a logit whose gate is 1, with a gradient of 0


class Gates(NamedTuple):
    """The output of a ``RetentionGate``."""

    log_gate: Tensor  # (B, Hkv, N) float32 (float64 for float64 parameters): 0 is open
    kept: Tensor  # (Hkv,): the mean gate of tokens that are neither padding nor sinks; 1 if there are none


class RetentionGate(Layer):
    """A gate per token and kv head: whether its key is kept beyond the last ``delay`` positions.

    Parameters
    ----------
    width : int
        Size of a token.
    kv_heads : int
        ``Hkv`` of the attention.
    hidden : int, optional
        Width of a hidden layer with GELU; None: linear.
    delay : int
        Keys nearer than this are visible, whatever their gates; at least 1. DMS trains with 512, FastDMS with 256;
        immediate eviction was found to fail.
    sinks : int
        The gates of the first tokens of every sequence are open.
    threshold : float
        In training, keys whose ``log_gate`` is below this are masked from distance ``delay`` on. This changes an output
        by at most the weight that they had: about ``exp(threshold)`` each, relative to an open one. Below 0.
    temperature : float
        In training: the lower, the closer gates are to 0 and 1.
    offset, gain : float
        Of the logit. Gates start open, with the logit ``offset``; ``gain`` multiplies the learning rate. With noise, a
        share of ``1 / (1 + exp(offset))`` is closed at first, by default 0.7 %.
    device, dtype
        Of the parameters. Keep them in float32: logits are computed in at least float32, and small learning steps are
        lost in 16 bits.

    Attributes
    ----------
    proj : nn.Linear, or nn.Sequential of two
        Its last weights and bias are zero at first.
    enabled : bool
        If False, all gates are open, even in training, and ``attend`` is plain causal attention.
    delay, sinks, threshold, temperature, offset, gain
        May be changed later.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or value.

    Notes
    -----
    Noise comes from torch's global generator unless ``forward`` gets another. ``train()`` and ``eval()`` of the gate
    itself select soft or hard gates.
    """

    CHECKS: ClassVar[dict[str, Check]] = {
        "delay": lambda value, name: checks.delay(checks.whole(value, name, 1)),
        "sinks": at_least(0), "threshold": lambda value, name: _in_range(value, name, below=0.0),
        "temperature": lambda value, name: _in_range(value, name, above=0.0),
        "offset": lambda value, name: _in_range(value, name, above=0.0),
        "gain": lambda value, name: _in_range(value, name, above=0.0), "enabled": checks.flag}
    FIXED = ("width", "kv_heads", "hidden")

    def __init__(self, width: int, kv_heads: int, *, hidden: int | None = None, delay: int = 256, sinks: int = 4,
                 threshold: float = -12.0, temperature: float = 0.1, offset: float = 5.0, gain: float = 100.0,
                 device: torch.device | str | int | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self._fix(width=checks.whole(width, "width", 1), kv_heads=checks.whole(kv_heads, "kv_heads", 1),
                  hidden=optional(at_least(1))(hidden, "hidden"))
        self.delay, self.sinks, self.threshold, self.temperature = delay, sinks, threshold, temperature
        self.offset, self.gain, self.enabled = offset, gain, True
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.proj: nn.Module = nn.Linear(width, kv_heads, **made) if hidden is None else nn.Sequential(
            nn.Linear(width, hidden, **made), nn.GELU(), nn.Linear(hidden, kv_heads, **made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset the parameters: open gates."""
        *first, last = [self.proj] if self.hidden is None else [self.proj[0], self.proj[2]]
        for layer in first:
            layer.reset_parameters()
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, x: Tensor, *, padding: Tensor | None = None, documents: Tensor | None = None, past: int = 0,
                generator: torch.Generator | None = None) -> Gates:
        """The gates of tokens.

        Parameters
        ----------
        x : Tensor ``(B, N, width)``
            The layer's input. It is normalised here (RMSNorm without weights), even if it has been already.
        padding : bool or 0/1 integer Tensor ``(1|B, past + N)``, optional
            True or 1 = a real token; the contents of other tokens have no influence.
        documents : int Tensor ``(1|B, past + N)``, optional
            Ids of packed sequences, equal within a sequence. Each sequence has its own sinks.
        past : int
            Number of tokens before ``x`` in the same sequences.
        generator : torch.Generator, optional
            Of the noise in training, on ``x``'s device.

        Returns
        -------
        Gates : ``log_gate (B, Hkv, N)`` and ``kept (Hkv,)``

        Raises
        ------
        TypeError, ValueError
            A tensor has the wrong type or shape.
        """
        decided, sinks = self._counts(x, padding, documents, checks.whole(past, "past", 0))
        own = own_type(self.proj, x)
        kind = torch.float64 if torch.float64 in (own, x.dtype) else torch.float32
        batch, length, _ = x.shape
        if not self.enabled:
            return Gates(x.new_zeros((batch, self.kv_heads, length), dtype=kind),
                         x.new_ones((self.kv_heads,), dtype=kind))
        if padding is not None:
            x = x.masked_fill((padding[:, -length:] == 0)[..., None], 0)
        found = self._projected(x, kind)
        if self.training:
            # What does not depend on parameters first, without autograd.
            shift = torch.empty((batch, self.kv_heads, length), dtype=kind, device=x.device)
            shift = _opened(shift.uniform_(generator=generator).logit_(1e-6).add_(self.offset), sinks, OPEN)
            log_gate = nn.functional.logsigmoid(torch.add(shift, found, alpha=self.gain) / self.temperature)
        else:
            logit = self._logits(found)
            log_gate = _opened(torch.zeros_like(logit).masked_fill_(logit <= 0, -torch.inf), sinks, 0.0)
        gate = log_gate.exp()
        if decided is None and not is_exported():
            count = batch * (length - sinks)
            kept = (gate.sum((0, 2)) - batch * sinks) / count if count else gate.new_ones((self.kv_heads,))
            return Gates(log_gate, kept)
        if decided is None:
            decided = torch.arange(length, device=x.device)[None] >= sinks
        decided = decided.expand(batch, length)[:, None].to(kind)
        count = decided.sum()
        return Gates(log_gate, torch.where(count > 0, (gate * decided).sum((0, 2)) / count.clamp(min=1), 1.0))

    def ranks(self, x: Tensor) -> Tensor:
        """What a ``GatedCache`` ranks keys by in evaluation: their logits, ``(B, Hkv, N)``, -inf where a gate is
        closed."""
        self._counts(x, None, None, 0)
        kind = torch.float64 if torch.float64 in (own_type(self.proj, x), x.dtype) else torch.float32
        logit = self._logits(self._projected(x, kind))
        return logit.masked_fill(logit <= 0, -torch.inf) if self.enabled else torch.zeros_like(logit)

    def mask(self, log_gate: Tensor) -> IntervalMask:
        """The causal mask of keys with these gates ``(B, Hkv, Lk)``: a query sees keys nearer than ``delay``, and
        farther ones unless their gate is closed."""
        return IntervalMask.from_gate(log_gate.detach(), delay=self.delay, threshold=self.threshold)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor, *, mask: Any = None,
               **options: Any) -> Any:
        """Causal attention in which keys from distance ``delay`` on count in proportion to their gates.

        Parameters
        ----------
        query : Tensor ``(B, Lq, H, D)``
            The last query stands at the last key.
        key, value : Tensor ``(B, Lk, Hkv, D)``
        log_gate : Tensor ``(B, Hkv, Lk)``
            Of all keys. In training it is the bias and gets a gradient; in evaluation gates are open or closed, and
            the mask alone expresses them.
        mask : IntervalMask, optional
            Further restrictions: padding, documents.
        **options
            Of ``cupy_dma.attention``: ``scale``, ``softcap``, ``sink_logits``, ``return_lse``, ``deterministic``,
            ``backend``.

        Returns
        -------
        As for ``cupy_dma.attention``.
        """
        if not self.enabled:
            return attention(query, key, value, mask=mask, causal=True, **options)
        kept = self.mask(log_gate)
        if self.training:
            options.update(bias=log_gate[:, :, None], bias_delay=self.delay)
        return attention(query, key, value, mask=kept if mask is None else kept & mask, **options)

    def _projected(self, x: Tensor, kind: torch.dtype) -> Tensor:
        """``proj(rmsnorm(x))`` as ``(B, Hkv, N)``."""
        with torch.autocast(x.device.type, enabled=False):
            x = nn.functional.rms_norm(x.to(kind), (self.width,), eps=1e-6)
            if own_type(self.proj, x) != kind:  # 16-bit parameters: their values, computed in float32
                raw = {name: p.to(kind) for name, p in self.proj.named_parameters()}
                return torch.func.functional_call(self.proj, raw, (x,)).mT
            return self.proj(x).mT

    def _logits(self, found: Tensor) -> Tensor:
        """Contiguous."""
        return (self.offset + self.gain * found).contiguous()

    def _counts(self, x: Tensor, padding: Tensor | None, documents: Tensor | None,
                past: int) -> tuple[Tensor | None, Tensor | int]:
        """bool ``(1|B, N)`` each: tokens whose gates are used, and sinks. Instead, without padding and documents, None
        and how many of the first tokens are sinks."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(f"x must be a floating torch tensor, got {getattr(x, 'dtype', type(x).__name__)}")
        if x.ndim != 3 or x.shape[2] != self.width:
            raise ValueError(f"x must have shape (B, N, {self.width}), got {tuple(x.shape)}")
        batch, length = x.shape[0], past + x.shape[1]
        for rows, name in ((padding, "padding"), (documents, "documents")):
            if rows is not None and (not isinstance(rows, Tensor) or rows.is_floating_point()):
                raise TypeError(f"{name} must be a tensor of bools or integers, got "
                                f"{getattr(rows, 'dtype', type(rows).__name__)}")
            if rows is not None and tuple(rows.shape) not in ((batch, length), (1, length)):
                raise ValueError(f"{name} must have shape (1|B, past + N) = (1|{batch}, {length}), got "
                                 f"{tuple(rows.shape)}")
        if padding is None and (documents is None or not self.sinks):
            return None, min(max(self.sinks - past, 0), x.shape[1])
        if not self.sinks:
            assert padding is not None
            return padding[:, past:] != 0, 0
        like = padding if padding is not None else documents
        real = torch.ones_like(like, dtype=torch.bool) if padding is None else padding != 0
        rank = real.long().cumsum(1)  # 1 for the first real token
        if documents is not None:
            real, documents = torch.broadcast_tensors(real, documents)
            begins = documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0
            rank = rank - torch.where(begins, rank - real.long(), 0).cummax(1).values
        sinks = (real & (rank <= self.sinks))[:, past:]
        return real[:, past:] & ~sinks, sinks

    def extra_repr(self) -> str:
        names = ("width", "kv_heads", "hidden", "delay", "sinks", "threshold", "temperature", "offset", "gain")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def _opened(gates: Tensor, sinks: Tensor | int, value: float) -> Tensor:
    """``gates (B, Hkv, N)`` with ``value`` where tokens are sinks, in place."""
    if isinstance(sinks, Tensor):
        return gates.masked_fill_(sinks[:, None], value)
    if sinks:
        gates[..., :sinks] = value
    return gates


def _in_range(value: Any, name: str, above: float = -math.inf, below: float = math.inf) -> float:
    number = checks.real(value, name)
    if not above < number < below:
        raise ValueError(f"{name} must be {'above' if below == math.inf else 'below'} 0, got {number}")
    return number
