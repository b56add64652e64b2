"""Jobs for the ranks of ``ranks.py`` in ``test_layers.py``: a small model over shards of its sequences."""
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from cupy_dma.distributed import document_ids, shard_mean, shard_sequence
from cupy_dma.torch import DynamicMaskAttention, DynamicMaskSelfAttention

WIDTH, TOKENS, BATCH, N = 16, 11, 2, 26


class Block(nn.Module):
    def __init__(self, **options: Any):
        super().__init__()
        options = {"window": 5, "dtype": torch.float64, **options}
        self.attention = DynamicMaskSelfAttention(WIDTH, 4, 2, **options)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).double()
        core = self.attention.attention
        nn.init.normal_(core.A if core.width is None else core.score_proj.weight)

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        x = x + self.attention(x, **given)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, **options: Any):
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH).double(), nn.Linear(WIDTH, TOKENS).double()
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))

    def forward(self, ids: Tensor, **given: Any) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, **given)
        return self.head(x)


def made(process_group: Any = None, **options: Any) -> tuple[Model, Tensor]:
    """The same model and batch ``(BATCH, N + 1)`` everywhere."""
    torch.manual_seed(1)
    model, ids = Model(**options), torch.randint(TOKENS, (BATCH, N + 1))
    for block in model.blocks:
        block.attention.process_group = process_group
    return model, ids


def losses(model: nn.Module, ids: Tensor, targets: Tensor, **given: Any) -> tuple[Tensor, int]:
    """Sum and number of the losses; targets of -100 do not count."""
    logits = model(ids, **given)
    total = nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, int((targets != -100).sum())


def named_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): x.grad for name, x in model.named_parameters() if x.grad is not None}


def inputs(how: str, ids: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Ids, targets and the layer's arguments for a whole batch, which is plain, padded or made of documents."""
    ids, targets, given = ids[:, :-1], ids[:, 1:], {}
    if how == "padding":
        real = torch.ones(BATCH, N, dtype=torch.bool)
        real[0, :9] = real[1, 11:20] = False
        targets, given = targets.masked_fill(~real, -100), {"padding": real}
    if how == "documents":
        given = {"documents": document_ids([0, 3, 17, 18, N], N)}
    return ids, targets, given


def trained(group: Any, how: str, options: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of all tokens and the mean over ranks of the gradients."""
    model, batch = made(group, **options)
    ids, targets, given = inputs(how, batch)
    shards = {name: shard_sequence(x, group) for name, x in given.items()}
    total, count = losses(model, shard_sequence(ids, group), shard_sequence(targets, group), **shards)
    loss = shard_mean(total, count, group)
    loss.backward()
    found = named_gradients(model)
    for x in found.values():
        dist.all_reduce(x, group=group)
        x /= dist.get_world_size(group)
    return loss.detach(), found


def on_a_mesh(group: Any, wrapper: str) -> dict[str, Tensor]:
    """Gradients of a batch on a 2 x 2 mesh: one axis splits its rows, the other its sequences."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    model, batch = made(mesh["sequence"])
    if wrapper == "ddp":
        wrapped: nn.Module = DistributedDataParallel(model, process_group=group)
    else:
        from torch.distributed.fsdp import fully_shard

        every = mesh["data", "sequence"]._flatten("every")
        for block in model.blocks:
            fully_shard(block, mesh=every)
        wrapped = fully_shard(model, mesh=every)
    row = batch[mesh["data"].get_local_rank()][None]
    total, count = losses(wrapped, *(shard_sequence(x, mesh["sequence"]) for x in (row[:, :-1], row[:, 1:])))
    shard_mean(total, count, mesh["sequence"]).backward()
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in named_gradients(wrapped).items()}


def compiled(group: Any) -> tuple[Tensor, dict[str, Tensor], dict[str, int]]:
    """Like ``trained``, through torch.compile; also returns the reasons for graph breaks."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, batch = made(group)
    ids, targets, _ = inputs("plain", batch)
    forward = torch.compile(model, backend="aot_eager")
    total, count = losses(forward, shard_sequence(ids, group), shard_sequence(targets, group))
    loss = shard_mean(total, count, group)
    loss.backward()
    return loss.detach(), named_gradients(model), dict(torch._dynamo.utils.counters["graph_break"])


def generated(group: Any, how: str, steps: int) -> list[Tensor]:
    """The layer's outputs for a prompt in shards, which the test joins, and for further tokens from its cache."""
    layer, x, more, given = prompt(how, group)
    cache = layer.make_cache(BATCH)
    shards = {name: shard_sequence(y, group) for name, y in given.items()}
    with torch.no_grad():
        return [layer.prefill(shard_sequence(x, group), cache, **shards),
                *[layer(more[:, i:i + 1], cache=cache) for i in range(steps)]]


def prompt(how: str, group: Any = None) -> tuple[DynamicMaskSelfAttention, Tensor, Tensor, dict[str, Any]]:
    torch.manual_seed(2)
    window, delay = (5, 0) if how == "padding" else ((6, 3), 7)
    layer = DynamicMaskSelfAttention(WIDTH, 4, 2, window, sinks=1, recent=3, bias_delay=delay, dtype=torch.float64,
                                     slope=(0.3, -0.1) if how == "slope" else 0.0,
                                     scores="input" if how == "input" else "value", process_group=group)
    nn.init.normal_(layer.attention.score_proj.weight if how == "input" else layer.attention.A)
    _, _, given = inputs(how, torch.zeros(BATCH, N + 1, dtype=torch.int64))
    return layer, *torch.randn(2, BATCH, N, WIDTH, dtype=torch.float64), given


def refused(group: Any, what: str) -> None:
    x = torch.randn(1, 6, WIDTH, dtype=torch.float64)
    layer = DynamicMaskSelfAttention(WIDTH, 4, 2, 5, dtype=torch.float64, process_group=group)
    if what == "cu_seqlens":
        layer(x[0], cu_seqlens=[0, 6])
    core = DynamicMaskAttention(2, 4, 5, keys="global", process_group=group)
    core(*torch.randn(3, 1, 6, 2, 4))


def example(group: Any, arguments: list[str]) -> tuple[list[float], list[Any], bool]:
    """``examples/train.py`` on the ranks of a group, without its files."""
    from examples import train

    args, text, _ = train.parsed(arguments)
    args.output = None
    run = train.Run(args, torch.tensor(list(text)), group)
    run.train()
    return run.losses, run.validation, run.first
