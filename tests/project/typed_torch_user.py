"""A user's file with torch, for ``mypy --strict``: functions and layers take tensors and parameters. It runs, too."""
import torch
from torch import Tensor, nn

import cupy_dma as dma
from cupy_dma.torch import DynamicMaskAttention, DynamicMaskSelfAttention


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = DynamicMaskSelfAttention(width, 2, window=[8, 4], dtype=torch.float32, device="cpu")
        self.core = DynamicMaskAttention(4, 8, window=8)
        self.A = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = x.reshape(1, -1, 4, 8)
        scores: Tensor = dma.key_scores(heads, self.core.dt_proj.weight, self.A)
        mask = dma.IntervalMask.top_w(scores, [8, 4, 8, 4]) | dma.IntervalMask.sinks(x.shape[1], 1, like=x)
        real = torch.ones(1, 1, 1, x.shape[1]).bool()
        out: Tensor = dma.attention(heads, heads, heads, mask=(mask, real), bias=scores)
        lengths = torch.tensor([0, 5, x.shape[1]], dtype=torch.int32)
        packed: Tensor = dma.varlen_attention(heads[0], heads[0], heads[0], lengths, [0, 5, x.shape[1]], causal=True)
        given: dma.Array = self.A
        print(tuple(out.shape), tuple(packed.shape), type(given).__name__)
        result: Tensor = x + self.inner(x)
        return result


if __name__ == "__main__":
    print(tuple(Block(32)(torch.ones(1, 32, 32)).shape))
