"""FlexAttention and scaled_dot_product_attention with a dense mask and a dense bias. As peers.py has them: query
(B, Lq, H, D), key and value (B, Lk, Hkv, D); a maker does what is not to be timed and returns the call that is."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness.peers import Backward, Call


def visible_in(mask: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The mask_mod of ``mask``, bool (1, H, Lq, Lk)."""
    dense = mask[0]

    def visible(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        return dense[h, i, j]

    return visible


def block_mask(mask: torch.Tensor, compiled: bool) -> Any:
    """FlexAttention's list of blocks, from the mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    _, heads, queries, keys = mask.shape
    create = torch.compile(create_block_mask) if compiled else create_block_mask
    return create(visible_in(mask), 1, heads, queries, keys, device=str(mask.device))


def _pass(mask: torch.Tensor, blocks: Any, grouped: bool, compiled: bool,
          options: dict[str, int] | None = None) -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    attend = flex_attention
    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(flex_attention, dynamic=False)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        def add(s: Any, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
            return s + bias[b, h, i, j]

        return attend(q, k, v, score_mod=add, block_mask=blocks, enable_gqa=grouped, kernel_options=options or None)

    return forward


def flex(query, key, value, mask, bias, blocks, compiled: bool = True) -> Call:
    """FlexAttention, mask and bias (1, H, Lq, Lk) read in mask_mod and score_mod, the list of blocks given."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    return partial(_pass(mask, blocks, q.shape[1] != k.shape[1], compiled), q, k, v, bias)


# Tiles of FlexAttention's backward pass: torch's own choice, and two that need less shared memory, of which the faster
# is taken where torch's does not fit (head dim 128 with a learned bias needs 240 KB on Hopper, which has 227).
BACKWARD_OPTIONS: tuple[dict[str, int], ...] = (
    {}, {"bwd_num_stages": 2},
    {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64, "bwd_num_stages": 2,
     "bwd_num_warps": 4})


def milliseconds(call: Call, repeats: int = 3) -> float:
    """The fastest of a few calls, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)


def first_or_fastest(make: Callable[[dict[str, int]], Call], time_of: Callable[[Call], float] = milliseconds,
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


def flex_backward(query, key, value, dout, mask, bias, blocks, compiled: bool = True) -> tuple[Call, str]:
    """The gradients of ``flex``, that of the bias among them. Returns the call and a note."""
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # a donated buffer forbids a second backward of the same forward
    q, k, v, do = (x.transpose(1, 2).contiguous() for x in (query, key, value, dout))
    grouped = q.shape[1] != k.shape[1]
    return first_or_fastest(
        lambda options: Backward(_pass(mask, blocks, grouped, compiled, options), (q, k, v, bias), do))


def _sdpa(backend: SDPBackend | None, q, k, v, added) -> torch.Tensor:
    if backend is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=added)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=added)


def _expanded(query, key, value) -> list[torch.Tensor]:
    group = query.shape[2] // key.shape[2]
    return [x.transpose(1, 2).repeat_interleave(heads, 1).contiguous()
            for x, heads in ((query, 1), (key, group), (value, group))]


def sdpa(backend: SDPBackend | None, query, key, value, added) -> tuple[Call, str]:
    """scaled_dot_product_attention with the float mask ``added`` (1, H, Lq, Lk): the bias, -inf where hidden."""
    return partial(_sdpa, backend, *_expanded(query, key, value), added), "kv heads expanded, mask added beforehand"


def sdpa_backward(backend: SDPBackend | None, query, key, value, dout, added) -> tuple[Call, str]:
    """The gradients of ``sdpa``, of the float mask too where torch can give it."""
    inputs, do = _expanded(query, key, value), dout.transpose(1, 2).contiguous()
    note = "kv heads expanded, their gradients not summed"
    try:
        call = Backward(partial(_sdpa, backend), (*inputs, added), do)
        call()
        return call, note
    except RuntimeError as error:
        why = str(error).splitlines()[0][:80]
    call = Backward(lambda q, k, v: _sdpa(backend, q, k, v, added), inputs, do)
    call()
    return call, f"{note}; without the gradient of the bias, {why}"
