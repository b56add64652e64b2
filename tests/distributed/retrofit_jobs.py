"""What the ranks of ``ranks.py`` do in ``test_retrofit.py``: steps of a retrofit on rows of a batch."""
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import cupy_dma.transformers as dmt
from cupy_dma import retrofit
from tests.transformers import small_models as small

WORDS, DELAY, LENGTH, ROWS = 64, 4, 24, 4


def model_of(trainable: str, kind: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A model of this type with float32 gates some of which are closed, and its teacher, None where only gates are
    trained."""
    model = small.model_of("llama", "eager", num_hidden_layers=2, vocab_size=WORDS)
    dmt.convert(model.to(kind), policy="gate", delay=DELAY, sinks=1, trainable=trainable)
    torch.manual_seed(3)
    for gate in retrofit.gates_of(model).values():
        nn.init.normal_(gate.proj.weight, std=0.01)
        gate.offset = 0.1
    return model, None if trainable == "gate" else copy.deepcopy(model).eval()


def batch_of(step: int = 0) -> dict[str, Tensor]:
    """``ROWS`` texts of which the first begins with padding."""
    ids = torch.randint(3, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


@contextmanager
def without_noise() -> Iterator[None]:
    """Gates without noise, which would be drawn otherwise for other shapes."""
    drawn = torch.rand
    torch.rand = lambda shape, *, generator, **options: torch.full(shape, 0.5, **options)
    try:
        yield
    finally:
        torch.rand = drawn


def layers_of(model: Any) -> list[Any]:
    return list(model.model.layers)


def sharded(objective: retrofit.Distillation, world: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    for layer in layers_of(objective.student):
        fully_shard(layer, mesh=mesh)
    return fully_shard(objective, mesh=mesh)


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def step(group: Any, how: str, trainable: str,
         kind: torch.dtype = torch.float32) -> tuple[retrofit.Losses, dict[str, Tensor]]:
    """Losses and gradients of one step, of this rank's rows in a group."""
    model, teacher = model_of(trainable, kind)
    objective: Any = retrofit.Distillation(model, teacher, weight=2.0, process_group=group)
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    if how == "ddp":
        objective = DistributedDataParallel(objective, process_group=group)
    elif how == "fsdp":
        objective = sharded(objective, world)
    for gate in retrofit.gates_of(model).values():
        gate.train()
    rows = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    with without_noise():
        losses = objective(target=0.3, **{name: x[rows] for name, x in batch_of().items()})
        losses.loss.backward()
    found = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return retrofit.Losses(*(x.detach() for x in losses)), found


def trained(group: Any, how: str, steps: int, **options: Any) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The logs of ``train`` without their times, and the gates after it."""
    model, _ = model_of("gate")
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    rows = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    batches = ({name: x[rows] for name, x in batch_of(i).items()} for i in range(steps))
    wrap = (lambda objective: sharded(objective, world)) if how == "fsdp" else None
    with without_noise():
        logs = retrofit.train(model, batches, steps=steps, ratio=3, rate=1e-3, progress=False, process_group=group,
                              wrap=wrap, **options)
    gates = {name: whole(p).detach() for name, p in model.named_parameters() if ".retention_gate." in name}
    return [{name: x for name, x in log.items() if name not in ("seconds", "tokens")} for log in logs], gates


def resumed(group: Any, folder: str, steps: int) -> list[Any]:
    """With noise: a run, one that stops in the middle, and the rest of it."""
    results = []
    for part, count in (("whole", steps), ("half", steps // 2), ("half", steps)):
        model, _ = model_of("gate")
        torch.manual_seed(10 + group.rank())
        batches = ({name: x[group.rank()::group.size()] for name, x in batch_of(i).items()} for i in range(count))
        logs = retrofit.train(model, batches, steps=count, shrink=steps, ratio=3, rate=1e-3, progress=False,
                              process_group=group, checkpoint=Path(folder) / part, every=count, resume=True)
        results.append([[log["loss"] for log in logs], *(p.detach() for g in retrofit.gates_of(model).values()
                                                         for p in g.parameters())])
    return results


def sharded_checkpoint(group: Any, folder: str) -> None:
    trained(group, "fsdp", 1, checkpoint=Path(folder) / "state")
