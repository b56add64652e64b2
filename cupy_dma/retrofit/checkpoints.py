"""Checkpoints of ``train``: one file, which holds whole tensors however the model is sharded.

    {recipe, parameters: {name: Tensor}, optimizer: its state_dict, history, random: generator states of every rank}

All ranks save and load together: gathering a sharded tensor is a collective call. The first rank writes, every rank
reads. A run may go on from the file with another sharding, or without, but with as many ranks.
"""
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def save(path: Path, recipe: dict[str, Any], learned: dict[str, Tensor], optimizer: Any,
         history: list[dict[str, Any]], group: Any) -> None:
    """Written to another file first, so that an interruption leaves the previous one intact. Returns, on all ranks,
    when the file is complete. If it cannot be written all ranks raise, those that did not try a RuntimeError."""
    first = group is None or group.rank() == 0
    random = _of_ranks([torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])],
                       group)
    state = optimizer.state_dict()
    state["state"] = {i: {name: _gathered(x, first) for name, x in own.items()} for i, own in state["state"].items()}
    parameters = {name: _gathered(p, first) for name, p in learned.items()}
    error: Exception | None = None
    if first:
        beside = path.with_name(f"{path.name}.new")
        try:
            torch.save({"recipe": recipe, "parameters": parameters, "optimizer": state, "history": history,
                        "random": random}, beside)
            os.replace(beside, path)
        except Exception as found:
            error = found
    said = _of_ranks(None if error is None else f"{type(error).__name__}: {error}", group)[0]
    if said is not None:
        raise error or RuntimeError(f"the first rank could not write the checkpoint {path}: {said}")


def load(path: Path, recipe: dict[str, Any], learned: dict[str, Tensor], optimizer: Any,
         history: list[dict[str, Any]], group: Any) -> list[Tensor] | None:
    """Restore a checkpoint, except this rank's generators, whose states are returned; None if there is no file.

    Raises
    ------
    ValueError
        The checkpoint has another recipe.
    FileNotFoundError
        Only some ranks find the file.
    """
    found = _of_ranks(path.exists(), group)
    if not any(found):
        return None
    if not all(found):
        raise FileNotFoundError(f"the checkpoint {path} must be readable on all ranks, but ranks "
                                f"{[rank for rank, exists in enumerate(found) if not exists]} do not find it")
    saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # a rank needs a part of large tensors
    for name, value in recipe.items():
        if saved["recipe"][name] != value:
            raise ValueError(f"the checkpoint {path} was made with {name}={saved['recipe'][name]!r}, got {value!r}")
    with torch.no_grad():
        for name, parameter in learned.items():
            parameter.copy_(_like(parameter, saved["parameters"][name]))
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    for i, own in saved["optimizer"]["state"].items():
        own.update({name: _like(ordered[i], x) for name, x in own.items()})
    optimizer.load_state_dict(saved["optimizer"])
    history[:] = saved["history"]
    return saved["random"][0 if group is None else group.rank()]


def restore_random(random: list[Tensor]) -> None:
    torch.set_rng_state(random[0])
    if torch.cuda.is_available() and len(random) > 1:
        torch.cuda.set_rng_state_all(random[1:])


def is_sharded(x: Tensor) -> bool:
    return hasattr(x, "full_tensor")


def _of_ranks(own: Any, group: Any) -> list[Any]:
    found = [own]
    if group is not None:
        found = [own] * group.size()
        dist.all_gather_object(found, own, group=group)
    return found


def _gathered(x: Any, keep: bool) -> Tensor | None:
    """The whole tensor on the CPU, where it is kept."""
    x = x.detach()
    x = x.full_tensor() if is_sharded(x) else x
    return x.cpu() if keep else None


def _like(parameter: Any, x: Tensor) -> Tensor:
    """A copy of a whole tensor, sharded as a parameter of its shape."""
    if not is_sharded(parameter) or x.shape != parameter.shape:
        return x.clone()
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x, parameter.device_mesh, parameter.placements)
