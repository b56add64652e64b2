"""The cases of decode.py: what is drawn, measured and checked in each."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.harness import suite
from benchmarks.harness.suite import Case

LAYERS = 20  # copies of a case's arrays, so that a graph of steps finds little of them in the L2 cache
LAYER_BYTES = 4 * 2**30  # all copies together
CHUNK = 32768  # tokens by which a cache is filled
ALWAYS_KEPT = 2.0  # a score above all others, which are below 1

Maker = Callable[[Any, Any, Any, Any], Any]  # of query, key, value, scores: a call, or a call and a note


class Benchmark(suite.Benchmark):
    """One query of each sequence, at the end of its history. Outputs are checked while they are measured."""

    cold = False  # also time single calls with an empty L2 cache

    def __init__(self, case: Case):
        super().__init__(case)
        self.checks: dict[str, Any] = {}
        self.best: dict[tuple[int, int], Any] = {}

    def prepare(self) -> None:
        import torch

        case = self.case
        self.scores = torch.rand(case.batch, case.kv_heads, case.key_length, device=self._device,
                                 generator=self._generator)
        self.inputs = self.query, self.key, self.value, self.scores

    def windows(self) -> tuple[int, ...]:
        """All that a case of this kind is measured with."""
        return (self.case.window,)

    def sampled(self) -> list[int]:
        """Sequences that are checked."""
        from benchmarks.harness.check import sampled_batch

        return sampled_batch(self.case.batch, self.case.seed)

    def best_keys(self, b: int, window: int) -> Any:
        from benchmarks.harness.check import best_keys

        if (b, window) not in self.best:
            self.best[b, window] = best_keys(self.scores[b], window)
        return self.best[b, window]

    def checked(self, out: Any, lse: Any, window: int | None, bias: bool = True) -> Any:
        """The check of a result ``(B, 1, H, D)`` and ``(B, H, 1)`` over the best ``window`` keys (None: all)."""
        from benchmarks.harness.check import TokenCheck

        check = TokenCheck()
        for b in self.sampled():
            check.compare(out[b, 0], None if lse is None else lse[b, :, 0], self.query[b, 0], self.key[b],
                          self.value[b], self.scores[b] if bias else None,
                          None if window is None else self.best_keys(b, window))
        return check

    def layers(self, size: int) -> int:
        return max(1, min(LAYERS, LAYER_BYTES // max(size, 1)))

    def copies(self) -> list[tuple[Any, ...]]:
        """The inputs, for every layer."""
        size = sum(x.numel() * x.element_size() for x in self.inputs)
        return [self.inputs, *(tuple(x.clone() for x in self.inputs) for _ in range(self.layers(size) - 1))]

    def record_calls(self, who: str, stage: str, calls: Sequence[Callable[[], Any]], note: str = "",
                     **more: Any) -> None:
        """The time of one call, and more about it."""
        from benchmarks.harness import measure

        ms, how = measure.steps_ms(calls)
        row = {"who": who, "stage": stage, "ms": ms, "timing": how, "note": note, **more}
        if self.cold:
            row["cold_ms"] = measure.gpu_ms(calls[0])[0]
        self.rows.append(row)

    # ---- the cache ----
    def filled(self, window: int) -> Any:
        """A cache that has seen all tokens but the last."""
        import cupy_dma as dma

        case, end = self.case, self.case.key_length - 1
        cache = dma.DynamicCache(case.batch, case.kv_heads, window, case.head_dim, dtype=self.key.dtype, like=self.key)
        for begin in range(0, end, CHUNK):
            piece = slice(begin, min(begin + CHUNK, end))
            cache.update(self.key[:, piece], self.value[:, piece], self.scores[:, :, piece])
        return cache

    def step(self, window: int) -> None:
        """Check the cache's step for the last token, then time steps that displace a kept key each."""
        import torch

        from benchmarks.harness import measure

        cache = self.filled(window)
        last = slice(self.case.key_length - 1, None)
        token = self.query, self.key[:, last], self.value[:, last], self.scores[:, :, last]
        before = cache.state_dict()
        eager = self.result(cache, token)
        check = self.checked(*eager, window)
        for b in self.sampled():
            check.compare_kept(cache.positions[b], self.best_keys(b, window))
        self.checks[f"step w{window}"] = check.result()

        cache.load_state_dict(before)
        out = torch.empty_like(self.query)
        call = partial(cache.extend, *token, out=out)
        replay, how = measure.captured(call)
        cache.load_state_dict(before)
        replay()
        found = self.checked(out, None, window).result()
        same = bool((out == eager[0]).all()) and bool((cache.length == self.case.key_length).all())
        self.checks[f"step w{window}, {how}"] = {**found, "equals_eager": same, "ok": found["ok"] and same}

        del replay
        fresh = (*token[:3], torch.full_like(token[3], ALWAYS_KEPT))
        caches = [cache, *(cache.clone() for _ in range(self.layers(cache.memory_bytes) - 1))]
        calls = [partial(one.extend, *fresh, out=torch.empty_like(out)) for one in caches]
        kept = min(window, self.case.key_length)
        row_bytes = (self.key.shape[-1] + self.value.shape[-1]) * self.key.element_size()
        self.record_calls("cupy_dma", f"step w{window}", calls, cache_bytes=cache.memory_bytes,
                          kept_bytes=self.case.batch * self.case.kv_heads * kept * row_bytes)
        single, how = measure.captured(calls[0])
        self.host("cupy_dma", f"step w{window} replay", single, how)
        if self.cold:
            self.host("cupy_dma", f"step w{window} eager", calls[0], "eager")

    def result(self, cache: Any, token: Sequence[Any]) -> tuple[Any, Any]:
        """``out`` and ``lse`` of one step."""
        return cache.extend(*token, return_lse=True)

    def host(self, who: str, stage: str, call: Callable[[], Any], how: str) -> None:
        """Wall time of a call and the wait for it ("ms"), and of one among many that are queued."""
        from benchmarks.harness import measure

        row = {"who": who, "stage": stage, "timing": f"wall clock, {how}", "note": "",
               "ms": measure.waited_us(call, 50 if measure.on_gpu() else 1) / 1e3}
        if self.cold:
            row["queued_ms"] = measure.host_us(call, 100 if measure.on_gpu() else 1) / 1e3
        self.rows.append(row)

    # ---- others ----
    def checked_peer(self, who: str, stage: str, make: Maker, deadline: float,
                     check: Callable[[Any], Any], repeat: int = 0, **more: Any) -> None:
        """Record a peer and, as its note, whether ``check(its result (B, 1, H, D))`` found it right.

        ``repeat``: as many calls on the same arrays, instead of one on each copy.
        """
        from benchmarks.harness import measure

        if time.monotonic() > deadline:
            self.failed(who, stage, "no time left")
            return
        copies = made = calls = None
        try:
            copies = [self.inputs] if repeat else self.copies()
            made = [x if isinstance(x, tuple) else (x, "") for x in (make(*inputs) for inputs in copies)]
            calls = [call for call, _ in made] * max(repeat, 1)
            found = check(calls[0]().transpose(1, 2)).result()
            word = "right" if found["ok"] else f"NOT WITHIN THE RULE ({found['worst']:.2f} of what is allowed)"
            self.record_calls(who, stage, calls, "; ".join(filter(None, (made[0][1], word))), **more)
        except Exception as error:  # a peer that cannot run is a result too
            measure.synchronize()
            self.failed(who, stage, f"{type(error).__name__}: {error}".splitlines()[0][:160], **more)
        copies = made = calls = None
        measure.free_memory()

    def failed(self, who: str, stage: str, words: str, **more: Any) -> None:
        self.rows.append({"who": who, "stage": stage, "ms": None, "timing": "", "note": words, **more})

    def dense(self, deadline: float) -> None:
        """Attention over all keys."""
        from torch.nn.attention import SDPBackend

        from benchmarks.harness import measure, peers

        backends: dict[str, Any] = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
        if not measure.on_gpu():
            backends = {"sdpa": None}
        size = sum(x.numel() * x.element_size() for x in (self.key, self.value))
        for who, backend in backends.items():
            make = partial(peers.dense, backend)
            self.checked_peer(who, "dense", lambda q, k, v, _, make=make: make(q, k, v), deadline,  # type: ignore[misc]
                              lambda out: self.checked(out, None, None, bias=False), cache_bytes=size)

    def check(self) -> dict[str, Any]:
        return {"stages": self.checks, "worst": max((found["worst"] for found in self.checks.values()), default=0.0),
                "ok": all(found["ok"] for found in self.checks.values())}

    def ours(self) -> None:
        for window in self.windows():
            self.step(window)

    def peers(self, deadline: float, flex: bool) -> None:
        self.dense(deadline)


class Serving(Benchmark):
    """Batches of long histories: the cache's step against attention over all keys."""

    def windows(self) -> tuple[int, ...]:
        return self.case.window // 2, self.case.window


class TooLarge(Serving):
    """A case whose history does not fit: nothing is measured."""

    def __init__(self, case: Case):
        self.case, self.rows, self.checks = case, [], {}

    def prepare(self) -> None:
        """Nothing is drawn."""

    def ours(self) -> None:
        self.failed("sdpa", "dense", "keys and values of the history do not fit into memory")

    def peers(self, deadline: float, flex: bool) -> None:
        """None."""


class Original(Benchmark):
    """The rows of the original package's table, with the same mask made in every way."""

    cold = True

    def ours(self) -> None:
        import cupy_dma as dma
        from benchmarks.harness import measure

        super().ours()
        w = self.case.window

        def stateless(q: Any, k: Any, v: Any, scores: Any, **more: Any) -> Any:
            return dma.dynamic_mask_attention(q, k, v, scores, window=w, **more)

        def prepared(q: Any, k: Any, v: Any, scores: Any, **more: Any) -> Any:
            mask = dma.IntervalMask.top_w(scores, window=w)
            return partial(dma.attention, q, k, v, mask=mask, bias=scores, **more)

        for name, (out, lse) in (("stateless", stateless(*self.inputs, return_lse=True)),
                                 ("prepared", prepared(*self.inputs, return_lse=True)())):
            self.checks[name] = self.checked(out, lse, w).result()
        copies = self.copies()
        self.record_calls("cupy_dma", "stateless", [partial(stateless, *inputs) for inputs in copies])
        self.host("cupy_dma", "stateless eager", partial(stateless, *self.inputs), "eager")
        self.record_calls("cupy_dma", "prepared", [prepared(*inputs) for inputs in copies])
        self.rows[-1]["note"] = "interval mask made beforehand"
        measure.free_memory()

    def peers(self, deadline: float, flex: bool) -> None:
        from benchmarks.harness import peers

        case, group = self.case, self.case.heads // self.case.kv_heads

        def mask_of(q: Any, scores: Any) -> Any:
            return peers.dense_mask(scores, 1, case.window, q.dtype, group)

        if flex:
            self.flex(deadline)
            return
        self.dense(deadline)
        if time.monotonic() < deadline:
            added = mask_of(self.query, self.scores)[0, ::group, 0]  # (Hkv, n), rounded as the peer's

            def check(out: Any) -> Any:
                from benchmarks.harness.check import TokenCheck

                found, kept = TokenCheck(), [row.nonzero()[:, 0] for row in added > float("-inf")]
                found.wrong_keys = sum(len(keys) != min(case.window, case.key_length) for keys in kept)
                found.compare(out[0, 0], None, self.query[0, 0], self.key[0], self.value[0], added, kept)
                return found

            def given(q: Any, k: Any, v: Any, scores: Any) -> Any:
                mask = mask_of(q, scores)
                return peers.masked(q, k, v, lambda: mask)

            def built(q: Any, k: Any, v: Any, scores: Any) -> Any:
                return peers.masked(q, k, v, lambda: mask_of(q, scores))

            self.checked_peer("masked", "attention", given, deadline, check)
            self.checked_peer("masked+build", "attention", built, deadline, check)

    def flex(self, deadline: float) -> None:
        """FlexAttention with the interval mask as block mask; compiled where there is a GPU."""
        import cupy_dma as dma
        from benchmarks.harness import measure, peers

        mask = dma.IntervalMask.top_w(self.scores, window=self.case.window)
        start, stop = (x.expand(self.scores.shape).contiguous() for x in (mask.start, mask.stop))
        # One set of arrays: a copy would be compiled anew.
        self.checked_peer("flex", "attention", lambda q, k, v, scores: peers.flex(
            q, k, v, start, stop, scores, compiled=measure.on_gpu()), deadline,
            lambda out: self.checked(out, None, self.case.window), repeat=8)
