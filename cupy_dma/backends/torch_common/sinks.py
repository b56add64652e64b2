"""Learned sink logits after an attention of torch tensors, with derivatives (``calls/sinks.py``)."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cupy_dma.arrays import library_named
from cupy_dma.calls.sinks import of_rows, row_products, shares, summed


class AddSinks(torch.autograd.Function):
    """``out (..., Lq, H, Dv)`` and ``lse (..., H, Lq)`` with sinks, from those without.

    ``keys`` and ``sink`` are the shares of the keys and of the sink in each row's probability, ``ds`` the gradient of
    the sink's logit in each row."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, sink_logits: Tensor) -> tuple[Tensor, Tensor]:
        keys, _, total = shares(torch, lse, sink_logits.to(lse.dtype))
        found = (out.to(lse.dtype) * of_rows(keys)).to(out.dtype)
        ctx.save_for_backward(found, lse, sink_logits)
        ctx.set_materialize_grads(False)
        return found, total

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        out, lse, sink_logits = ctx.saved_tensors
        if dout is None and dlse is None:
            return None, None, None
        keys, sink, _ = shares(torch, lse, sink_logits.to(lse.dtype))
        through_lse = torch.zeros_like(lse) if dlse is None else keys * dlse
        ds = torch.zeros_like(lse) if dlse is None else sink * dlse
        if dout is not None:
            delta = row_products(library_named("torch"), dout, out, str(lse.dtype).removeprefix("torch."))
            through_lse, ds = through_lse + sink * delta, ds - sink * delta
            dout = (dout.to(lse.dtype) * of_rows(keys)).to(out.dtype)
        return dout, through_lse, summed(ds).to(sink_logits.dtype)
