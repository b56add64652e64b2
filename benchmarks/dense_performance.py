"""Dense masks and biases, block and column structure, intervals given as dense masks, and varlen, in one run.

    python benchmarks/dense_performance.py                       everything, about 90 s on an H200
    python benchmarks/dense_performance.py --table                           print the README's table from the results
    python benchmarks/dense_performance.py --update-readme                   put it into README.md

Inputs: bfloat16, batch 1, 16/8 heads, D 128; query, key, value, dout and dense bias independent normal numbers, seeded
by the case. Timing, L2 policy, medians and peak memory: see measure.py.

random: a mask (1, H, N, N) of which half is visible and a bias (1, H, N, N), N = 8192. Ours: forward and backward with
the gradient of the bias, the mask packed anew in every call. Peers: flex, compiled FlexAttention that reads the same
mask in mask_mod and the same bias in score_mod, block mask given ("block mask": the time that takes, not included);
cudnn, efficient: scaled_dot_product_attention with a float mask that is added up beforehand and kv heads expanded.
blocks: one in eight tiles of 128 x 128 visible, against the same call with everything visible; columns: one key in 16,
the same for all queries, likewise. Masks shared by all heads (1, 1, N, N) and of each head (1, H, N, N), no bias.
interval: the top-w mask, w = 1024, as a dense boolean (1, Hkv, N, N), against the interval mask itself (lists built
anew) and one read of the boolean (the faster of a reduction and half of a copy).
varlen causal, varlen top-w: 64 sequences of 100 to 8000 tokens, against 64 equal ones of as many tokens, as a batch
(B = 64) and packed. Causal attention of unequal lengths has more pairs, so times are compared per visible pair.

Check: sampled rows and keys of every output and gradient, also the peers', against float64 under the rule "at most
twice (gradients: three times) the error of the plain same-precision computation plus one rounding", see dense_check.py.
If a check of this library fails the run exits with 1 and leaves the recorded results alone.
"""
from __future__ import annotations

import functools
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tree itself, installed or not

from benchmarks import common, render_dense
from benchmarks.common import Case

SEQUENCES, SHORTEST, LONGEST = 64, 100, 8000


def lengths(small: bool) -> list[int]:
    """Lengths of the sequences of a varlen case, a multiple of their number in all."""
    import numpy as np

    count, longest = (4, 150) if small else (SEQUENCES, LONGEST)
    drawn = np.random.default_rng(5).integers(SHORTEST, longest + 1, count)
    drawn[np.argmin(drawn)] += -int(drawn.sum()) % count
    return [int(n) for n in drawn]


def cases(which: str, quick: bool = False) -> list[Case]:
    small = which == "smoke"
    n, heads, kv_heads, size, w = (140, 4, 2, 16, 40) if small else (8192, 16, 8, 128, 1024)

    def case(name: str, length: int, window: int = 0) -> Case:
        return Case(name, heads, kv_heads, size, length, length, window)

    total = sum(lengths(small))
    found = [case("random", n), case("blocks", n), case("columns", n), case("interval", n, w),
             case("varlen causal", total), case("varlen top-w", total, w)]
    return found[:4] if quick else found


class Benchmark(common.Benchmark):
    """A case whose outputs are checked while they are measured."""

    def __init__(self, case: Case):
        super().__init__(case)
        self.checks: dict[str, Any] = {}
        self.dout = self.normal(*self.query.shape)

    def prepare(self) -> None:
        """What the calls are given."""

    def draw_mask(self, heads: int, make: Any) -> Any:
        """bool (1, heads, N, N): ``make(rows of one head)`` fills a head."""
        import torch

        n = self.case.key_length
        return torch.stack([make(n) for _ in range(heads)])[None]

    def uniform(self, *shape: int) -> Any:
        import torch

        return torch.rand(shape, device=self._device, generator=self._generator)

    def problem(self, mask: Any, bias: Any = None) -> Any:
        """The computation of a dense mask as the check takes it."""
        from benchmarks.dense_check import Problem

        return Problem(self.query[0], self.key[0], self.value[0], lambda i, j: mask[0][:, i][:, :, j],
                       None if bias is None else bias[0])

    def sampled(self) -> list[int]:
        from benchmarks.dense_check import sample

        return sample(self.case.query_length, self.case.seed)

    def attend(self, label: str, problem: Any, mask: Any, bias: Any = None, setup: Any = None) -> tuple[Any, Any]:
        """Measure and check a forward pass; ``(out, lse)``."""
        import cupy_dma as dma
        from benchmarks.dense_check import check_forward

        call = functools.partial(dma.attention, self.query, self.key, self.value, mask=mask, bias=bias)
        self.record("cupy_dma", f"forward {label}".strip(), call, setup)
        out, lse = call(return_lse=True)
        self.checks[f"forward {label}".strip()] = check_forward(problem, out[0], lse[0], self.sampled())
        return out, lse

    def differentiate(self, label: str, problem: Any, out: Any, lse: Any, mask: Any, bias: Any = None,
                      setup: Any = None) -> None:
        """Measure and check a backward pass."""
        from benchmarks.dense_check import Given, check_backward
        from cupy_dma.backward import attention_backward

        call = functools.partial(attention_backward, self.dout, self.query, self.key, self.value, out, lse, mask=mask,
                                 bias=bias)
        stage = f"backward {label}".strip()
        self.record("cupy_dma", stage, call, setup)
        found = call()
        dbias = None if found.bias is None else found.bias[0] if found.bias.ndim == 4 else found.bias[0][:, None]
        given = Given(problem, self.dout[0], out[0], lse[0])
        self.checks[stage] = check_backward(given, (*(x[0] for x in found[:3]), dbias), self.sampled(), self.sampled())

    def check(self) -> dict[str, Any]:
        return {"stages": self.checks, "worst": max(found["worst"] for found in self.checks.values()),
                "ok": all(found["ok"] for found in self.checks.values())}

    def peers(self, deadline: float, flex: bool) -> None:
        """None, except where a subclass has some."""


class Random(Benchmark):
    def prepare(self) -> None:
        case = self.case
        self.mask = self.draw_mask(case.heads, lambda n: self.uniform(n, n) < 0.5)
        self.bias = self.normal(1, case.heads, case.query_length, case.key_length)
        self.checked = self.problem(self.mask, self.bias)

    def ours(self) -> None:
        out, lse = self.attend("", self.checked, self.mask, self.bias)
        self.differentiate("", self.checked, out, lse, self.mask, self.bias)
        self.out, self.lse = out, lse

    def checked_peer(self, who: str, stage: str, make: Any, deadline: float) -> None:
        """A peer whose result is checked too; the check goes to its note and never fails the run."""
        from benchmarks.dense_check import Given, check_backward, check_forward

        made = make()
        call, note = made if isinstance(made, tuple) else (made, "")
        found = call()
        if stage == "forward":
            result = check_forward(self.checked, found[0].transpose(0, 1), None, self.sampled())
        else:
            dq, dk, dv, *rest = (x[0] for x in found)
            dq, dk, dv = (x.transpose(0, 1) for x in (dq, dk, dv))
            if dk.shape[1] > self.case.kv_heads:  # expanded: what the caller would still have to add up
                dk, dv = (x.float().unflatten(1, (self.case.kv_heads, -1)).sum(2).to(x.dtype) for x in (dk, dv))
            result = check_backward(Given(self.checked, self.dout[0], self.out[0], self.lse[0]),
                                    (dq, dk, dv, rest[0] if rest else None), self.sampled(), self.sampled())
        del found
        word = "right" if result["ok"] else f"NOT WITHIN THE RULE ({result['worst']:.2f} of what is allowed)"
        self.peer(who, lambda: (call, "; ".join(filter(None, (note, word)))), deadline, stage)

    def peers(self, deadline: float, flex: bool) -> None:
        from torch.nn.attention import SDPBackend

        from benchmarks import dense_peers, measure

        inputs, compiled = (self.query, self.key, self.value), measure.on_gpu()

        def one(who: str, stage: str, make: Any) -> None:
            if time.monotonic() > deadline:
                self.failed(who, stage, "no time left")
                return
            try:
                self.checked_peer(who, stage, make, deadline)
            except Exception as error:  # a peer that cannot run is a result too
                words = f"{type(error).__name__}: {error}".splitlines()[0][:160]
                self.failed(who, stage, words)

        blocks = dense_peers.block_mask(self.mask, compiled)
        self.peer("flex", lambda: functools.partial(dense_peers.block_mask, self.mask, compiled), deadline,
                  "block mask")
        one("flex", "forward", lambda: dense_peers.flex(*inputs, self.mask, self.bias, blocks, compiled))
        if compiled:
            one("flex", "backward", lambda: dense_peers.flex_backward(*inputs, self.dout, self.mask, self.bias, blocks))
        added = self.bias.masked_fill(~self.mask, float("-inf"))
        backends: dict[str, Any] = {"cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
        if not compiled:
            backends = {"sdpa": None}
        for who, backend in backends.items():
            one(who, "forward", functools.partial(dense_peers.sdpa, backend, *inputs, added))
            one(who, "backward", functools.partial(dense_peers.sdpa_backward, backend, *inputs, self.dout, added))

    def failed(self, who: str, stage: str, words: str) -> None:
        from benchmarks import measure

        measure.synchronize()
        measure.free_memory()
        self.rows.append({"who": who, "stage": stage, "ms": None, "timing": "", "note": words})


class Structured(Benchmark):
    """Masks with holes, against the same call with everything visible."""

    def holes(self, n: int) -> Any:
        if self.case.set == "columns":
            return (self.uniform(n).argsort() % 16 == 0).expand(n, n).clone()
        side, blocks = 128, -(-n // 128)
        chosen = self.uniform(blocks, blocks).argsort(-1) % 8 == 0  # as many in every row of tiles
        return chosen.repeat_interleave(side, 0).repeat_interleave(side, 1)[:n, :n].clone()

    def ours(self) -> None:
        import torch

        for shape, heads in (("shared", 1), ("per head", self.case.heads)):
            for what in ("full", "sparse"):
                mask = self.draw_mask(heads, self.holes)
                if what == "full":
                    mask = torch.ones_like(mask)
                problem = self.problem(mask)
                out, lse = self.attend(f"{what}, {shape}", problem, mask)
                self.differentiate(f"{what}, {shape}", problem, out, lse, mask)
                del mask, problem, out, lse


class Interval(Benchmark):
    def prepare(self) -> None:
        common.Benchmark.prepare(self)
        self.dense = self.mask.to_dense(self.case.query_length).contiguous()

    def read(self) -> None:
        """The time of one read of the dense mask."""
        import torch

        from benchmarks import measure

        words = self.dense.view(torch.uint8).reshape(-1)
        words = words[:len(words) // 4 * 4].view(torch.float32)
        copy = torch.empty_like(words)
        reduction, how = measure.gpu_ms(lambda: words.sum())
        copied, _ = measure.gpu_ms(lambda: copy.copy_(words))
        self.rows.append({"who": "torch", "stage": "read", "ms": min(reduction, copied / 2), "timing": how,
                             "note": f"reduction {reduction:.4f} ms, half of a copy {copied / 2:.4f} ms"})

    def ours(self) -> None:
        problem = self.problem(self.dense, self.scores[:, :, None])
        for label, mask in (("dense", self.dense), ("interval", self.mask)):
            setup = self.forget_lists if label == "interval" else None
            out, lse = self.attend(label, problem, mask, self.scores, setup)
            self.differentiate(label, problem, out, lse, mask, self.scores, setup)
        self.read()


class Varlen(Benchmark):
    def prepare(self) -> None:
        import torch

        case = self.case
        self.lengths = next(drawn for drawn in map(lengths, (False, True)) if sum(drawn) == case.key_length)
        ends = torch.tensor([0, *self.lengths]).cumsum(0)
        self.ends = ends.to(self._device, torch.int32)
        equal = case.key_length // len(self.lengths)
        self.equal_ends = torch.arange(0, case.key_length + 1, equal, dtype=torch.int32, device=self._device)
        self.scores = self.score() if case.window else None

    def pairs(self, lengths: list[int]) -> int:
        w = self.case.window or max(lengths)
        return self.case.heads * sum(n * min(w, n) - min(w, n) * (min(w, n) - 1) // 2 for n in lengths)

    def keep_pairs(self, lengths: list[int]) -> None:
        self.rows[-1]["pairs"] = self.pairs(lengths)

    def ours(self) -> None:
        import cupy_dma as dma

        if not hasattr(dma, "varlen_attention"):
            for direction in ("forward", "backward"):
                self.rows.append({"who": "cupy_dma", "stage": f"{direction} unequal", "ms": None, "timing": "",
                                     "note": "this version has no varlen_attention"})
            self.checks["varlen"] = {"worst": 0.0, "ok": True}
            return
        count = len(self.lengths)
        equal = [self.case.key_length // count] * count
        self.packed("unequal", self.ends, self.lengths)
        self.packed("equal, packed", self.equal_ends, equal)
        self.batch(equal)

    def packed(self, label: str, ends: Any, lengths: list[int]) -> None:
        import cupy_dma as dma
        from benchmarks.dense_check import Given, Problem
        from cupy_dma.backward import varlen_attention_backward

        q, k, v, do = (x[0] for x in (self.query, self.key, self.value, self.dout))
        options: dict[str, Any] = {"causal": True}
        mask = None
        if self.scores is not None:
            mask = dma.IntervalMask.top_w(self.scores, window=self.case.window, documents=ends)
            options = {"mask": mask, "bias": self.scores[0]}

        def forget() -> None:
            if mask is not None:
                mask._cache.clear()

        forward = functools.partial(dma.varlen_attention, q, k, v, ends, ends, **options)
        self.record("cupy_dma", f"forward {label}", forward, forget)
        self.keep_pairs(lengths)
        out, lse = forward(return_lse=True)
        backward = functools.partial(varlen_attention_backward, do, q, k, v, out, lse, ends, ends, **options)
        self.record("cupy_dma", f"backward {label}", backward, forget)
        self.keep_pairs(lengths)
        found = backward()

        bounds = ends.tolist()

        def span(index: int) -> tuple[int, int]:
            at = next(n for n in range(1, len(bounds)) if index < bounds[n])
            return bounds[at - 1], bounds[at]

        def visible(i: Any, j: Any) -> Any:
            if mask is None:
                return (j <= i[:, None])[None]
            start, stop = (run.expand(mask.shape)[0][:, None, j] for run in (mask.start, mask.stop))
            return (start <= i[:, None]) & (i[:, None] < stop)

        problem = Problem(q, k, v, visible, None if self.scores is None else self.scores[0][:, None], span, span)
        dbias = None if found.bias is None else found.bias.reshape(-1, 1, len(k))
        self.confirm(label, Given(problem, do, out, lse), (*found[:3], dbias))
        self.problem_of_all = problem

    def confirm(self, label: str, given: Any, gradients: Any) -> None:
        from benchmarks.dense_check import check_backward, check_forward

        self.checks[f"forward {label}"] = check_forward(given.problem, given.out, given.lse, self.sampled())
        self.checks[f"backward {label}"] = check_backward(given, gradients, self.sampled(), self.sampled())

    def batch(self, lengths: list[int]) -> None:
        """The equal sequences as a batch: the computation of the packed ones before."""
        import cupy_dma as dma
        from benchmarks.dense_check import Given
        from cupy_dma.backward import attention_backward

        count, n = len(lengths), lengths[0]
        q, k, v, do = (x.reshape(count, n, *x.shape[2:]) for x in (self.query, self.key, self.value, self.dout))
        options: dict[str, Any] = {"causal": True}
        mask = None
        if self.scores is not None:
            scores = self.scores[0].reshape(-1, count, n).transpose(0, 1).contiguous()
            mask = dma.IntervalMask.top_w(scores, window=self.case.window)
            options = {"mask": mask, "bias": scores}

        def forget() -> None:
            if mask is not None:
                mask._cache.clear()

        forward = functools.partial(dma.attention, q, k, v, **options)
        self.record("cupy_dma", "forward equal, batch", forward, forget)
        self.keep_pairs(lengths)
        out, lse = forward(return_lse=True)
        backward = functools.partial(attention_backward, do, q, k, v, out, lse, **options)
        self.record("cupy_dma", "backward equal, batch", backward, forget)
        self.keep_pairs(lengths)
        dq, dk, dv, dbias = backward()
        if dbias is not None:
            dbias = dbias.transpose(0, 1).flatten(1)[:, None]
        given = Given(self.problem_of_all, self.dout[0], out.flatten(0, 1), lse.transpose(0, 1).flatten(1))
        self.confirm("equal, batch", given, (*(x.flatten(0, 1) for x in (dq, dk, dv)), dbias))


CLASSES = {"random": Random, "blocks": Structured, "columns": Structured, "interval": Interval,
           "varlen causal": Varlen, "varlen top-w": Varlen}


def benchmark(case: Case) -> Benchmark:
    return CLASSES[case.set](case)


SUITE = common.Suite(__doc__ or "", cases, benchmark, render_dense.DENSE, seconds=80)


def main(arguments: list[str] | None = None) -> int:
    return common.main(SUITE, arguments)


if __name__ == "__main__":
    sys.exit(main())
