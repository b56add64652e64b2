"""The losses of a retrofit.

    z = softcap(scale * (h W^T + b))                     logits of a head
    forward  KL(teacher || student) = sum_v p_t (z_t - z_s) - lse_t + lse_s
    reverse  KL(student || teacher) = sum_v p_s (z_s - z_t) - lse_s + lse_t
    budget   = relu(kept - target)

The sum over the vocabulary runs in chunks, online as in attention: a running maximum, sum and weighted difference for
every token. The backward pass recomputes a chunk's logits. The logits of all tokens and words are never stored.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cupy_dma import checks

DIRECTIONS = ("forward", "reverse")


class Head(NamedTuple):
    """Computes logits from hidden states: ``softcap(scale * (h @ weight.T + bias))``."""

    weight: Tensor  # (V, width)
    bias: Tensor | None = None  # (V,)
    scale: float = 1.0
    softcap: float = 0.0  # softcap * tanh(z / softcap); 0: none

    def detached(self) -> Head:
        """The same without gradients."""
        return self._replace(weight=self.weight.detach(), bias=None if self.bias is None else self.bias.detach())


def budget_loss(kept: Tensor, target: float) -> Tensor:
    """``relu(kept - target)``: how far the kept share exceeds the target. Keeping fewer is not rewarded."""
    return torch.relu(kept - target)


def chunked_kl(hidden: Tensor, head: Head, teacher_hidden: Tensor, teacher_head: Head | None = None, *,
               direction: str = "forward", chunk: int = 4096) -> Tensor:
    """The divergence of a student's predictions from a teacher's, per token, without storing their logits.

    Parameters
    ----------
    hidden : Tensor ``(..., width)``
        The student's hidden states; they get a gradient.
    head : Head
        The student's; its weight and bias get gradients if they require them.
    teacher_hidden : Tensor ``(..., teacher's width)``
    teacher_head : Head, optional
        With the same vocabulary; by default the student's. The teacher gets no gradient.
    direction
        ``"forward"``: KL(teacher || student), ``"reverse"``: KL(student || teacher), as in DMS's code.
    chunk : int
        Words at a time. Memory is a few times ``tokens * chunk`` float32 numbers.

    Returns
    -------
    Tensor ``(...)``, float32 (float64 for float64), in nats

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type, shape or value.

    Notes
    -----
    Products are computed in the type of the hidden states (under autocast in its type), as in models, and everything
    after them in float32.
    """
    checks.choice(direction, "direction", DIRECTIONS)
    chunk = checks.whole(chunk, "chunk", 1)
    teacher_head = (head if teacher_head is None else teacher_head).detached()
    for states, weight, name in ((hidden, head.weight, "hidden"), (teacher_hidden, teacher_head.weight,
                                                                   "teacher_hidden")):
        if states.shape[-1:] != weight.shape[1:]:
            raise ValueError(f"{name} must have shape (..., {weight.shape[1]}) to fit its head, got "
                             f"{tuple(states.shape)}")
    if hidden.shape[:-1] != teacher_hidden.shape[:-1]:
        raise ValueError(f"hidden and teacher_hidden must be of the same tokens, got {tuple(hidden.shape[:-1])} and "
                         f"{tuple(teacher_hidden.shape[:-1])}")
    if len(head.weight) != len(teacher_head.weight):
        raise ValueError(f"student and teacher must have the same vocabulary, got {len(head.weight)} and "
                         f"{len(teacher_head.weight)} words")
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        hidden, teacher_hidden = (x.to(torch.get_autocast_dtype(device)) for x in (hidden, teacher_hidden))
    with torch.autocast(device, enabled=False):
        found = _ChunkedKL.apply(hidden.flatten(0, -2), head.weight, head.bias, teacher_hidden.detach().flatten(0, -2),
                                 (head, teacher_head), direction == "forward", chunk)
    return found.unflatten(0, hidden.shape[:-1])


class _ChunkedKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, teacher: Tensor,
                heads: tuple[Head, Head], is_forward: bool, chunk: int) -> Tensor:
        student, other = (Head(weight, bias, *heads[0][2:]), heads[1])
        kind = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        tokens = len(hidden)
        top = hidden.new_full((2, tokens), -torch.inf, dtype=kind)  # of student and teacher
        total, mean = torch.zeros_like(top), hidden.new_zeros(tokens, dtype=kind)
        by = int(is_forward)  # whose probabilities weigh the difference
        for _, z in _logits(hidden, student, teacher, other, chunk, kind):
            above = torch.maximum(top, z.amax(2))
            shrink = (top - above).exp()
            p = (z - above[..., None]).exp()
            total = total * shrink + p.sum(2)
            mean = mean * shrink[by] + (p[by] * (z[by] - z[1 - by])).sum(1)
            top = above
        lse = top + total.log()
        kl = mean / total[by] - lse[by] + lse[1 - by]
        ctx.save_for_backward(hidden, weight, bias, teacher, *other[:2], lse, kl)
        ctx.options = heads[0][2:], other[2:], is_forward, chunk
        return kl

    @staticmethod
    def backward(ctx: Any, dkl: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, teacher, other_weight, other_bias, lse, kl = ctx.saved_tensors
        own, others, is_forward, chunk = ctx.options
        student, other = Head(weight, bias, *own), Head(other_weight, other_bias, *others)
        kind, (needs_hidden, needs_weight, needs_bias) = kl.dtype, ctx.needs_input_grad[:3]
        outer = (student.scale * dkl)[:, None]
        dhidden = torch.zeros_like(hidden, dtype=kind) if needs_hidden else None
        dweight = torch.zeros_like(weight) if needs_weight else None
        dbias = torch.zeros_like(bias) if needs_bias else None
        for words, z in _logits(hidden, student, teacher, other, chunk, kind):
            p = (z - lse[..., None]).exp()
            if is_forward:
                dz = p[0] - p[1]
            else:
                dz = p[0] * (z[0] - z[1] - (lse[0] - lse[1] + kl)[:, None])
            if student.softcap:
                dz *= 1 - (z[0] / student.softcap).square()
            if dhidden is not None:
                dhidden += (dz.to(hidden.dtype) @ weight[words].to(hidden.dtype)) * outer
            dz = dz * outer
            if dweight is not None:
                dweight[words] = (dz.to(hidden.dtype).mT @ hidden).to(weight.dtype)
            if dbias is not None:
                dbias[words] = dz.sum(0).to(dbias.dtype)
        return None if dhidden is None else dhidden.to(hidden.dtype), dweight, dbias, None, None, None, None


def _logits(hidden: Tensor, student: Head, teacher_hidden: Tensor, teacher: Head, chunk: int,
            kind: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Logits ``(2, tokens, words)`` of student and teacher, chunk by chunk."""
    for begin in range(0, len(student.weight), chunk):
        words = slice(begin, begin + chunk)
        yield words, torch.stack([_of_head(x, head, words, kind) for x, head in ((hidden, student),
                                                                                 (teacher_hidden, teacher))])


def _of_head(hidden: Tensor, head: Head, words: slice, kind: torch.dtype) -> Tensor:
    bias = None if head.bias is None else head.bias[words].to(hidden.dtype)
    z = torch.nn.functional.linear(hidden, head.weight[words].to(hidden.dtype), bias).to(kind) * head.scale
    return head.softcap * torch.tanh(z / head.softcap) if head.softcap else z
