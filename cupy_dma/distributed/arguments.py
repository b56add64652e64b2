"""The arguments of a call on one rank: their checks, and what the ranks must agree on."""
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cupy_dma import backends, checks
from cupy_dma.arrays import describe
from cupy_dma.cache.distances import spread_rows
from cupy_dma.calls.attention import attention_call, dynamic_call
from cupy_dma.calls.options import Options, Selection
from cupy_dma.distributed.rows import has_room
from cupy_dma.distributed.survivors import Keep
from cupy_dma.masks.windows import window_of
from cupy_dma.torch.registration import is_deterministic

UNBOUNDED = ("window must be an int, got None: causal queries see all earlier keys, so whole shards would have to be "
             "sent; use ring attention, torch.distributed.tensor.experimental.context_parallel, or give a window: "
             "without scores it is a sliding window; with documents, one as long as the longest document hides "
             "nothing")


def process_group(group: Any) -> Any:
    """The process group of an argument ``group``."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group must be a DeviceMesh of one dimension, got {group.ndim} dimensions "
                             f"{group.mesh_dim_names}: pass mesh['name'], the one that the sequence is spread over")
        return group.get_group()
    if group is None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("group must be given, or torch.distributed.init_process_group must have been called: "
                             "there is no default process group")
        return dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or DeviceMesh that this process belongs to, got "
                        f"{type(group).__name__}")
    return group


def checked_candidates(key: Tensor, padding: Any, documents: Any) -> tuple[Tensor | None, Tensor | None]:
    """Padding and documents of the tokens of ``key (B, n, Hkv, D)``: bool and ids ``(1|B, n)``."""
    batch, n = key.shape[:2]
    if padding is not None:
        real = checks.real_keys(describe(padding, "padding"))
        checks.has_shape(real, "(1|B, n)", ((1, batch), (n,)))
        padding = real.array
    if documents is not None:
        ids = describe(documents, "documents")
        checks.one_of_types(ids, checks.INTEGERS)
        if ids.ndim == 1:
            raise ValueError(f"documents must be ids (1|B, n) of the shard's tokens, got shape {ids.shape}: make "
                             f"them of cumulative lengths, shard_sequence(document_ids(cu_seqlens, total), group)")
        checks.has_shape(ids, "(1|B, n)", ((1, batch), (n,)))
        documents = ids.array
    for x, name in ((padding, "padding"), (documents, "documents")):
        if x is not None and (not isinstance(x, Tensor) or x.device != key.device):
            raise ValueError(f"{name} must be a torch tensor on key's device {key.device}, got "
                             f"{getattr(x, 'device', type(x).__name__)}")
    return padding, documents


class Arguments(NamedTuple):
    """The arguments of a call, to be checked."""

    query: Tensor
    key: Tensor
    value: Tensor
    scores: Tensor | None
    window: Any
    sinks: Any
    recent: Any
    dt_proj: Tensor | None
    A: Tensor | None
    dt_bias: Tensor | None
    form: str
    padding: Any
    documents: Any
    bias_delay: Any
    scale: Any
    softcap: Any
    deterministic: Any
    room: Any
    backend: str | None

    def signature(self) -> dict[str, Any]:
        """What all ranks must agree on. Raises what ``context_parallel_attention`` documents."""
        if self.window is None:
            raise ValueError(UNBOUNDED)
        q, k, v = (self._tensor(name) for name in ("query", "key", "value"))
        options = Options(True, self.scale, self.softcap, is_deterministic(self.deterministic), self.bias_delay)
        if self.scores is None and self.dt_proj is None and self.A is None and self.dt_bias is None:
            checked = attention_call(q, k, v, None, None, options)
        else:
            selection = Selection(self.scores, self.window, self.dt_proj, self.A, self.dt_bias, self.form)
            checked = dynamic_call(q, k, v, selection, options).attention
            if self.scores is not None:
                checks.has_shape(describe(self.scores, "scores"), "(B, Hkv, n)",
                                 ((k.shape[0],), (k.shape[2],), (k.shape[1],)))
        if v.shape != k.shape:
            raise ValueError(f"value must have key's shape {tuple(k.shape)}, got {tuple(v.shape)}")
        if q.shape[1] != k.shape[1]:
            raise ValueError(f"query must have key's length, as each rank has its own tokens' queries and keys, got "
                             f"{q.shape[1]} and {k.shape[1]}")
        backends.choose(self.backend, (checked.query,))
        keep, (padding, documents) = self.keep(), self.candidates()
        rows, _ = spread_rows(keep.rows, k.shape[1], checked.bias_delay)
        for name in ("key", "value") if checks.flag(self.room, "room") else ():
            if not has_room(self._tensor(name), rows):
                raise ValueError(f"{name} must have memory for {rows} rows ahead of each batch entry with room=True, "
                                 f"as buffer[:, {rows}:] has, got shape {tuple(k.shape)} with strides {k.stride()} at "
                                 f"offset {k.storage_offset()}: make it with empty_with_room, or leave room out")
        grad = torch.is_grad_enabled()
        made = (self.value, self.dt_proj, self.A, self.dt_bias) if self.scores is None else (self.scores,)
        return {
            "query": f"(B, H, D) = ({q.shape[0]}, {q.shape[2]}, {q.shape[3]}) of {q.dtype}",
            "key": f"(B, Hkv, D) = ({k.shape[0]}, {k.shape[2]}, {k.shape[3]}) of {k.dtype}",
            **keep._asdict(),
            "scores": self._scores_meant(), "form": self.form, "padding": _given(padding),
            "documents": _given(documents), "scale": checked.scale, "softcap": checked.softcap,
            "bias_delay": checked.bias_delay,
            "device": q.device.type,
            "requires_grad of key": grad and k.requires_grad, "requires_grad of value": grad and v.requires_grad,
            "requires_grad of scores": grad and any(x is not None and x.requires_grad for x in made),
        }

    def keep(self) -> Keep:
        """How many keys a query keeps, checked."""
        return Keep(window_of(self.window, self.key.shape[2]), checks.whole(self.sinks, "sinks", 0),
                    checks.whole(self.recent, "recent", 0))

    def candidates(self) -> tuple[Tensor | None, Tensor | None]:
        """Checked padding and documents: bool and ids ``(1|B, n)``."""
        return checked_candidates(self.key, self.padding, self.documents)

    def _tensor(self, name: str) -> Tensor:
        found = getattr(self, name)
        if not isinstance(found, Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(found).__name__}")
        return found

    def _scores_meant(self) -> str:
        if self.scores is not None:
            return f"given, {torch.promote_types(self.scores.dtype, torch.float32)}"
        return "none" if self.dt_proj is None else f"made of dt_proj, A{' and dt_bias' * (self.dt_bias is not None)}"


def _given(x: Any) -> str:
    return "none" if x is None else "given"
