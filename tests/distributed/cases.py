"""Problems for several ranks: one per case, the same on every rank and in one process."""
import zlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cupy_dma.distributed.survivors import Keep
from tests.oracle import reference
from tests.oracle.layer_cases import kept, numbers


@dataclass(frozen=True)
class Case:
    name: str
    lengths: tuple[int, ...] = (16, 16)
    dtype: str = "float64"
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 6
    window: int | tuple[int, ...] = 7
    sinks: int = 0
    recent: int = 0
    scores: str = "normal"  # normal ties zero nan infinite rising falling none
    padding: str = ""  # "", shared, some, shard (all of the second shard's)
    documents: str = ""  # "", short, long, edges (begin with shards), shard (one for each shard, ids that come again)
    softcap: float = 0.0
    scale: float | None = None
    bias_delay: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def world(self) -> int:
        return len(self.lengths)

    @property
    def n(self) -> int:
        return sum(self.lengths)

    @property
    def keep(self) -> Keep:
        return Keep(self.window, self.sinks, self.recent)

    def rows_ahead(self, rank: int) -> int:
        """The rows before a rank's keys and values that need room."""
        rows = self.keep.rows
        return rows + min(self.bias_delay, rows + self.lengths[rank])

    @property
    def bounds(self) -> list[int]:
        return [0, *np.cumsum(self.lengths).tolist()]

    @property
    def options(self) -> dict[str, Any]:
        return {"window": self.window, "sinks": self.sinks, "recent": self.recent, "softcap": self.softcap,
                "scale": self.scale, "bias_delay": self.bias_delay}

    @cached_property
    def _problem(self) -> dict[str, Tensor | None]:
        draw = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float64).to(getattr(torch, self.dtype))

        made: dict[str, Tensor | None] = {
            "query": normal(self.batch, self.n, self.heads, self.head_dim),
            "key": normal(self.batch, self.n, self.kv_heads, self.head_dim),
            "value": normal(self.batch, self.n, self.kv_heads, self.head_dim),
            "dout": normal(self.batch, self.n, self.heads, self.head_dim)}
        kind = torch.float64 if self.dtype == "float64" else torch.float32
        scores = torch.randn((self.batch, self.kv_heads, self.n), generator=draw, dtype=kind)
        at = torch.arange(self.n, dtype=kind)
        made["scores"] = {
            "normal": scores, "ties": (scores * 1.5).round(), "zero": torch.where(scores > 0, 0.0, -0.0).to(kind),
            "nan": torch.where(scores > 1.5, torch.nan, scores),
            "infinite": torch.where(scores < 0.7, -torch.inf, scores),
            "rising": scores * 0.01 + at / 10, "falling": scores * 0.01 - at / 10, "none": None}[self.scores]
        return {**made, **self._candidates(draw)}

    def _candidates(self, draw: torch.Generator) -> dict[str, Tensor | None]:
        real, ids, at = None, None, torch.arange(self.n)
        if self.padding:
            real = torch.rand((1 if self.padding == "shared" else self.batch, self.n), generator=draw) < 0.7
            if self.padding == "shard":
                real[:, self.bounds[1]:self.bounds[2]] = False
        if self.documents in ("short", "long"):
            step = torch.rand((self.batch, self.n), generator=draw) < (0.25 if self.documents == "short" else 0.04)
            ids = step.long().cumsum(1) % 2
        elif self.documents == "edges":
            ids = torch.bucketize(at, torch.tensor(self.bounds[1:-1]), right=True)[None].int()
        elif self.documents == "shard":
            ids = (torch.bucketize(at, torch.tensor(self.bounds[1:-1]), right=True) % 2)[None].int()
        return {"padding": real, "documents": ids}

    def whole(self, name: str) -> Tensor | None:
        return self._problem[name]

    def shard(self, name: str, rank: int) -> Tensor | None:
        x = self._problem[name]
        if x is None:
            return None
        axis = x.ndim - 1 if name in ("scores", "padding", "documents") else 1
        return x.narrow(axis, self.bounds[rank], self.lengths[rank])

    # ---- the oracle -------------------------------------------------------------------------------------------------

    def seen(self) -> np.ndarray:
        """bool ``(B, Hkv, N, N)``: by the definition."""
        scores, real, ids = (self.whole(name) for name in ("scores", "padding", "documents"))
        shape = self.batch, self.n
        numeric = np.zeros((self.batch, self.kv_heads, self.n)) if scores is None else numbers(scores)
        every = np.ones(shape, bool) if real is None else np.broadcast_to(real.numpy(), shape)
        document = np.zeros(shape, int) if ids is None else np.broadcast_to(
            reference.document_numbers(ids.numpy(), self.n), shape)
        ranked = np.where(np.isnan(numeric), np.inf, numeric)  # NaN above all; no other score is +inf
        return kept(ranked, self.keep, every, document)

    def oracle(self) -> tuple[list[np.ndarray], dict[str, Any]]:
        scores = self.whole("scores")
        arrays = [numbers(self.whole(name)) for name in ("dout", "query", "key", "value")]
        return arrays, {"dense_mask": self.seen(), "bias": None if scores is None else numbers(scores),
                        "scale": self.scale, "softcap": self.softcap, "bias_delay": self.bias_delay}


def _grid() -> list[Case]:
    cases = [Case(f"{world}-ranks", lengths=(16, 9, 12, 11)[:world]) for world in (1, 2, 3, 4)]
    cases += [Case(f"lengths-{'-'.join(map(str, lengths))}", lengths=lengths) for lengths in (
        (30, 1), (1, 30), (0, 20), (20, 0), (5, 0, 20), (3, 2, 40), (2, 2, 2, 2), (0, 0, 9, 9), (10, 1, 1, 20))]
    three = Case("", lengths=(14, 5, 20))
    cases += [replace(three, name=f"scores-{kind}", scores=kind)
              for kind in ("ties", "zero", "nan", "infinite", "rising", "falling", "none")]
    cases += [replace(three, name=f"float32-scores-{kind}", dtype="float32", scores=kind, padding=padding)
              for kind, padding in (("ties", ""), ("zero", "some"), ("nan", ""), ("infinite", "some"))]
    cases += [replace(three, name=f"window-{w}", window=w) for w in (1, 5, 14, 39, 60)]
    besides = [("", {}), ("-besides", {"sinks": 3, "recent": 4}), ("-sinks", {"sinks": 20}),
               ("-recent", {"recent": 18})]
    cases += [replace(three, name=f"kept{name}", **options) for name, options in besides[1:]]
    cases += [Case("kept-few-of-many-sinks", lengths=(6, 6, 6, 6), window=1, sinks=4, scores="falling")]
    cases += [replace(three, name=f"padding-{kind}{name}", padding=kind, **options)
              for kind in ("shared", "some", "shard") for name, options in besides]
    cases += [replace(three, name=f"documents-{kind}{name}", documents=kind, **options)
              for kind in ("short", "long", "edges", "shard") for name, options in besides]
    four = Case("", lengths=(9, 4, 0, 23), scores="ties")
    cases += [replace(four, name=f"both-{kind}{name}", padding="some", documents=kind, **options)
              for kind in ("short", "long", "shard") for name, options in besides]
    cases += [replace(three, name="none-documents", scores="none", documents="long"),
              replace(three, name="none-padding", scores="none", padding="some", window=4)]
    cases += [replace(three, name="softcap", softcap=2.0), replace(three, name="scale", scale=0.3),
              replace(three, name="group-1", heads=2), replace(three, name="one-head", heads=1, kv_heads=1, batch=1)]
    cases += [Case(f"{dtype}-D{size}-{world}", lengths=(20, 12, 16, 16)[:world], dtype=dtype, head_dim=size, recent=2)
              for dtype, size, world in (("bfloat16", 32, 4), ("bfloat16", 5, 3), ("float16", 16, 2), ("float32", 7, 3),
                                         ("bfloat16", 64, 2), ("float16", 3, 4))]
    # Delays that end within a shard, in an earlier one, after all; longer than a shard and its rows.
    cases += [replace(three, name=f"delay-{delay}-{name}", bias_delay=delay, **options)
              for delay in (1, 4, 13, 25, 39, 2**30) for name, options in (
                  ("usual", {}), ("besides", {"sinks": 2, "recent": 3, "padding": "some", "scores": "infinite"}))]
    cases += [replace(three, name="delay-documents", bias_delay=6, documents="long", padding="some"),
              replace(four, name="delay-short-shards", bias_delay=10),
              Case("delay-shards-of-one", lengths=(20, 1, 1, 8), bias_delay=9, dtype="float32")]
    cases += [replace(three, name="windows", window=(3, 11)),
              replace(four, name="windows-besides", window=(9, 2), sinks=2, recent=3, padding="some"),
              replace(three, name="windows-delay", window=(12, 4), bias_delay=8)]
    return cases


CASES = _grid()
