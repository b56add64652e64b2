"""Peers: other ways to compute the same attention, and the dense attention that the dynamic mask replaces.

Shapes are those of the library: query (B, Lq, H, D), key and value (B, Lk, Hkv, D). Each maker does the untimed work
(views, given masks) and returns the call to time; it raises if the peer cannot run.
"""
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.harness.measure import step_times

Call = Callable[[], Any]


def bhsd(query, key, value):
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def backends(*names: str, elsewhere: str = "dense") -> dict[str, SDPBackend | None]:
    """The peers of these names; without a GPU only torch's choice, under the name ``elsewhere``."""
    found = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
             "efficient": SDPBackend.EFFICIENT_ATTENTION}
    return {name: found[name] for name in names} if torch.cuda.is_available() else {elsewhere: None}


def sdpa(backend: SDPBackend | None, query, key, value, causal: bool = False, mask=None) -> torch.Tensor:
    """scaled_dot_product_attention on (B, H, N, D) by one backend, grouped heads as they are; None: torch's choice."""
    with nullcontext() if backend is None else sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal,
                                              enable_gqa=query.shape[1] != key.shape[1])


def expanded_if_needed(make: Callable[..., Call], key, value, group: int) -> tuple[Call, str]:
    """``make(key, value)`` if that call runs, otherwise ``make`` with expanded kv heads (axis 1). Returns the call and
    a note."""
    try:
        call = make(key, value)
        call()
        return call, ""
    except RuntimeError:
        if group == 1:
            raise
    call = make(*(x.repeat_interleave(group, dim=1) for x in (key, value)))
    call()
    return call, "kv heads expanded beforehand"


def dense(backend: SDPBackend | None, query, key, value, causal: bool = True) -> tuple[Call, str]:
    """scaled_dot_product_attention (one query: everything is visible). Returns the call and a note."""
    q, k, v = bhsd(query, key, value)
    return expanded_if_needed(lambda k, v: partial(sdpa, backend, q, k, v, causal and q.shape[2] > 1), k, v,
                              q.shape[1] // k.shape[1])


class Backward:
    """``torch.autograd.grad`` of one retained forward pass: a call of the backward pass alone.

    Autograd runs the backward of an operation on the stream of its forward, so the forward (and its leaves) is computed
    again when the current stream changes. That happens in the warm-up, so a capture finds everything on its stream.
    """

    def __init__(self, forward: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], dout: torch.Tensor):
        self.forward, self.inputs, self.dout = forward, inputs, dout
        self.out: torch.Tensor | None = None
        self.stream: Any = None

    def __call__(self) -> tuple[torch.Tensor, ...]:
        stream = torch.cuda.current_stream() if self.dout.is_cuda else None
        if self.out is None or stream != self.stream:
            self.leaves = [x.detach().requires_grad_() for x in self.inputs]
            self.out, self.stream = self.forward(*self.leaves), stream
        return torch.autograd.grad(self.out, self.leaves, self.dout, retain_graph=True)


def forward_backward(forward: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor],
                     dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(forward(*leaves), leaves, dout)


def dense_backward(backend: SDPBackend | None, query, key, value, dout, *, causal: bool = True,
                   forward: bool = False) -> tuple[Call, str]:
    """The gradients of scaled_dot_product_attention on contiguous (B, H, N, D) tensors, with or without the forward
    pass. Returns the call and a note."""
    q, k, v, do = (x.transpose(1, 2).contiguous() for x in (query, key, value, dout))

    def make(k, v) -> Call:
        if forward:
            return partial(forward_backward, partial(sdpa, backend, causal=causal), (q, k, v), do)
        return Backward(partial(sdpa, backend, causal=causal), (q, k, v), do)

    return expanded_if_needed(make, k, v, q.shape[1] // k.shape[1])


def dense_mask(scores: torch.Tensor, query_length: int, window: int, dtype: torch.dtype, group: int) -> torch.Tensor:
    """The additive mask (B, H, Lq, Lk) that a model without this library builds: causal, topk per row, bias where kept
    and -inf elsewhere."""
    batch, kv_heads, key_length = scores.shape
    rows = scores[:, :, None, :].expand(batch, kv_heads, query_length, key_length)
    position = torch.arange(query_length, device=scores.device) + key_length - query_length
    hidden = torch.arange(key_length, device=scores.device)[None] > position[:, None]
    rows = rows.masked_fill(hidden, float("-inf"))
    if window < key_length:
        best = rows.topk(window, dim=-1, sorted=False)
        rows = torch.full_like(rows, float("-inf")).scatter_(-1, best.indices, best.values)
    return rows.to(dtype).repeat_interleave(group, dim=1)


def masked(query, key, value, mask: Callable[[], torch.Tensor]) -> Call:
    """scaled_dot_product_attention with the dense additive mask (B, H, Lq, Lk) that ``mask()`` gives in the call."""
    q, k, v = bhsd(query, key, value)
    group = q.shape[1] // k.shape[1]
    if group > 1:  # with a mask and grouped heads only the slow, materializing kernel would remain
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask())


def interval_blocks(start: torch.Tensor, stop: torch.Tensor, query_length: int, block: int):
    """Which blocks of the mask hold a visible pair, and which only visible pairs.

    ``start``, ``stop``: (B, H, Lk) int. Returns bool ``any`` and ``all``, (B, H, Lq/block, Lk/block); Lk must be a
    multiple of the block, and Lq too or below it. In O(Lk * Lq / block), not through the dense mask.
    """
    batch, heads, key_length = start.shape
    first = torch.arange(0, query_length, block, device=start.device) + key_length - query_length
    first = first[:, None]
    start, stop = start[:, :, None], stop[:, :, None]
    seen = (start < stop) & (start < first + block) & (stop > first)
    full = (start <= first) & (stop >= first + block)
    split = (batch, heads, len(first), key_length // block, block)
    return seen.reshape(split).any(-1), full.reshape(split).all(-1)


def interval_block_mask(start: torch.Tensor, stop: torch.Tensor, query_length: int, group: int, block: int):
    """FlexAttention's block mask of ``start`` and ``stop (B, Hkv, Lk)`` for ``Hkv * group`` query heads."""
    key_length = start.shape[2]
    offset = key_length - query_length

    def visible(b, h, i, j):
        position = i + offset
        return (start[b, h // group, j] <= position) & (position < stop[b, h // group, j])

    seen, full = (x.repeat_interleave(group, dim=1) for x in interval_blocks(start, stop, query_length, block))
    some = seen & ~full

    def ordered(blocks):
        order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
        return blocks.sum(-1, dtype=torch.int32), order

    # On other backends torch assumes that lengths are whole blocks.
    lengths = {"seq_lengths": (query_length, key_length)} if query_length % block else {}
    return BlockMask.from_kv_blocks(*ordered(some), *ordered(full), BLOCK_SIZE=block, mask_mod=visible, **lengths)


def flex_function(compiled: bool) -> Callable[..., torch.Tensor]:
    if not compiled:
        return flex_attention
    torch._dynamo.reset()
    return torch.compile(flex_attention, dynamic=False)


def with_bias(attend, blocks, group: int, q, k, v, bias, delay: int = 0, options: dict[str, int] | None = None):
    """FlexAttention of (B, H, N, D) under ``blocks``, with a bias of keys (B, Hkv, Lk), added from a distance of
    ``delay`` on, or of queries and keys (B, H, Lq, Lk), as score_mod."""
    def add_bias(s, b, h, i, j):
        if bias.ndim == 4:
            return s + bias[b, h, i, j]
        added = s + bias[b, h // group, j]
        return added if delay == 0 else torch.where(i - j >= delay, added, s)

    return attend(q, k, v, score_mod=add_bias, block_mask=blocks, enable_gqa=group > 1, kernel_options=options)


def flex_intervals(query, key, value, start, stop, bias, block: int = 128) -> torch.Tensor:
    """FlexAttention under an interval mask with a key bias, as one function to compile; it also builds the block mask.
    Query, key, value and result are ``(B, N, H, D)``."""
    group = query.shape[2] // key.shape[2]
    start, stop = (x.expand(key.shape[0], key.shape[2], key.shape[1]) for x in (start, stop))
    mask = interval_block_mask(start, stop, query.shape[1], group, block)
    return with_bias(flex_attention, mask, group, *bhsd(query, key, value), bias).transpose(1, 2)


def flex(query, key, value, bias, blocks, compiled: bool = True) -> Call:
    """Compiled FlexAttention under given blocks, with the bias as score_mod. Without ``compiled`` it runs anywhere, but
    slowly and with dense scores."""
    q, k, v = (x.contiguous() for x in bhsd(query, key, value))
    return partial(with_bias, flex_function(compiled), blocks, q.shape[1] // k.shape[1], q, k, v, bias)


def intervals(query, key, start, stop, block: int = 128) -> BlockMask:
    """The block mask for ``flex`` of int32 ``start``, ``stop`` (B, Hkv, Lk)."""
    return interval_block_mask(start, stop, query.shape[1], query.shape[2] // key.shape[2], block)


def with_bias_or_without(make: Callable[[bool], Call], errors: type[Exception]) -> tuple[Call, str]:
    """The call from ``make``, with the gradient of the bias if torch can compute it, and a note."""
    try:
        call = make(True)
        call()
        return call, ""
    except errors as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0][:100]
    call = make(False)
    call()
    return call, f"without the gradient of the bias, {why}"


def keep_forward() -> None:
    """A donated buffer forbids a second backward of the same forward."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False


def flex_backward(query, key, value, dout, bias, blocks, compiled: bool = True, delay: int = 0,
                  forward: bool = False) -> tuple[Call, str]:
    """The gradients of ``flex``, including the bias; that of keys only if torch can compute it. ``delay`` needs as many
    keys as queries; ``forward`` includes the forward pass. Returns the call and a note."""
    keep_forward()
    q, k, v, do = (x.transpose(1, 2).contiguous() for x in (query, key, value, dout))

    def make(learned: bool, options: dict[str, int] | None = None) -> Call:
        attend = partial(with_bias, flex_function(compiled), blocks, q.shape[1] // k.shape[1], delay=delay,
                         options=options or None)
        if not learned:
            return Backward(lambda q, k, v: attend(q, k, v, bias), (q, k, v), do)
        inputs = q, k, v, bias
        return partial(forward_backward, attend, inputs, do) if forward else Backward(attend, inputs, do)

    if bias.ndim == 4:
        return first_or_fastest(partial(make, True))
    return with_bias_or_without(make, Exception)  # compilers raise anything


# ---- a dense mask and a dense bias -----------------------------------------------------------------------------------
def block_mask(mask: torch.Tensor, compiled: bool) -> Any:
    """FlexAttention's list of blocks of ``mask``, bool (1, H, Lq, Lk)."""
    dense = mask[0]

    def visible(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return dense[h, i, j]

    create = torch.compile(create_block_mask) if compiled else create_block_mask
    return create(visible, 1, *dense.shape, device=str(mask.device))


# Tiles of FlexAttention's backward pass: torch's own choice and two that need less shared memory. If torch's does not
# fit (head dim 128 with a learned bias needs 240 KB, and Hopper has 227), the faster of the two is used.
BACKWARD_OPTIONS: tuple[dict[str, int], ...] = (
    {}, {"bwd_num_stages": 2},
    {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64, "bwd_num_stages": 2,
     "bwd_num_warps": 4})


def fastest_ms(call: Call) -> float:
    return min(step_times(call, 4, "cuda")[1:])


def first_or_fastest(make: Callable[[dict[str, int]], Call], time_of: Callable[[Call], float] = fastest_ms,
                     choices: tuple[dict[str, int], ...] = BACKWARD_OPTIONS) -> tuple[Call, str]:
    """The call made with the first of ``choices`` if it runs, else the fastest of the others that do; and a note."""
    found: list[tuple[float, int, Call]] = []
    why = []
    for number, options in enumerate(choices):
        try:
            call = make(options)
            call()
            if number == 0:
                return call, ""
            found.append((time_of(call), number, call))
        except Exception as error:  # compilers raise anything
            why.append(f"{type(error).__name__}: {error}".replace("\n", " ")[:160])
    if not found:
        raise RuntimeError(f"no choice of tiles runs: {'; '.join(why)}")
    _, number, call = min(found, key=lambda entry: entry[:2])
    words = ", ".join(f"{name.removeprefix('bwd_')} {value}" for name, value in choices[number].items())
    return call, f"with {words}, for torch's choice of tiles does not run"


def _expanded(query, key, value) -> list[torch.Tensor]:
    group = query.shape[2] // key.shape[2]
    return [x.transpose(1, 2).repeat_interleave(heads, 1).contiguous()
            for x, heads in ((query, 1), (key, group), (value, group))]


def biased_sdpa(backend: SDPBackend | None, query, key, value, added) -> tuple[Call, str]:
    """scaled_dot_product_attention with the float mask ``added`` (1, H, Lq, Lk): the bias, -inf where hidden."""
    inputs = _expanded(query, key, value)
    return partial(sdpa, backend, *inputs, mask=added), "kv heads expanded, mask added beforehand"


def biased_sdpa_backward(backend: SDPBackend | None, query, key, value, dout, added) -> tuple[Call, str]:
    """The gradients of ``sdpa``, including the float mask if torch can compute it."""
    inputs, do = _expanded(query, key, value), dout.transpose(1, 2).contiguous()

    def make(learned: bool) -> Call:
        if learned:
            return Backward(lambda q, k, v, mask: sdpa(backend, q, k, v, mask=mask), (*inputs, added), do)
        return Backward(partial(sdpa, backend, mask=added), inputs, do)

    call, note = with_bias_or_without(make, RuntimeError)
    return call, "; ".join(filter(None, ("kv heads expanded, their gradients not summed", note)))
