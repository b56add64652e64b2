"""Next tokens of a batch whose rows have settings of their own: greedy, or drawn as transformers' ``generate`` draws.

    p     = softmax(logits / temperature), of the top_k best, then of the fewest best that reach top_p
    token = the first, best first, whose cumulated p exceeds u * sum p,   u in [0, 1)

``u`` comes from the row's own generator on the host, one per token, so what a row draws does not depend on the others.
"""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cupy_dma import checks

GREEDY = (0.0, 0.0, 0.0, 0.0)  # settings of a row that takes the best token


class Sampling:
    """How the tokens of one text are drawn."""

    def __init__(self, temperature: float | None = None, top_k: int | None = None, top_p: float | None = None,
                 seed: int | None = None):
        """None: a temperature of 1, no bounds, and a seed from torch's generator. Raises TypeError or ValueError."""
        self._temperature = 1.0 if temperature is None else checks.real(temperature, "temperature")
        if self._temperature <= 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self._top_k = 0 if top_k is None else checks.whole(top_k, "top_k", 0)  # 0: no bound, as in transformers
        self._top_p = 1.0 if top_p is None else checks.real(top_p, "top_p")
        if not 0 < self._top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
        seed = int(torch.randint(2**62, ())) if seed is None else checks.whole(seed, "seed", 0)
        self._numbers = np.random.default_rng(seed)
        self.advance()

    def advance(self) -> None:
        """Draw the number of the next token."""
        self._u = float(self._numbers.random())

    @property
    def settings(self) -> tuple[float, float, float, float]:
        """Temperature, top_k, top_p and the next token's number."""
        return self._temperature, self._top_k, self._top_p, self._u


def next_tokens(logits: Tensor, settings: Tensor | None) -> Tensor:
    """int64 ``(n,)`` of ``logits (n, vocabulary)``. ``settings``: float64 ``(n, 4)``; None: all take the best."""
    best = logits.argmax(-1)
    if settings is None:
        return best
    temperature, top_k, top_p, u = settings[:, :, None].unbind(1)
    return torch.where(temperature[:, 0] > 0, _drawn(logits, temperature, top_k, top_p, u), best)


def _drawn(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, u: Tensor) -> Tensor:
    """int64 ``(n,)``; settings are ``(n, 1)``. Where the temperature is 0, the result means nothing."""
    score, token = (logits.float() / temperature.float()).sort(dim=-1, descending=True, stable=True)
    last = torch.where(top_k > 0, top_k, score.shape[-1]).long().clamp(1, score.shape[-1]) - 1
    p = score.masked_fill(score < score.gather(-1, last), -float("inf")).double().softmax(-1)
    total = p.cumsum(-1)
    total = torch.where(total - p < top_p, total, 0).cummax(-1).values  # the best one always stays
    place = (total <= u * total[:, -1:]).sum(-1, keepdim=True)
    return token.gather(-1, place.clamp(max=score.shape[-1] - 1))[:, 0]
