"""The part of a layer that gives keys their scores: its parameters, and what they are computed from.

    scores="value"    form(A softplus(dt_proj(value)))         see ``cupy_dma.key_scores``
    scores="input"    score_proj(x)                            ``x``: what queries, keys and values are projected from

Both plus ``slope * p`` for a key at position ``p`` of its sequence.
"""
from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from cupy_dma import checks
from cupy_dma.masks.windows import is_sequence
from cupy_dma.torch.kept import places_of
from cupy_dma.torch.options import Layer, check_inputs, check_rows, check_x
from cupy_dma.torch.scores import input_scores, layer_scores, score_arguments
from cupy_dma.torch.tokens import bounds_of, lengths_of, packed_positions


class ScoredLayer(Layer):
    """A layer with ``A`` and ``dt_proj``, or with a ``width`` and ``score_proj``."""

    kv_heads: int
    head_dim: int
    width: int | None = None
    slope: Any = 0.0  # a float for all kv heads, or a tuple of one each
    form: str
    backend: str | None
    A_init: float

    def _make_parameters(self, A_init: float, dt_bias: bool, device: Any, dtype: Any) -> None:
        self.A_init, self._looked_at_A = A_init, False
        made: dict[str, Any] = {"bias": checks.flag(dt_bias, "dt_bias"), "device": device, "dtype": dtype}
        if self.width is None:
            self.A = nn.Parameter(torch.full((self.kv_heads,), self.A_init, device=device, dtype=dtype))
            self.dt_proj = nn.Linear(self.kv_heads * self.head_dim, self.kv_heads, **made)
        else:
            self.score_proj = nn.Linear(self.width, self.kv_heads, **made)
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters anew, as the constructor does."""
        if self.width is not None:
            for parameter in self.score_proj.parameters():
                nn.init.zeros_(parameter)
        else:
            nn.init.constant_(self.A, self.A_init)
            self.dt_proj.reset_parameters()

    def scores(self, value: Tensor) -> Tensor:
        """Scores ``(B, Hkv, Lk)`` of the keys with these values ``(B, Lk, Hkv, D)``, or ``(Hkv, total)`` of packed
        ones ``(total, Hkv, D)``; with ``scores="input"``, of the tokens ``(B, Lk, width)`` or ``(total, width)``.
        Float32 (float64 for float64), differentiable. See ``cupy_dma.key_scores``."""
        packed = getattr(value, "ndim", 0) == (3 if self.width is None else 2)
        if self.width is None:
            check_rows(self, value, "value", packed)
        else:
            check_x(self, value, packed)
        return self._scores(value, None, self._places(value[None] if packed else value))

    def _score_arguments(self, source: Tensor, padding: Tensor | None, places: Tensor | None) -> dict[str, Any]:
        """For ``dynamic_mask_attention``; ``source``: values, or the layer's input."""
        if self.width is not None or places is not None:
            return {"scores": self._scores(source, padding, places)}
        return score_arguments(source, self.dt_proj, self.A, form=self.form, padding=padding)

    def _scores(self, source: Tensor, padding: Tensor | None, places: Tensor | None) -> Tensor:
        if self.width is not None:
            found = input_scores(source, self.score_proj, self.kv_heads, padding)
        else:
            found = layer_scores(source, self.dt_proj, self.A, form=self.form, padding=padding, backend=self.backend)
        if places is None:
            return found
        each = self.slope if isinstance(self.slope, tuple) else (self.slope,)
        places = places.to(found.dtype)
        return found + torch.stack([places * slope for slope in each], -2)  # a tensor of slopes would be copied

    def _places(self, source: Tensor, cu_seqlens: Any = None, padding: Tensor | None = None, documents: Any = None,
                cache: Any = None) -> Tensor | None:
        """The positions of tokens, ``(N,)``, ``(1|B, N)`` or ``(total,)``; None if no score depends on them."""
        if not self.slope:
            return None
        if cu_seqlens is not None:
            return packed_positions(source, bounds_of(cu_seqlens, source), cache)
        places = places_of(source.shape[0], source.shape[1], padding, documents, source)
        return places if cache is None else places + lengths_of(cache, source)[:, None]

    def _checked(self, query: Tensor, key: Tensor, value: Tensor, x: Tensor | None, packed: bool) -> Tensor:
        """What scores are computed from, if the inputs fit the layer."""
        check_inputs(self, query, key, value, packed)
        if self.width is None and x is None:
            return value
        return check_x(self, x, packed, tuple(key.shape[:-2]))

    def _warn_of_no_gradient(self) -> None:
        """Warn, once, that ``dt_proj`` gets no gradient."""
        if torch.compiler.is_compiling() or type(self.A) is not nn.Parameter or (
                self.A.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        if not (torch.is_grad_enabled() and any(p.requires_grad for p in self.dt_proj.parameters())):
            return
        self._looked_at_A = True
        if not self.A.any():
            warnings.warn("A is 0 and does not require grad, so dt_proj gets no gradient and the layer stays a sliding "
                          "window: train A, begin with another A_init, or freeze dt_proj as well", stacklevel=5)


def slope_of(value: Any, name: str) -> float | tuple[float, ...]:
    """The checked ``slope``, of one head or of all."""
    if not is_sequence(value):
        return checks.real(value, name)
    return tuple([checks.real(slope, f"{name}[{head}]") for head, slope in enumerate(value)])
