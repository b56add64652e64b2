"""torch tensors that a kernel cannot read directly, and what is done about them.

    negative or conjugate bit, zero tensor     copied to plain memory first
    tangent (forward-mode AD)                  NotImplementedError: the tangent would be lost
    vmap, jvp, grad of torch.func              NotImplementedError: there are no rules for them
    sparse, nested, meta, fake, other layouts  TypeError
"""
from __future__ import annotations

from typing import Any


def has_tangent(torch: Any, tensor: Any) -> bool:
    """Whether the tensor carries a forward-mode tangent."""
    forward_ad = torch.autograd.forward_ad
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def tangent_error(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} carries a forward-mode tangent (torch.autograd.forward_ad, torch.func.jvp), but cupy_dma has "
        f"reverse-mode derivatives only: use backward() or torch.autograd.grad(), or pass "
        f"torch.autograd.forward_ad.unpack_dual({name}).primal")


def in_memory(torch: Any, tensor: Any, name: str) -> Any:
    """The tensor itself, or a plain copy if its negative or conjugate bit is set."""
    if has_tangent(torch, tensor):
        raise tangent_error(name)
    return tensor.resolve_conj().resolve_neg()


def written_out(torch: Any, tensor: Any, name: str) -> Any:
    """A zero tensor (autograd's stand-in for a gradient known to be 0), which has no address, as plain memory."""
    if not tensor._is_zerotensor():
        raise unreadable(torch, tensor, name)
    return tensor.clone()


def transform_of(torch: Any, tensor: Any) -> str | None:
    """The torch.func transform that has wrapped this tensor."""
    functorch = torch._C._functorch
    if functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor):
        return "vmap, which is_grads_batched=True and vectorize=True use too"
    return "grad, vjp, jvp and the Jacobians made of them" if functorch.is_gradtrackingtensor(tensor) else None


def transform_error(name: str, transform: str) -> NotImplementedError:
    instead = "make the mapped axis part of B, the first axis of every argument" if transform.startswith("vmap") else \
        "use backward(), torch.autograd.grad() or torch.autograd.functional"
    return NotImplementedError(f"{name} is inside a torch.func transform ({transform}), which cupy_dma does not "
                               f"support: {instead}")


def unreadable(torch: Any, tensor: Any, name: str) -> Exception:
    """The error for a tensor whose memory cannot be read."""
    transform = transform_of(torch, tensor)
    if transform is not None:
        return transform_error(name, transform)
    if tensor.is_nested:
        return TypeError(f"{name} must be a dense tensor, got a nested one: call varlen_attention (or "
                         f"varlen_dynamic_mask_attention) with {name}.values() and, as cu_seqlens, {name}.offsets()")
    if tensor.layout != torch.strided:
        return TypeError(f"{name} must be a dense tensor (torch.strided), got {tensor.layout}: pass "
                         f"{name}.to_dense()")
    if tensor.is_meta:
        return TypeError(f"{name} is on the torch device meta, which has no data; allowed are cpu and cuda. For "
                         f"shapes alone use torch._subclasses.FakeTensorMode")
    return TypeError(f"{name} must be a tensor with readable memory, got {type(tensor).__name__} "
                     f"({tensor.layout} on {tensor.device}); convert it to a plain torch.Tensor on cpu or cuda")
