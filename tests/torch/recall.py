"""Associative recall: pairs of a name and a value, then the names again in another order; predict the values.

One layer suffices, because every token also carries the previous token. The window is half of the sequence, and all
scores are equal at first: to answer, the layer must learn to keep the values and drop the names.
"""
from typing import Any

import torch
from torch import Tensor, nn

from cupy_dma.torch import DynamicMaskAttention

NAMES, PAIRS = 16, 8


class Recall(nn.Module):
    def __init__(self, heads: int = 2, size: int = 16, window: int = 12):
        super().__init__()
        width = heads * size
        self.heads, self.size = heads, size
        self.now, self.before = nn.Embedding(2 * NAMES, width), nn.Embedding(2 * NAMES, width)
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * size)
        self.attend = DynamicMaskAttention(1, size, window, form="linear")
        self.out = nn.Linear(width, 2 * NAMES)

    def forward(self, tokens: Tensor) -> Tensor:
        now, before = self.now(tokens), self.before(tokens[:, :-1])
        x = now + nn.functional.pad(before, (0, 0, 1, 0))
        q = self.query(x).unflatten(2, (self.heads, self.size))
        k, v = self.key_value(x).unflatten(2, (2, 1, self.size)).unbind(2)
        return self.out(self.attend(q, k, v).flatten(2))


def sequences(count: int) -> tuple[Tensor, Tensor]:
    """Tokens ``(count, 3 * PAIRS)``, and the answers to the last ``PAIRS`` of them."""
    names = torch.stack([torch.randperm(NAMES)[:PAIRS] for _ in range(count)])
    values = torch.randint(NAMES, 2 * NAMES, (count, PAIRS))
    order = torch.stack([torch.randperm(PAIRS) for _ in range(count)])
    told = torch.stack((names, values), 2).flatten(1)
    return torch.cat((told, names.gather(1, order)), 1), values.gather(1, order)


def train(device: Any = "cpu", dtype: torch.dtype = torch.float32, steps: int = 500,
          compiler: str | None = None) -> tuple[float, int]:
    """Overfit 32 sequences; returns the best accuracy and its number of steps. 16-bit types use autocast."""
    torch.manual_seed(0)
    model = Recall().to(device)
    run: Any = torch.compile(model, fullgraph=True, backend=compiler) if compiler else model
    tokens, answers = (x.to(device) for x in sequences(32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    best = 0.0
    for step in range(1, steps + 1):
        with torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32):
            logits = run(tokens)[:, -PAIRS:].float()
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten()).backward()
        optimizer.step()
        best = max(best, (logits.argmax(-1) == answers).float().mean().item())
        if best == 1:
            return best, step
    return best, steps


def losses(run_of, dim, window, steps, lr, device="cpu", shape=(3, 18), autocast=False, **options):
    """Losses of ``steps`` training steps of four layers with two kv heads of ``dim`` channels; ``run_of(model)`` runs
    it."""
    torch.manual_seed(0)
    width = 4 * dim
    layers = torch.nn.ModuleList(torch.nn.ModuleDict({
        "qkv": torch.nn.Linear(width, 2 * width), "attend": DynamicMaskAttention(2, dim, window, **options),
        "out": torch.nn.Linear(width, width)}) for _ in range(4)).to(device)

    def model(x):
        for layer in layers:
            q, k, v = (y.unflatten(-1, (-1, dim)) for y in layer["qkv"](x).split((width, width // 2, width // 2), -1))
            x = x + layer["out"](layer["attend"](q, k, v).flatten(2))
        return x

    run, optimizer = run_of(model), torch.optim.SGD(layers.parameters(), lr=lr)
    x, y = torch.randn(2, *shape, width, device=device)
    for _ in range(steps):
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
            loss = (run(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()
