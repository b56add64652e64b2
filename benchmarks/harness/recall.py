"""Multi-query associative recall: pairs of a key and a value among fillers, then the keys again; name their values.

    f f k1 v1 f k2 v2 f ...   |   f k2 f f k1 f ...            the answers at the second k2 and k1: v2, v1

As in the zoology papers (Arora et al. 2023, arXiv:2312.04927) and the original's benchmark, with three changes: pairs
stand anywhere in the first half instead of at its start, so a small window cannot keep them by position alone; every
key is asked for once, anywhere in the second half; fillers are random tokens of a third kind, so they never repeat a
key. The answer is not shown after its question.
"""
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    tokens: Tensor  # (M, B, N)
    asked: Tensor  # (M, B, pairs): positions of the questions
    answers: Tensor  # (M, B, pairs)
    told: Tensor  # (M, B, pairs): positions of the values that answer them


@dataclass(frozen=True)
class Recall:
    length: int
    pairs: int
    names: int  # tokens of each of the three kinds: keys, values, fillers

    def __post_init__(self) -> None:
        if self.length % 4 or self.pairs > self.length // 4:
            raise ValueError(f"length must be a multiple of 4 and at least 4 pairs long, got length={self.length}, "
                             f"pairs={self.pairs}")

    @property
    def vocabulary(self) -> int:
        return 3 * self.names

    def batch(self, count: int, generators: list[torch.Generator]) -> Batch:
        """``count`` sequences from each generator."""
        drawn = [self._sequences(count, generator) for generator in generators]
        return Batch(*(torch.stack(parts) for parts in zip(*drawn)))

    def _sequences(self, count: int, generator: torch.Generator) -> Batch:
        device, half = generator.device, self.length // 2

        def some(below: int, number: int) -> Tensor:
            """``number`` distinct integers below ``below`` for each sequence, in random order."""
            return torch.rand(count, below, device=device, generator=generator).argsort(1)[:, :number]

        def tokens(kind: int, number: int) -> Tensor:
            return torch.randint(kind * self.names, (kind + 1) * self.names, (count, number), device=device,
                                 generator=generator)

        keys, values = some(self.names, self.pairs), tokens(1, self.pairs)
        place = 2 * some(half // 2, self.pairs)
        asked = half + some(half, self.pairs)
        text = tokens(2, self.length)
        text.scatter_(1, place, keys).scatter_(1, place + 1, values).scatter_(1, asked, keys)
        return Batch(text, asked, values, place + 1)
