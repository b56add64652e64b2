"""The cases of dense_performance.py with one batch entry: what is drawn, measured and checked in each."""
from __future__ import annotations

import functools
from typing import Any

from benchmarks.harness import suite
from benchmarks.harness.suite import Case


class Benchmark(suite.Benchmark):
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
        from benchmarks.harness.check import Problem

        return Problem(self.query[0], self.key[0], self.value[0], lambda i, j: mask[0][:, i][:, :, j],
                       None if bias is None else bias[0])

    def sampled(self) -> list[int]:
        from benchmarks.harness.check import sample

        return sample(self.case.query_length, self.case.seed)

    def attend(self, label: str, problem: Any, mask: Any, bias: Any = None, setup: Any = None,
               **options: Any) -> tuple[Any, Any]:
        """Measure and check a forward pass; ``(out, lse)``."""
        import cupy_dma as dma
        from benchmarks.harness.check import check_forward

        call = functools.partial(dma.attention, self.query, self.key, self.value, mask=mask, bias=bias, **options)
        self.record("cupy_dma", f"forward {label}".strip(), call, setup)
        out, lse = call(return_lse=True)
        self.checks[f"forward {label}".strip()] = check_forward(problem, out[0], lse[0], self.sampled())
        return out, lse

    def differentiate(self, label: str, problem: Any, out: Any, lse: Any, mask: Any, bias: Any = None,
                      setup: Any = None) -> None:
        """Measure and check a backward pass."""
        from benchmarks.harness.check import Given, check_backward
        from cupy_dma.backward import attention_backward

        call = functools.partial(attention_backward, self.dout, self.query, self.key, self.value, out, lse, mask=mask,
                                 bias=bias)
        stage = f"backward {label}".strip()
        self.record("cupy_dma", stage, call, setup)
        found = call()
        dbias = None if found.bias is None else found.bias[0] if found.bias.ndim == 4 else found.bias[0][:, None]
        given = Given(problem, self.dout[0], out[0], lse[0])
        self.checks[stage] = check_backward(given, (*(x[0] for x in found[:3]), dbias), self.sampled(), self.sampled())

    def check_output(self, problem: Any, out: Any) -> dict[str, Any]:
        """Of a peer: (1, H, Lq, D)."""
        from benchmarks.harness.check import check_forward

        return check_forward(problem, out[0].transpose(0, 1), None, self.sampled())

    def checked_peer(self, who: str, stage: str, make: Any, deadline: float, check: Any) -> None:
        """A peer whose result ``check`` takes, too; what that says goes to its note and never fails the run."""
        def checked() -> tuple[Any, str]:
            made = make()
            call, note = made if isinstance(made, tuple) else (made, "")
            result = check(call())
            word = "right" if result["ok"] else f"NOT WITHIN THE RULE ({result['worst']:.2f} of what is allowed)"
            return call, "; ".join(filter(None, (note, word)))

        self.peer(who, checked, deadline, stage)

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

    def check_gradients(self, found: Any) -> dict[str, Any]:
        """Of a peer, heads first: of query, key, value and maybe the bias."""
        from benchmarks.harness.check import Given, check_backward

        dq, dk, dv, *rest = (x[0] for x in found)
        dq, dk, dv = (x.transpose(0, 1) for x in (dq, dk, dv))
        if dk.shape[1] > self.case.kv_heads:  # expanded: what the caller would still have to add up
            dk, dv = (x.float().unflatten(1, (self.case.kv_heads, -1)).sum(2).to(x.dtype) for x in (dk, dv))
        return check_backward(Given(self.checked, self.dout[0], self.out[0], self.lse[0]),
                              (dq, dk, dv, rest[0] if rest else None), self.sampled(), self.sampled())

    def peers(self, deadline: float, flex: bool) -> None:
        from torch.nn.attention import SDPBackend

        from benchmarks.harness import measure, peers_dense

        inputs, compiled = (self.query, self.key, self.value), measure.on_gpu()

        def forward(who: str, make: Any) -> None:
            self.checked_peer(who, "forward", make, deadline, functools.partial(self.check_output, self.checked))

        def backward(who: str, make: Any) -> None:
            self.checked_peer(who, "backward", make, deadline, self.check_gradients)

        blocks = functools.cache(lambda: peers_dense.block_mask(self.mask, compiled))
        self.peer("flex", lambda: functools.partial(peers_dense.block_mask, self.mask, compiled), deadline,
                  "block mask")
        forward("flex", lambda: peers_dense.flex(*inputs, self.mask, self.bias, blocks(), compiled))
        if compiled:
            backward("flex", lambda: peers_dense.flex_backward(*inputs, self.dout, self.mask, self.bias, blocks()))
        added = self.bias.masked_fill(~self.mask, float("-inf"))
        backends: dict[str, Any] = {"cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
        if not compiled:
            backends = {"sdpa": None}
        for who, backend in backends.items():
            forward(who, functools.partial(peers_dense.sdpa, backend, *inputs, added))
            backward(who, functools.partial(peers_dense.sdpa_backward, backend, *inputs, self.dout, added))


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
        suite.Benchmark.prepare(self)
        self.dense = self.mask.to_dense(self.case.query_length).contiguous()

    def read(self) -> None:
        """The time of one read of the dense mask."""
        import torch

        from benchmarks.harness import measure

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
        from benchmarks.harness.check import Problem

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
        from torch.nn.attention import SDPBackend

        from benchmarks.harness import measure, peers

        backends: dict[str, Any] = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
        if not measure.on_gpu():
            backends = {"sdpa": None}
        for who, backend in backends.items():
            for causal, words in ((False, "all keys"), (True, "causal")):
                self.checked_peer(
                    who, f"forward {words}",
                    functools.partial(peers.dense, backend, self.query, self.key, self.value, causal), deadline,
                    functools.partial(self.check_output, self.plain_problem(causal)))
