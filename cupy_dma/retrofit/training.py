"""The training loop of a retrofit: AdamW, a falling kept share, logs, checkpoints.

The learning rate (3e-5), the linear rise of the compression ratio and the temperature (0.1) are those of DMS's code
(arXiv 2506.05345). DMS weights the budget loss by 1; with 4, and the final target for the last quarter of the steps,
training ends nearer to the target (docs/retrofit.md).
"""
from __future__ import annotations

import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cupy_dma import checks
from cupy_dma.retrofit import checkpoints
from cupy_dma.retrofit.distillation import Distillation, gates_of
from cupy_dma.torch import RetentionGate
from cupy_dma.torch.registration import own_type

TRAINABLE = ("gate", "all")


def kept_target(step: int, steps: int, ratio: float, *, linear: str = "ratio") -> float:
    """The share of keys to keep at a step: 1 at step 0, ``1 / ratio`` from step ``steps`` on.

    Parameters
    ----------
    step, steps : int
    ratio : float
        At least 1.
    linear
        What is linear in between: ``"ratio"``, the inverse of the share, as in DMS, or ``"share"``.
    """
    checks.choice(linear, "linear", ("ratio", "share"))
    ratio = checks.real(ratio, "ratio", 1.0)
    progress = min(checks.whole(step, "step", 0) / checks.whole(steps, "steps", 1), 1.0)
    return 1 / (1 + (ratio - 1) * progress) if linear == "ratio" else 1 - (1 - 1 / ratio) * progress


def train(model: nn.Module, batches: Iterable[Any], *, steps: int, ratio: float, shrink: int | None = None,
          linear: str = "ratio", trainable: str | None = "gate", teacher: nn.Module | None = None, rate: float = 3e-5,
          base_rate: float = 1e-5, temperature: float | tuple[float, float] | None = None, weight: float = 4.0,
          direction: str = "forward", chunk: int = 4096, clip: float = 1.0, autocast: torch.dtype | None = None,
          checkpoint: str | os.PathLike | None = None, every: int = 100, resume: bool = False,
          callback: Callable[[dict[str, Any]], Any] | None = None, progress: bool = True, process_group: Any = None,
          wrap: Callable[[Distillation], nn.Module] | None = None) -> list[dict[str, Any]]:
    """Train the gates of a model in place. Leaves the model in evaluation mode.

    Parameters
    ----------
    model
        A transformers model, converted with ``policy="gate"``.
    batches : iterable of int64 Tensors ``(B, N)``, or dicts of ``input_ids`` and ``attention_mask``
        One per step; ``N`` must exceed the gates' delay.
    steps : int
    ratio : float
        Final compression: the share of keys kept beyond the delay falls to ``1 / ratio``.
    shrink : int, optional
        Steps until the final compression; by default three quarters of ``steps``.
    linear
        As for ``kept_target``.
    trainable
        ``"gate"``: only the gates; ``"all"``: everything, which needs a ``teacher``; None: the parameters that require
        gradients.
    teacher, weight, direction, chunk
        As for ``Distillation``.
    rate, base_rate : float
        Learning rates of the gates and of the rest, constant.
    temperature : float or two, optional
        Temperature of the gates; two numbers change linearly over ``shrink`` steps. By default the gates' own.
    clip : float
        Maximum norm of the gradient.
    autocast : torch.dtype, optional
        For forward passes of a float32 model, e.g. ``torch.bfloat16``.
    checkpoint : path, optional
        File to write every ``every`` steps and at the end. It has whole tensors, even of a sharded model.
    resume : bool
        Continue from ``checkpoint`` if it exists. Pass ``batches`` from the beginning; those already used are skipped,
        so the result equals that of an uninterrupted run. The number of ranks must be the same; the sharding may
        differ.
    callback
        Called with every step's log.
    progress : bool
        Show a progress bar.
    process_group : ProcessGroup, optional
        Data parallelism: its ranks call ``train`` together, each with its own batches, and take the same steps. The
        first rank writes the ``checkpoint``, which all must be able to read, and shows the progress.
    wrap
        Called with the ``Distillation``; returns the module to call in its place. Default with a ``process_group``:
        ``DistributedDataParallel``. To shard the model, call ``fully_shard`` on its layers and return
        ``fully_shard(objective)``.

    Returns
    -------
    The log of every step, including those before a resume: ``step``, ``loss``, ``kl`` (nats per token), ``budget``,
    ``kept`` and ``target`` (mean gate, and its target), ``kept_by_layer``, ``dropped`` (share of gates below the
    threshold), ``temperature``, ``norm`` (of the gradient), ``tokens`` and ``seconds`` (this rank's; before a resume,
    the first rank's).

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or value, the model has no gates, the texts are too short, there are fewer
        batches than steps, the checkpoint has another recipe, or a sharded model has a ``checkpoint`` but no
        ``process_group``.
    FileNotFoundError
        Only some of the ranks find the checkpoint to resume from.
    FloatingPointError
        The loss is not finite; the parameters are unchanged by that step.
    """
    steps, every = checks.whole(steps, "steps", 1), checks.whole(every, "every", 1)
    shrink = max(1, steps * 3 // 4) if shrink is None else checks.whole(shrink, "shrink", 1)
    kept_target(0, shrink, ratio, linear=linear)
    rates = _positive(rate, "rate"), _positive(base_rate, "base_rate")
    clip, warmth = _positive(clip, "clip"), _temperatures(temperature)
    if trainable is not None:
        checks.choice(trainable, "trainable", TRAINABLE)
        if trainable == "all" and teacher is None:
            raise ValueError("trainable='all' needs a teacher: the model with open gates would change in training")
    if resume and checkpoint is None:
        raise ValueError("resume needs a checkpoint, got None")
    path = None if checkpoint is None else Path(checkpoint)
    objective = _prepared(model, trainable, lambda: Distillation(model, teacher, weight=weight, direction=direction,
                                                                 chunk=chunk, process_group=process_group))
    if wrap is None and process_group is not None:
        wrap = functools.partial(nn.parallel.DistributedDataParallel, process_group=process_group)
    stepped = objective if wrap is None else wrap(objective)
    gates = list(gates_of(model).values())
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if path is not None and process_group is None and any(map(checkpoints.is_sharded, learned.values())):
        raise ValueError("a checkpoint of a sharded model needs a process_group, got None: one of its ranks writes")
    optimizer, only_gates = _optimizer(gates, learned, rates)
    ranks, rank = (1, 0) if process_group is None else (process_group.size(), process_group.rank())
    recipe = {"ranks": ranks, "ratio": float(ratio), "shrink": shrink, "linear": linear, "weight": float(weight),
              "direction": direction, "parameters": sorted(learned)}
    history: list[dict[str, Any]] = []
    random = None
    if resume and path is not None:
        random = checkpoints.load(path, recipe, learned, optimizer, history, process_group)
    given = itertools.islice(batches, len(history), None)
    _set_modes(model, only_gates)
    try:
        with _bar(steps, len(history), progress and rank == 0) as bar:
            for step in range(len(history), steps):
                batch = next(given, None)
                if batch is None:
                    raise ValueError(f"batches must have one per step, {steps}, got {step}")
                if random is not None:
                    checkpoints.restore_random(random)
                    random = None
                began, target = time.perf_counter(), kept_target(step, shrink, ratio, linear=linear)
                if warmth is not None:
                    for gate in gates:
                        gate.temperature = warmth[0] + (warmth[1] - warmth[0]) * min(step / shrink, 1.0)
                log = _step(stepped, optimizer, learned, batch, target, clip, autocast, step)
                history.append({"step": step, "target": target, **log, "temperature": gates[0].temperature,
                                "seconds": time.perf_counter() - began})
                bar.set_postfix({name: f"{history[-1][name]:.3g}" for name in ("kl", "kept", "target")})
                bar.update()
                if path is not None and (len(history) % every == 0 or len(history) == steps):
                    checkpoints.save(path, recipe, learned, optimizer, history, process_group)
                if callback is not None:
                    callback(history[-1])
    finally:
        model.eval()
    return history


def _step(objective: nn.Module, optimizer: Any, learned: dict[str, Any], batch: Any, target: float, clip: float,
          autocast: torch.dtype | None, step: int) -> dict[str, Any]:
    """One step, which waits for the device once; returns its log."""
    device = next(iter(learned.values())).device
    named = batch if isinstance(batch, dict) else {"input_ids": batch}
    named = {name: named[name].to(device) for name in ("input_ids", "attention_mask") if named.get(name) is not None}
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        losses = objective(target=target, **named)
    optimizer.zero_grad(set_to_none=True)
    losses.loss.backward()
    norm: Any = nn.utils.clip_grad_norm_(learned.values(), clip)
    norm = norm.full_tensor() if checkpoints.is_sharded(norm) else norm
    numbers = (losses.loss, losses.kl, losses.budget, losses.dropped, norm, *losses.kept)
    loss, kl, budget, dropped, size, *layers = torch.stack([x.detach().float() for x in numbers]).tolist()
    if not (math.isfinite(loss) and math.isfinite(size)):
        raise FloatingPointError(f"step {step}: the loss is {loss}, the norm of its gradient {size}")
    optimizer.step()
    return {"loss": loss, "kl": kl, "budget": budget, "kept": sum(layers) / len(layers), "kept_by_layer": layers,
            "dropped": dropped, "norm": size, "tokens": named["input_ids"].numel()}


def _prepared(model: Any, trainable: str | None, objective: Callable[[], Distillation]) -> Distillation:
    """The objective of a model, with the requested parameters trainable and 16-bit gates converted to float32. If it
    raises, nothing has changed."""
    before = {p: p.requires_grad for p in model.parameters()} if isinstance(model, nn.Module) else {}
    try:
        if trainable is not None and before:
            for parameter in before:
                parameter.requires_grad_(trainable == "all" and parameter.is_floating_point())
            for gate in gates_of(model).values():
                gate.requires_grad_(True)
        found = objective()
    except BaseException:
        for parameter, required in before.items():
            parameter.requires_grad_(required)
        raise
    for gate in gates_of(model).values():
        if own_type(gate, torch.empty(0)) != torch.float64:
            gate.float()
    return found


def _optimizer(gates: list[RetentionGate], learned: dict[str, Any], rates: tuple[float, float]) -> tuple[Any, bool]:
    """The optimizer, and whether it trains only gates."""
    own = {id(p) for gate in gates for p in gate.parameters()}
    groups = [[p for p in learned.values() if (id(p) in own) == gated] for gated in (True, False)]
    return torch.optim.AdamW([{"params": group, "lr": rate} for group, rate in zip(groups, rates) if group],
                             weight_decay=0.0), not groups[1]


def _set_modes(model: nn.Module, only_gates: bool) -> None:
    """A frozen model has no dropout, but activation checkpointing of transformers requires modules in training mode."""
    model.train(not only_gates)
    for gate in gates_of(model).values():
        gate.train()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def _bar(steps: int, begin: int, progress: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=steps, initial=begin, desc="retrofit", disable=None if progress else True)


def _positive(value: Any, name: str) -> float:
    number = checks.real(value, name, 0.0)
    if not number:
        raise ValueError(f"{name} must be above 0, got {number}")
    return number


def _temperatures(value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    first, last = value if isinstance(value, tuple) and len(value) == 2 else (value, value)
    return _positive(first, "temperature"), _positive(last, "temperature")
