"""Attention by FlexAttention and its gradients by autograd (SPEC sections 5 and 6).

Query, key and value are passed as (B, heads, L, D) views, after zeroing whatever must not contribute: keys and values
that no query sees and, in the backward pass, rows of query, dout and dlse with no visible keys. On a CPU everything is
computed in float32 (float64) and rounded once, because the unfused implementation would round intermediate results.

A bias that needs a gradient is copied to float32: FlexAttention sums over the axes along which it broadcasts, and over
the heads that share it, in the type of the array that it indexes. That array must not be a view of another tensor that
requires grad: for a view, compiled FlexAttention returns no gradient, and no error (torch 2.13).
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from cupy_dma.backends.flex.problem import Captured, Problem
from cupy_dma.backends.torch_common.arrays import delivered, on_stream_of, rounded, shaped
from cupy_dma.backends.torch_common.sinks import AddSinks
from cupy_dma.calls.types import AttentionBackwardCall, AttentionCall

COMPILER = "inductor"
_programs: dict[tuple[Any, ...], Callable[..., Any]] = {}


def attention(call: AttentionCall) -> tuple[Any, Any]:
    """``out (B, Lq, H, D)`` of query's type and ``lse (B, H, Lq)``; see ``cupy_dma.attention``."""
    _require_served(call)
    with on_stream_of(call.query), _plain_dispatch():
        prepared = _Prepared(call)
        query, key, value = prepared.inputs
        if prepared.is_empty:
            out, lse = torch.zeros_like(query), query.new_full(query.shape[:3], -math.inf, dtype=prepared.wide)
        else:
            out, lse = prepared.run(query, key, value, prepared.captured())
        out = out.to(prepared.kind).transpose(1, 2).contiguous()
        return delivered(out, call.query), delivered(lse.contiguous(), call.query)


def attention_backward(call: AttentionBackwardCall) -> tuple[Any, Any, Any, Any]:
    """``(dquery, dkey, dvalue, dbias)``, None for what is not in ``call.needs``; see ``cupy_dma.backends``."""
    forward = call.forward
    _require_served(forward)
    arguments = {"query": forward.query, "key": forward.key, "value": forward.value, "bias": forward.bias}
    with on_stream_of(forward.query), _plain_dispatch(), torch.enable_grad():
        prepared = _Prepared(forward)
        if prepared.is_empty:
            dq, dk, dv, dbias = (rounded(torch.zeros(operand.shape, device=prepared.device), operand)
                                 if name in call.needs and operand is not None else None
                                 for name, operand in arguments.items())
            return dq, dk, dv, dbias
        dead = _dead_rows(call)
        query, key, value = prepared.inputs
        leaves = {"query": query.masked_fill(dead[..., None], 0), "key": key, "value": value}
        added = prepared.captured(every_pair=forward.deterministic and "bias" in call.needs)
        if added is not None:
            leaves["bias"] = added.data.to(prepared.wide)
        wanted = [name for name in leaves if name in call.needs]
        for name in wanted:
            leaves[name] = leaves[name].detach().requires_grad_()
        out, lse = prepared.run(leaves["query"], leaves["key"], leaves["value"],
                                None if added is None else replace(added, data=leaves["bias"]))
        if forward.sinks is not None:
            out, lse = AddSinks.apply(out.transpose(1, 2), lse, shaped(forward.sinks).to(lse.dtype))
            out = out.transpose(1, 2)
        results = [out]
        upstreams = [shaped(call.dout).transpose(1, 2).to(out.dtype).masked_fill(dead[..., None], 0)]
        if call.dlse is not None:
            results.append(lse)
            upstreams.append(shaped(call.dlse).masked_fill(dead, 0))
        gradients = dict(zip(wanted, torch.autograd.grad(results, [leaves[name] for name in wanted], upstreams)))
        for name in {"query", "key", "value"} & gradients.keys():
            gradients[name] = gradients[name].transpose(1, 2).contiguous()
        if added is not None and forward.bias is not None and "bias" in gradients:
            gradients["bias"] = _summed_to(gradients["bias"].reshape(added.form), forward.bias.shape)
        dq, dk, dv, dbias = (rounded(gradients[name], operand) if name in gradients and operand is not None else None
                             for name, operand in arguments.items())
        return dq, dk, dv, dbias


def _dead_rows(call: AttentionBackwardCall) -> Tensor:
    """Rows that see no key, bool ``(B, H, Lq)``."""
    lse = shaped(call.lse)
    if call.forward.sinks is None:
        return lse == -math.inf
    nothing = (shaped(call.out) == 0).all(-1).transpose(1, 2)
    return nothing & (lse == shaped(call.forward.sinks).to(lse.dtype)[:, None])


def _summed_to(gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``gradient``, with four axes, summed to the ``shape`` of a bias: over GQA groups and broadcast axes."""
    if 1 < shape[1] < gradient.shape[1]:
        gradient = gradient.unflatten(1, (shape[1], -1)).sum(2)
    return gradient.sum_to_size(shape)


def _require_served(call: AttentionCall) -> None:
    def refuse(why: str) -> None:
        raise NotImplementedError(f"backend='flex' cannot do this: {why}")

    if call.sequences is not None:
        refuse("FlexAttention needs sequences of equal length, not varlen ones; use another backend, or one sequence "
               "with IntervalMask.documents")
    if call.query.device.kind == "cuda" and call.query.dtype == "float64":
        refuse("FlexAttention's kernels do not support float64; use backend='numpy' or float32")


def _plain_dispatch() -> Any:
    """Enable autograd and vmap, which FlexAttention uses but the dispatcher disables below an operator; disable
    autocast."""
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
        torch._C.DispatchKey.AutocastCUDA)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), autocast)


class _Prepared:
    """What the forward and backward pass of a call share."""

    def __init__(self, call: AttentionCall):
        query, key, value = (shaped(x).transpose(1, 2) for x in (call.query, call.key, call.value))
        self.call, self.kind, self.device = call, query.dtype, query.device
        self.wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.is_empty = 0 in (call.batch, call.query_length, call.key_length)
        if not self.is_compiled:
            query, key, value = (x.to(self.wide) for x in (query, key, value))
        self.inputs = query, key, value
        if self.is_empty:
            return
        if call.bias is not None:  # zero keys that a bias of -inf hides from all queries, whatever they contain
            hidden = (shaped(call.bias) == -math.inf).all(2)  # (1|B, 1|Hkv|H, 1|Lk)
            if call.bias_delay:
                hidden = hidden & (torch.arange(call.key_length, device=query.device)
                                   <= call.key_length - call.query_length - call.bias_delay)
            if hidden.shape[1] not in (1, call.kv_heads):
                hidden = hidden.unflatten(1, (call.kv_heads, -1)).all(2)
            key, value = (x.masked_fill(hidden[..., None], 0) for x in (key, value))
            self.inputs = query, key, value
        self.problem = problem = Problem.of(call, query.device)
        self.read = [captured.data for captured in problem.captured()]
        visible = problem.visible()
        self.visible = visible
        self.blocks = None
        if not problem.everything_is_visible:
            some, full, keys = problem.survey()
            key, value = (x.masked_fill(~keys[..., None], 0) for x in (key, value))
            self.inputs = query, key, value
            data = self.read
            self.blocks = problem.block_mask(some, full, lambda b, h, i, j: visible(b, h, i, j, *data))

    @property
    def is_compiled(self) -> bool:
        return self.device.type == "cuda"

    def captured(self, every_pair: bool = False) -> Captured | None:
        """The bias as the kernel indexes it; 16-bit biases stay 16-bit. ``every_pair``: expanded along all axes, so
        that its gradient is reduced not by the kernel but afterwards, in a fixed order."""
        call = self.call
        if call.bias is None:
            return None
        bias = shaped(call.bias)
        if bias.element_size() != 2:
            bias = bias.to(self.wide)
        if every_pair:
            if 1 < bias.shape[1] < call.heads:
                bias = bias.repeat_interleave(call.heads // bias.shape[1], 1)
            bias = bias.expand(call.batch, call.heads, call.query_length, call.key_length)
        return Captured.of(bias, call.heads, call.key_length)

    def run(self, query: Tensor, key: Tensor, value: Tensor, added: Captured | None) -> tuple[Tensor, Tensor]:
        """``out (B, H, Lq, D)`` and ``lse (B, H, Lq)``; ``added``: the bias."""
        call = self.call
        modified = _modified(added, call, self.wide)
        extra = [] if added is None else [added.data]
        if self.is_compiled:
            return self._compiled(query, key, value, added, modified)
        return self._unfused(query, key, value, modified, extra)

    def _unfused(self, query: Tensor, key: Tensor, value: Tensor, modified: Callable[..., Tensor],
                 extra: list[Tensor]) -> tuple[Tensor, Tensor]:
        """FlexAttention's unfused implementation, as the operator below the public function, which rejects gradients on
        a CPU."""
        from torch._higher_order_ops.flex_attention import flex_attention

        blocks = self.blocks or self.problem.block_mask(*self.problem.survey()[:2], self.visible)
        found = flex_attention(query, key, value, modified, (*blocks.as_tuple()[:-1], self.visible), self.call.scale,
                               {}, tuple(extra), tuple(self.read))
        return found[0], found[1] * math.log(2)  # its lse is base 2

    def _compiled(self, query: Tensor, key: Tensor, value: Tensor, added: Captured | None,
                  modified: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        call, size = self.call, self.call.head_dim
        more = max(16, 1 << (size - 1).bit_length()) - size  # pad to a power of two, which the kernels require
        if more:
            query, key, value = (torch.nn.functional.pad(x, (0, more)) for x in (query, key, value))
        bias = None if added is None else added.data
        needs = tuple([x is not None and x.requires_grad for x in (query, key, value, bias)])
        same = (query.shape, key.shape, self.kind, query.device, added and added.static, needs, call.softcap,
                call.scale, call.causal, call.bias_delay, *(captured.static for captured in self.problem.captured()))
        program = _programs.get(same)
        if program is None:
            program = _programs[same] = _program(len(_programs))
        out, lse = program(query, key, value, bias, modified, self.blocks, call.scale, call.heads != call.kv_heads,
                           self._options(query, added))
        return out[..., :size], lse

    def _options(self, query: Tensor, added: Captured | None) -> dict[str, Any]:
        """Kernel options for forward and backward. FlexAttention chooses blocks that fit into shared memory with three
        pipeline stages of keys and values, but does not count the loads of mask_mod and score_mod: from an array of
        pairs a whole block per stage, also prefetched. Long float32 rows leave hardly any room either. In both cases,
        use a single stage."""
        pairs = any({2, 3} <= {*captured.axes} for captured in (*self.problem.captured(), *([added] if added else [])))
        options: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}  # the decoding kernel supports fewer masks
        if pairs or (query.dtype == torch.float32 and query.shape[-1] > 64):
            options["num_stages"] = 1
        return options


def _modified(added: Captured | None, call: AttentionCall, wide: torch.dtype) -> Callable[..., Tensor]:
    """``modified(s, b, h, i, j, *data)``, where ``data`` holds the bias."""
    read = None if added is None else added.reader()
    softcap, delay, offset = call.softcap, call.bias_delay, call.key_length - call.query_length

    def modified(s: Tensor, b: Any, h: Any, i: Any, j: Any, *data: Tensor) -> Tensor:
        if softcap > 0:
            s = softcap * torch.tanh(s / softcap)
        if read is None:
            return s
        bias = read(data[0], b, h, i, j).to(wide)
        return s + (torch.where(i + offset - j >= delay, bias, 0.0) if delay else bias)

    return modified


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, modified: Any, block_mask: Any,
            scale: float, gqa: bool, options: Any) -> tuple[Tensor, Tensor]:
    def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return modified(s, b, h, i, j, bias)  # an argument of the compiled function: only arguments get gradients

    if hasattr(flex, "AuxRequest"):
        out, aux = flex.flex_attention(query, key, value, score_mod, block_mask, scale, gqa,
                                       kernel_options=options, return_aux=flex.AuxRequest(lse=True))
        return out, aux.lse
    return flex.flex_attention(query, key, value, score_mod, block_mask, scale, gqa, return_lse=True,
                               kernel_options=options)


def _program(number: int) -> Callable[..., Any]:
    """``_attend`` compiled for one configuration. torch stops compiling a function after a few variants, so each
    configuration gets its own code object."""
    code = _attend.__code__.replace(co_name=f"_attend_{number}")
    return torch.compile(FunctionType(code, globals()), backend=COMPILER, fullgraph=True, dynamic=False)
