"""Jobs for the ranks of ``ranks.py`` in ``test_retrofit.py``: steps of a retrofit on rows of a batch."""
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import cupy_dma.transformers as dmt
from cupy_dma import retrofit
from tests.transformers import small_models as small

WORDS, DELAY, LENGTH, ROWS = 64, 4, 24, 4


def model_of(trainable: str, kind: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A model of this type with float32 gates, some of them closed, and its teacher (None if only gates are
    trained)."""
    model = small.model_of("llama", "eager", num_hidden_layers=2, vocab_size=WORDS)
    dmt.convert(model.to(kind), policy="gate", delay=DELAY, sinks=1, trainable=trainable)
    torch.manual_seed(3)
    for gate in retrofit.gates_of(model).values():
        nn.init.normal_(gate.proj.weight, std=0.01)
        gate.offset = 0.1
    return model, None if trainable == "gate" else copy.deepcopy(model).eval()


def batch_of(step: int = 0) -> dict[str, Tensor]:
    """``ROWS`` texts; the first begins with padding."""
    ids = torch.randint(3, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


@contextmanager
def without_noise() -> Iterator[None]:
    """Turn off the gates' noise, which depends on shapes."""
    drawn = torch.Tensor.uniform_
    torch.Tensor.uniform_ = lambda noise, *, generator: noise.fill_(0.5)
    try:
        yield
    finally:
        torch.Tensor.uniform_ = drawn


def sharded(objective: retrofit.Distillation, group: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in objective.student.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(objective, mesh=mesh)


def rows_of(group: Any) -> slice:
    """This rank's rows of a batch."""
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    return slice(rank * ROWS // world, (rank + 1) * ROWS // world)


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def step(group: Any, how: str, trainable: str,
         kind: torch.dtype = torch.float32) -> tuple[retrofit.Losses, dict[str, Tensor]]:
    """Losses and gradients of one step on this rank's rows."""
    model, teacher = model_of(trainable, kind)
    objective: Any = retrofit.Distillation(model, teacher, weight=2.0, process_group=group)
    if how == "ddp":
        objective = DistributedDataParallel(objective, process_group=group)
    elif how == "fsdp":
        objective = sharded(objective, group)
    for gate in retrofit.gates_of(model).values():
        gate.train()
    rows = rows_of(group)
    with without_noise():
        losses = objective(target=0.3, **{name: x[rows] for name, x in batch_of().items()})
        losses.loss.backward()
    found = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return retrofit.Losses(*(x.detach() for x in losses)), found


def shared(logs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: x for name, x in log.items() if name not in ("seconds", "tokens")} for log in logs]


def trained(group: Any, how: str, steps: int, **options: Any) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The logs of ``train``, without entries that differ between ranks, and the trained gates."""
    model, _ = model_of("gate")
    rows = rows_of(group)
    batches = ({name: x[rows] for name, x in batch_of(i).items()} for i in range(steps))
    wrap = (lambda objective: sharded(objective, group)) if how == "fsdp" else None
    with without_noise():
        logs = retrofit.train(model, batches, steps=steps, ratio=3, rate=1e-3, progress=False, process_group=group,
                              wrap=wrap, **options)
    gates = {name: whole(p).detach() for name, p in model.named_parameters() if ".retention_gate." in name}
    return shared(logs), gates


def with_noise(group: Any, path: str, how: str, trainable: str, count: int, steps: int,
               skipped: int = 0) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Run to step ``count`` of ``steps`` and write a checkpoint, or resume from it; the first ``skipped`` batches are
    None. Returns the logs, without entries that differ between ranks, and the model."""
    model, teacher = model_of(trainable)
    torch.manual_seed(10 + group.rank())
    batches = [{name: x[group.rank()::group.size()] for name, x in batch_of(i).items()} for i in range(count)]
    logs = retrofit.train(model, [{}] * skipped + batches[skipped:], steps=count, shrink=steps, ratio=3, rate=1e-3,
                          base_rate=1e-3, trainable=trainable, teacher=teacher, progress=False, process_group=group,
                          checkpoint=path, every=count, resume=True,
                          wrap=(lambda objective: sharded(objective, group)) if how == "fsdp" else None)
    return shared(logs), {name: whole(p).detach() for name, p in model.named_parameters()}


def checkpoint_of_one(group: Any, folder: str) -> None:
    """The errors for a sharded model without ``group``, and for a checkpoint that not all ranks find."""
    if folder:
        model, _ = model_of("gate")
        retrofit.train(model, [], steps=1, ratio=3, progress=False, process_group=group, resume=True,
                       checkpoint=Path(folder) / str(group.rank()))
    else:
        model, _ = model_of("gate")
        retrofit.train(model, [], steps=1, ratio=3, progress=False, checkpoint="never written",
                       wrap=lambda objective: sharded(objective, group))
