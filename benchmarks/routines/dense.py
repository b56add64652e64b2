"""Dense masks and biases, block and column structure, intervals as dense masks, varlen, and no mask, in one run.

Inputs: bfloat16, batch 1, 16/8 heads, D 128; query, key, value, dout and biases are independent normal numbers, seeded
by the case.

random: a half-visible mask (1, H, N, N) and a bias (1, H, N, N), N = 8192. Ours: forward, and backward with the
gradient of the bias; every call packs the mask again. Peers: flex, compiled FlexAttention that reads the same mask in
mask_mod and the same bias in score_mod, with a given block mask ("block mask": the time to build it, not included);
cudnn, efficient: scaled_dot_product_attention with a float mask, summed beforehand, and expanded kv heads.
blocks: one in eight tiles of 128 x 128 is visible. columns: one key in 16 is visible, the same for all queries. Both
are compared with the same call with everything visible, for masks shared by all heads (1, 1, N, N) and one per head
(1, H, N, N), without a bias.
interval: the top-w mask, w = 1024, as a dense boolean (1, Hkv, N, N), against the interval mask itself (lists rebuilt)
and one read of the boolean (a reduction or half of a copy, whichever is faster).
varlen causal, varlen top-w: 64 sequences of 100 to 8000 tokens, against 64 equal ones with the same total, as a batch
(B = 64) and packed. Unequal lengths have more causal pairs, so times are compared per visible pair.
plain: forward over all keys and causal, once plain and once with a key bias and a softcap of 30, D 64 and 128, N = 8192
and 32768. Peers cudnn and flash run scaled_dot_product_attention without bias and softcap, which it does not support.

Check: sampled rows and keys of every output and gradient, also the peers', against float64 under the rule "at most
twice (gradients: three times) the error of the plain same-precision computation plus one rounding", see
harness/check.py.
"""
import functools
from typing import Any

import numpy as np
import torch

import cupy_dma as dma
from benchmarks.harness import measure, peers, suite
from benchmarks.harness.check import Given, Problem, check_backward, check_forward, sample
from benchmarks.harness.suite import Case
from cupy_dma.backward import attention_backward, varlen_attention_backward


class Benchmark(suite.Checked):
    def __init__(self, case: Case):
        super().__init__(case)
        self.dout = self.normal(*self.query.shape)

    def prepare(self) -> None:
        """Make the arguments of the calls."""

    def draw_mask(self, heads: int, make: Any) -> Any:
        """bool (1, heads, N, N): ``make(rows of one head)`` fills a head."""
        n = self.case.key_length
        return torch.stack([make(n) for _ in range(heads)])[None]

    def uniform(self, *shape: int) -> Any:
        return torch.rand(shape, device=self._device, generator=self._generator)

    def problem(self, mask: Any, bias: Any = None) -> Any:
        """The computation under a dense mask, in the form that the check takes."""
        return Problem(self.query[0], self.key[0], self.value[0], lambda i, j: mask[0][:, i][:, :, j],
                       None if bias is None else bias[0])

    def sampled(self) -> list[int]:
        return sample(self.case.query_length, self.case.seed)

    def attend(self, label: str, problem: Any, mask: Any, bias: Any = None, setup: Any = None,
               **options: Any) -> tuple[Any, Any]:
        """Measure and check a forward pass; ``(out, lse)``."""
        call = functools.partial(dma.attention, self.query, self.key, self.value, mask=mask, bias=bias, **options)
        self.record("cupy_dma", f"forward {label}".strip(), call, setup)
        out, lse = call(return_lse=True)
        self.checks[f"forward {label}".strip()] = check_forward(problem, out[0], lse[0], self.sampled())
        return out, lse

    def differentiate(self, label: str, problem: Any, out: Any, lse: Any, mask: Any, bias: Any = None,
                      setup: Any = None) -> None:
        """Measure and check a backward pass."""
        call = functools.partial(attention_backward, self.dout, self.query, self.key, self.value, out, lse, mask=mask,
                                 bias=bias)
        stage = f"backward {label}".strip()
        self.record("cupy_dma", stage, call, setup)
        found = call()
        dbias = None if found.bias is None else found.bias[0] if found.bias.ndim == 4 else found.bias[0][:, None]
        given = Given(problem, self.dout[0], out[0], lse[0])
        self.checks[stage] = check_backward(given, (*(x[0] for x in found[:3]), dbias), self.sampled(), self.sampled())

    def check_output(self, problem: Any, out: Any) -> dict[str, Any]:
        """Check a peer's output (1, H, Lq, D)."""
        return check_forward(problem, out[0].transpose(0, 1), None, self.sampled())

    def peers(self, deadline: float, flex: bool) -> None:
        """No peers; subclasses may add some."""


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

    def check_gradients(self, found: Any) -> dict[str, Any]:
        """Check a peer's gradients, heads first, of query, key, value and perhaps the bias."""
        dq, dk, dv, *rest = (x[0] for x in found)
        dq, dk, dv = (x.transpose(0, 1) for x in (dq, dk, dv))
        if dk.shape[1] > self.case.kv_heads:  # expanded kv heads: add them up, as the caller would have to
            dk, dv = (x.float().unflatten(1, (self.case.kv_heads, -1)).sum(2).to(x.dtype) for x in (dk, dv))
        return check_backward(Given(self.checked, self.dout[0], self.out[0], self.lse[0]),
                              (dq, dk, dv, rest[0] if rest else None), self.sampled(), self.sampled())

    def peers(self, deadline: float, flex: bool) -> None:
        inputs, compiled = (self.query, self.key, self.value), measure.on_gpu()

        def forward(who: str, make: Any) -> None:
            self.peer(who, make, deadline, "forward", functools.partial(self.check_output, self.checked))

        def backward(who: str, make: Any) -> None:
            self.peer(who, make, deadline, "backward", self.check_gradients)

        blocks = functools.cache(lambda: peers.block_mask(self.mask, compiled))
        self.peer("flex", lambda: functools.partial(peers.block_mask, self.mask, compiled), deadline,
                  "block mask")
        forward("flex", lambda: peers.flex(*inputs, self.bias, blocks(), compiled))
        if compiled:
            backward("flex", lambda: peers.flex_backward(*inputs, self.dout, self.bias, blocks()))
        added = self.bias.masked_fill(~self.mask, float("-inf"))
        for who, backend in peers.backends("cudnn", "efficient", elsewhere="sdpa").items():
            forward(who, functools.partial(peers.biased_sdpa, backend, *inputs, added))
            backward(who, functools.partial(peers.biased_sdpa_backward, backend, *inputs, self.dout, added))


class Structured(Benchmark):
    """Masks with holes, against the same call with everything visible."""

    def holes(self, n: int) -> Any:
        if self.case.set == "columns":
            return (self.uniform(n).argsort() % 16 == 0).expand(n, n).clone()
        side, blocks = 128, -(-n // 128)
        chosen = self.uniform(blocks, blocks).argsort(-1) % 8 == 0  # equally many in every row of tiles
        return chosen.repeat_interleave(side, 0).repeat_interleave(side, 1)[:n, :n].clone()

    def ours(self) -> None:
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
        suite.Benchmark.prepare(self)
        self.dense = self.mask.to_dense(self.case.query_length).contiguous()

    def read(self) -> None:
        """The time of one read of the dense mask."""
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


class Plain(Benchmark):
    """No mask, or causality alone."""

    SOFTCAP = 30.0

    def prepare(self) -> None:
        self.bias = self.normal(1, self.case.kv_heads, self.case.key_length).float()

    def plain_problem(self, causal: bool, bias: Any = None, softcap: float = 0.0) -> Any:
        def visible(i: Any, j: Any) -> Any:
            return ((j <= i[:, None]) | (not causal))[None]

        return Problem(self.query[0], self.key[0], self.value[0], visible, None if bias is None else bias[0, :, None],
                       softcap=softcap)

    def ours(self) -> None:
        for causal, words in ((False, "all keys"), (True, "causal")):
            for more, bias, softcap in (("", None, 0.0), (", bias of keys and softcap", self.bias, self.SOFTCAP)):
                self.attend(words + more, self.plain_problem(causal, bias, softcap), None, bias, causal=causal,
                            softcap=softcap)

    def peers(self, deadline: float, flex: bool) -> None:
        for who, backend in peers.backends("cudnn", "flash", elsewhere="sdpa").items():
            for causal, words in ((False, "all keys"), (True, "causal")):
                make = functools.partial(peers.dense, backend, self.query, self.key, self.value, causal)
                check = functools.partial(self.check_output, self.plain_problem(causal))
                self.peer(who, make, deadline, f"forward {words}", check)


SEQUENCES, SHORTEST, LONGEST = 64, 100, 8000


def lengths(small: bool) -> list[int]:
    """Lengths of the sequences of a varlen case; their total is a multiple of their number."""
    count, longest = (4, 150) if small else (SEQUENCES, LONGEST)
    drawn = np.random.default_rng(5).integers(SHORTEST, longest + 1, count)
    drawn[np.argmin(drawn)] += -int(drawn.sum()) % count
    return [int(n) for n in drawn]


class Varlen(Benchmark):
    def prepare(self) -> None:
        n = self.case.key_length
        self.lengths = next(drawn for drawn in map(lengths, (False, True)) if sum(drawn) == n)
        self.ends = torch.tensor([0, *self.lengths]).cumsum(0).to(self._device, torch.int32)
        self.equal_ends = torch.arange(0, n + 1, n // len(self.lengths), dtype=torch.int32, device=self._device)
        self.scores = self.score() if self.case.window else None

    def ours(self) -> None:
        equal = [self.case.key_length // len(self.lengths)] * len(self.lengths)
        self.packed("unequal", self.ends, self.lengths)
        self.packed("equal, packed", self.equal_ends, equal)
        self.batch(equal)

    def measured(self, label: str, lengths: list[int], forward: Any, backward: Any, inputs: tuple[Any, ...],
                 *ends: Any, **options: Any) -> tuple[Any, Any, Any]:
        """Time both passes and record the number of visible pairs. Returns out, lse and the gradients."""
        w = self.case.window or max(lengths)
        pairs = self.case.heads * sum(n * min(w, n) - min(w, n) * (min(w, n) - 1) // 2 for n in lengths)

        def forget() -> None:
            if "mask" in options:
                options["mask"]._cache.clear()

        dout, *given = inputs
        attend = functools.partial(forward, *given, *ends, **options)
        self.record("cupy_dma", f"forward {label}", attend, forget)
        out, lse = attend(return_lse=True)
        differentiate = functools.partial(backward, dout, *given, out, lse, *ends, **options)
        self.record("cupy_dma", f"backward {label}", differentiate, forget)
        for row in self.rows[-2:]:
            row["pairs"] = pairs
        return out, lse, differentiate()

    def packed(self, label: str, ends: Any, lengths: list[int]) -> None:
        do, q, k, v = (x[0] for x in (self.dout, self.query, self.key, self.value))
        options: dict[str, Any] = {"causal": True}
        if self.scores is not None:
            mask = dma.IntervalMask.top_w(self.scores, window=self.case.window, documents=ends)
            options = {"mask": mask, "bias": self.scores[0]}
        out, lse, found = self.measured(label, lengths, dma.varlen_attention, varlen_attention_backward, (do, q, k, v),
                                        ends, ends, **options)
        bounds = ends.tolist()

        def sequence_of(index: int) -> Any:
            at = next(n for n in range(1, len(bounds)) if index < bounds[n])
            return torch.arange(bounds[at - 1], bounds[at], device=q.device)

        def visible(i: Any, j: Any) -> Any:
            if self.scores is None:
                return (j <= i[:, None])[None]
            start, stop = (run.expand(mask.shape)[0][:, None, j] for run in (mask.start, mask.stop))
            return (start <= i[:, None]) & (i[:, None] < stop)

        self.problem_of_all = Problem(q, k, v, visible, None if self.scores is None else self.scores[0][:, None],
                                      sequence_of, sequence_of)
        dbias = None if found.bias is None else found.bias.reshape(-1, 1, len(k))
        self.confirm(label, out, lse, (*found[:3], dbias))

    def confirm(self, label: str, out: Any, lse: Any, gradients: Any) -> None:
        given = Given(self.problem_of_all, self.dout[0], out, lse)
        self.checks[f"forward {label}"] = check_forward(given.problem, out, lse, self.sampled())
        self.checks[f"backward {label}"] = check_backward(given, gradients, self.sampled(), self.sampled())

    def batch(self, lengths: list[int]) -> None:
        """Measure the equal sequences as a batch, the same computation as when packed."""
        count, n = len(lengths), lengths[0]
        inputs = tuple(x.reshape(count, n, *x.shape[2:]) for x in (self.dout, self.query, self.key, self.value))
        options: dict[str, Any] = {"causal": True}
        if self.scores is not None:
            scores = self.scores[0].reshape(-1, count, n).transpose(0, 1).contiguous()
            options = {"mask": dma.IntervalMask.top_w(scores, window=self.case.window), "bias": scores}
        out, lse, found = self.measured("equal, batch", lengths, dma.attention, attention_backward, inputs, **options)
        dq, dk, dv, dbias = found
        if dbias is not None:
            dbias = dbias.transpose(0, 1).flatten(1)[:, None]
        self.confirm("equal, batch", out.flatten(0, 1), lse.transpose(0, 1).flatten(1),
                     (*(x.flatten(0, 1) for x in (dq, dk, dv)), dbias))


def cases(which: str) -> list[Case]:
    small = which == "smoke"
    n, heads, kv_heads, size, w = (140, 4, 2, 16, 40) if small else (8192, 16, 8, 128, 1024)

    def case(name: str, length: int, window: int = 0, size: int = size) -> Case:
        return Case(name, heads, kv_heads, size, length, length, window)

    total = sum(lengths(small))
    found = [case("random", n), case("blocks", n), case("columns", n), case("interval", n, w),
             case("varlen causal", total), case("varlen top-w", total, w)]
    return found + ([case("plain", n)] if small else [case("plain", m, 0, d) for d in (64, 128) for m in (n, 4 * n)])


CLASSES = {"random": Random, "blocks": Structured, "columns": Structured, "interval": Interval,
           "varlen causal": Varlen, "varlen top-w": Varlen, "plain": Plain}


SUITE = suite.Suite("dense", __doc__, cases, lambda case: CLASSES[case.set](case), seconds=200)
add_options, run = SUITE.add_options, SUITE.run
