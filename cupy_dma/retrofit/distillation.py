"""One step of a retrofit: the forward passes of teacher and student, and the losses.

    student   hidden states of the model with gates
    teacher   those of the same model with open gates, or of another model
    loss      = mean KL of their predictions + weight * relu(kept - target)         kept: mean gate of all layers

With a process group, whose ranks hold other texts each, the means are those of all ranks, and a rank's gradient is such
that the mean of the ranks' gradients is that of the loss, as ``DistributedDataParallel`` and FSDP compute it.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cupy_dma import checks
from cupy_dma.retrofit.losses import DIRECTIONS, Head, budget_loss, chunked_kl
from cupy_dma.torch import Gates, RetentionGate


def gates_of(model: nn.Module) -> dict[str, RetentionGate]:
    """The gates of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, RetentionGate)}


@contextmanager
def open_gates(model: nn.Module) -> Iterator[None]:
    """The model without its gates: full attention, as before its conversion."""
    before = {gate: gate.enabled for gate in gates_of(model).values()}
    try:
        for gate in before:
            gate.enabled = False
        yield
    finally:
        for gate, enabled in before.items():
            gate.enabled = enabled


class Losses(NamedTuple):
    """Of one batch; all except ``loss`` are detached."""

    loss: Tensor  # ()
    kl: Tensor  # (): mean of the real tokens, in nats
    budget: Tensor  # ()
    kept: Tensor  # (layers,): the mean gate of each layer with gates
    dropped: Tensor  # (): the share of gates below the threshold, whose keys the mask leaves out


class Distillation(nn.Module):
    """The losses of a model with gates (the student), compared with a teacher.

    Parameters
    ----------
    student
        A model of transformers converted with ``policy="gate"``; with ``backbone`` and ``head``, any module that
        contains ``RetentionGate``.
    teacher
        Another model with the same vocabulary, in evaluation mode; its gates, if any, count as open. By default the
        student with open gates; then all parameters other than the gates' must be frozen.
    weight : float
        Weight of the budget loss.
    direction, chunk
        As for ``chunked_kl``.
    process_group : ProcessGroup, optional
        Data parallelism: its ranks call ``forward`` together, each with a batch of its own. Losses are those of all
        batches, equal on all ranks.
    backbone, head
        Names of the submodules of student and teacher that compute hidden states from ``input_ids``, and logits from
        those. By default ``base_model`` and the output embeddings.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or value, the model has no gates, or its base is trained without a teacher.

    Notes
    -----
    The module may be wrapped (``DistributedDataParallel``) or sharded (``fully_shard``, the layers first): a step only
    calls ``forward``.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module | None = None, *, weight: float = 4.0,
                 direction: str = "forward", chunk: int = 4096, process_group: Any = None, backbone: str | None = None,
                 head: str | None = None):
        super().__init__()
        if not isinstance(student, nn.Module) or not gates_of(student):
            raise ValueError(f"student must be a model with gates, cupy_dma.transformers.convert(model, policy='gate'),"
                             f" got {type(student).__name__}")
        checks.choice(direction, "direction", DIRECTIONS)
        self.weight, self.direction = checks.real(weight, "weight", 0.0), direction
        self.chunk = checks.whole(chunk, "chunk", 1)
        gated = {id(p) for gate in gates_of(student).values() for p in gate.parameters()}
        if teacher is None and any(p.requires_grad and id(p) not in gated for p in student.parameters()):
            raise ValueError("teacher must be given if parameters other than the gates' are trained: the model with "
                             "open gates, the default teacher, would change with them")
        if teacher is not None and teacher.training:
            raise ValueError("teacher must be in evaluation mode: call its eval()")
        self.student = student
        self._teacher = [student if teacher is None else teacher]  # in a list: not a submodule, not trained or saved
        self.process_group = process_group
        self._names = backbone, head
        self._is_checked = False

    def forward(self, input_ids: Tensor, *, target: float, attention_mask: Tensor | None = None) -> Losses:
        """The losses of a batch.

        Parameters
        ----------
        input_ids : int64 Tensor ``(B, N)``
            ``N`` must exceed the gates' delay: in shorter texts gates change nothing.
        target : float
            The share of keys to keep; see ``kept_target``.
        attention_mask : Tensor ``(B, N)``, optional
            1 = a real token.

        Returns
        -------
        Losses

        Raises
        ------
        ValueError
            The texts are too short, or the model's logits are not those of its head applied to its hidden states.
        """
        gates, (teacher,) = gates_of(self.student), self._teacher
        delay = max(gate.delay for gate in gates.values())
        if input_ids.shape[1] <= delay:
            raise ValueError(f"texts must be longer than the gates' delay, {delay}, or gates learn only to close, got "
                             f"{input_ids.shape[1]} tokens")
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        own_head, head = _head(self.student, self._names[1]), _head(teacher, self._names[1])
        with torch.no_grad(), open_gates(teacher):
            self._check_heads(teacher, head, input_ids)
            expected = _hidden(teacher, self._names[0], given)
        with _recorded(gates) as found:
            hidden = _hidden(self.student, self._names[0], given)
        kl = chunked_kl(hidden, own_head, expected, head, direction=self.direction, chunk=self.chunk)
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        kept = torch.stack([each.kept.mean() for each in found.values()])
        dropped = torch.stack([(found[name].log_gate < gate.threshold).float().mean()
                               for name, gate in gates.items() if name in found]).mean()
        total, count = (kl * real).sum(), real.sum()
        if self.process_group is None:
            mean = total / count
        else:
            decided = torch.stack([(real.sum(1) - gate.sinks).clamp(min=0).sum()
                                   for name, gate in gates.items() if name in found])
            mean, kept, dropped = self._means(total, count, kept, decided, dropped)
        budget = budget_loss(kept.mean(), target)
        return Losses(mean + self.weight * budget, mean.detach(), budget.detach(), kept.detach(), dropped)

    def _means(self, total: Tensor, count: Tensor, kept: Tensor, decided: Tensor,
               dropped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Divergence per token, kept shares (of ``decided`` tokens) and dropped share of all ranks, with gradients of
        this rank's part."""
        ranks, layers = self.process_group.size(), len(kept)
        parts = total, count, dropped, kept * decided, decided
        sums = torch.cat([x.detach().double().reshape(-1) for x in parts])
        dist.all_reduce(sums, group=self.process_group)
        tokens, of_all = sums[1], sums[3 + layers:].clamp(min=1)
        mean = total * (ranks / tokens).to(total.dtype)
        share = kept * (ranks * decided / of_all).to(kept.dtype)
        return (_with_value(mean, sums[0] / tokens), _with_value(share, sums[3:3 + layers] / of_all),
                (sums[2] / ranks).to(dropped.dtype))

    def _check_heads(self, teacher: nn.Module, head: Head, input_ids: Tensor) -> None:
        """Check once, because some models change their logits after the head."""
        if self._is_checked:
            return
        few = input_ids[:1, :8]
        with torch.compiler.set_stance("force_eager"):  # compiled layers are for texts
            logits = teacher(input_ids=few)
            logits = logits if isinstance(logits, Tensor) else logits.logits
            hidden = _hidden(teacher, self._names[0], {"input_ids": few, "attention_mask": None})
        expected = _logits(hidden, head)
        off, size = (logits - expected).abs().max().item(), logits.abs().max().item()
        if off > 0.02 * size:
            raise ValueError(f"the logits of {type(teacher).__name__} are not those of its head applied to its hidden "
                             f"states: they are off by {off:.3g}, the largest is {size:.3g}")
        self._is_checked = True


def _with_value(x: Tensor, value: Tensor) -> Tensor:
    """``value``, with the gradient of ``x``."""
    return x + (value.to(x.dtype) - x).detach()


def _hidden(model: Any, name: str | None, given: dict[str, Any]) -> Tensor:
    """``(B, N, width)``"""
    if name is not None:
        found = model.get_submodule(name)(**{key: x for key, x in given.items() if x is not None})
        return found if isinstance(found, Tensor) else found.last_hidden_state
    model = getattr(model, "get_base_model", lambda: model)()  # of peft: the model with its adapters
    return model.base_model(**given, use_cache=False).last_hidden_state


def _head(model: Any, name: str | None) -> Head:
    module = model.get_submodule(name) if name is not None else model.get_output_embeddings()
    if hasattr(module, "base_layer"):
        raise ValueError(f"the head of {type(model).__name__} must be linear, without an adapter, got "
                         f"{type(module).__name__}")
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    return Head(module.weight, module.bias, scale, getattr(config, "final_logit_softcapping", None) or 0.0)


def _logits(hidden: Tensor, head: Head) -> Tensor:
    z = nn.functional.linear(hidden, head.weight, head.bias) * head.scale
    return head.softcap * torch.tanh(z / head.softcap) if head.softcap else z


@contextmanager
def _recorded(gates: dict[str, RetentionGate]) -> Iterator[dict[str, Gates]]:
    """The gates of a forward pass, there after it. Recomputations in the backward pass come later and are not recorded.
    """
    found: dict[str, Gates] = {}
    hooks = [gate.register_forward_hook(_record) for gate in gates.values()]
    try:
        yield found
        found.update({name: gate.found for name, gate in gates.items() if hasattr(gate, "found")})
    finally:
        for hook, gate in zip(hooks, gates.values()):
            hook.remove()
            gate.__dict__.pop("found", None)


def _record(gate: Any, given: Any, result: Gates) -> None:
    """A hook with no state of its own: a compiler would guard on that."""
    gate.found = result
