"""Decoding: a step of the cache, stateless calls and the peers, for one query per sequence, in one run.

Inputs: bfloat16, independent normal query, key and value, uniform scores (some are equal), seeded by the case. Each
sequence has one query at the end of its history. Sets. ``table``, the original package's: B1 H2/1 D64, 256 ... 524288
keys, w = 1024. ``model``: batch 1, 8, 32, 128; 16/8 and 32/8 heads, D 128; histories of 4096, 32768 and 131072 tokens
(batch 1 also 1048576), w 1024 and 2048. Cases that do not fit into memory are left out.

Ours. step: ``DynamicCache.extend`` by one token after the history. The token's score is above all others, so each step
displaces a kept key (or fills a cache that is not full yet). replay and eager: wall time of one step until its result
is ready, as a CUDA graph of that step alone and as a call; "queued_ms": time per step when many are queued. step
unequal: the same number of rows, but half of the kv heads keep an eighth of w and the other half the rest, as learned
gates and budgets do. step, n tokens: one call of n tokens per sequence. step, int8 and fp8 rows: a cache with this
``storage``, with keys and values rounded to numbers that it can store.
stateless: ``dynamic_mask_attention``, given the scores. prepared: ``attention``, given the interval mask.
kept_bytes: keys and values of the kept rows. cache_bytes: all arrays of a cache, or keys and values of the history.

Peers. cudnn, flash: scaled_dot_product_attention over all keys. masked: the same with an additive top-k mask of the
scores, as the original package's models call it; masked+build: including the time to build that mask. flex: compiled
FlexAttention with the same interval mask as block mask (not timed) and the scores as score_mod.

GPU time (``measure.steps_ms``): up to 20 calls in one graph, each on arrays of its own (as many copies as 4 GiB hold),
as a decode step passes through the layers of a model. cold_ms: one call alone with an empty L2 cache, launch included.
Copy bandwidth: bytes read and written by a 2 GiB copy on the device, by a kernel or a copy engine, whichever is faster.
Empty replay: wall time of a graph of one tiny kernel until it has finished.

Check: every output, also of peers, against float64 in the first, the last and a random sequence, with at most twice the
error of the plain same-precision computation plus one rounding. The cache must hold exactly the best keys of the whole
history; a replayed step must give the same bits as a call, and a call of n tokens the same bits as n calls.
"""
from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import cupy_dma as dma
from benchmarks.harness import measure, peers, suite
from benchmarks.harness.check import TokenCheck, best_keys, sampled_batch
from benchmarks.harness.command import why_not
from benchmarks.harness.suite import Case
from cupy_dma.arrays import library_named
from cupy_dma.cache.storage import fake_quantized
from cupy_dma.masks.windows import Window, each_head

LAYERS = 20  # copies of a case's arrays, so that a graph of steps finds few of them in the L2 cache
LAYER_BYTES = 4 * 2**30  # all copies together
CHUNK, TOKENS = 32768, 2**18  # tokens of a sequence, and of all, per call while filling a cache
ROUNDED = 2**33  # the most numbers of a history that is also measured in 8 bits
ALWAYS_KEPT = 2.0  # a score above all others, which are below 1

Maker = Callable[[Any, Any, Any, Any], Any]  # (query, key, value, scores) -> a call, or a call and a note


class Benchmark(suite.Checked):
    """Measures one query per sequence, at the end of its history, and checks the outputs."""

    cold = False  # also time single calls with an empty L2 cache

    def __init__(self, case: Case):
        super().__init__(case)
        self.best: dict[tuple[int, Window], Any] = {}

    def prepare(self) -> None:
        self.scores = torch.rand(self.case.batch, self.case.kv_heads, self.case.key_length, device=self._device,
                                 generator=self._generator)
        self.inputs = self.query, self.key, self.value, self.scores

    def sampled(self) -> list[int]:
        """The sequences to check."""
        return sampled_batch(self.case.batch, self.case.seed)

    def best_keys(self, b: int, window: Window) -> Any:
        if (b, window) not in self.best:
            each = each_head(window, self.case.kv_heads)
            self.best[b, window] = [best_keys(self.scores[b, g:g + 1], size)[0] for g, size in enumerate(each)]
        return self.best[b, window]

    def checked(self, out: Any, lse: Any, window: Window | None, bias: bool = True) -> Any:
        """Check a result ``(B, 1, H, D)`` and ``(B, H, 1)`` over the best ``window`` keys (None: all)."""
        check = TokenCheck()
        for b in self.sampled():
            check.compare(out[b, 0], None if lse is None else lse[b, :, 0], self.query[b, 0], self.key[b],
                          self.value[b], self.scores[b] if bias else None,
                          None if window is None else self.best_keys(b, window))
        return check

    def layers(self, size: int) -> int:
        return max(1, min(LAYERS, LAYER_BYTES // max(size, 1)))

    def copies(self) -> list[tuple[Any, ...]]:
        """A copy of the inputs for every layer."""
        size = sum(x.numel() * x.element_size() for x in self.inputs)
        return [self.inputs, *(tuple(x.clone() for x in self.inputs) for _ in range(self.layers(size) - 1))]

    def record_calls(self, who: str, stage: str, calls: Sequence[Callable[[], Any]], note: str = "",
                     **more: Any) -> None:
        """Record the time of one call, with ``more``."""
        ms, how = measure.steps_ms(calls)
        row = {"who": who, "stage": stage, "ms": ms, "timing": how, "note": note, **more}
        if self.cold:
            row["cold_ms"] = measure.gpu_ms(calls[0])[0]
        self.rows.append(row)

    # ---- the cache ----
    @contextmanager
    def rounded(self, storage: str | None) -> Iterator[None]:
        """Keys and values rounded to numbers that a cache with this ``storage`` keeps exactly."""
        before = self.key, self.value
        if storage is not None:
            library, dtype = library_named("torch"), str(self.key.dtype).removeprefix("torch.")
            self.key, self.value = (torch.stack([fake_quantized(library, x, storage, dtype) for x in rows])
                                    for rows in before)
        yield
        self.key, self.value = before

    def filled(self, window: Window, storage: str | None = None) -> Any:
        """A cache that has seen all tokens but the last."""
        case, end = self.case, self.case.key_length - 1
        cache = dma.DynamicCache(case.batch, case.kv_heads, window, case.head_dim, dtype=self.key.dtype, like=self.key,
                                 storage=storage)
        chunk = min(CHUNK, TOKENS // case.batch)
        for begin in range(0, end, chunk):
            piece = slice(begin, min(begin + chunk, end))
            cache.update(self.key[:, piece], self.value[:, piece], self.scores[:, :, piece])
        return cache

    def step(self, window: Window, several: Sequence[int] = (), storage: str | None = None) -> None:
        """Check the cache's step for the last token, then time steps that each displace a kept key, and calls of
        ``several`` tokens."""
        each = each_head(window, self.case.kv_heads)
        stage = f"step w{window}" if isinstance(window, int) else f"step unequal w{sum(each) // len(each)}"
        stage += f", {storage} rows" if storage else ""
        cache = self.filled(window, storage)
        last = slice(self.case.key_length - 1, None)
        token = self.query, self.key[:, last], self.value[:, last], self.scores[:, :, last]
        before = cache.state_dict()
        eager = self.result(cache, token)
        check = self.checked(*eager, window)
        for b in self.sampled():
            check.compare_kept(cache.positions[b], self.best_keys(b, window))
        self.checks[stage] = check.result()

        cache.load_state_dict(before)
        out = torch.empty_like(self.query)
        call = partial(cache.extend, *token, out=out)
        replay, how = measure.captured(call)
        cache.load_state_dict(before)
        replay()
        found = self.checked(out, None, window).result()
        same = bool((out == eager[0]).all()) and bool((cache.length == self.case.key_length).all())
        self.checks[f"{stage}, {how}"] = {**found, "equals_eager": same, "ok": found["ok"] and same}

        del replay
        fresh = (*token[:3], torch.full_like(token[3], ALWAYS_KEPT))
        caches = [cache, *(cache.clone() for _ in range(self.layers(cache.memory_bytes) - 1))]
        calls = [partial(one.extend, *fresh, out=torch.empty_like(out)) for one in caches]
        kept = sum(min(size, self.case.key_length) for size in each)
        numbers = self.key.shape[-1] + self.value.shape[-1]
        row_bytes = numbers + 8 if storage else numbers * self.key.element_size()
        self.record_calls("cupy_dma", stage, calls, cache_bytes=cache.memory_bytes,
                          kept_bytes=self.case.batch * kept * row_bytes)
        single, how = measure.captured(calls[0])
        self.host("cupy_dma", f"{stage} replay", single, how)
        if self.cold:
            self.host("cupy_dma", f"{stage} eager", calls[0], "eager")
        for tokens in several:
            self.tokens(f"{stage}, {tokens} tokens", caches, tokens)

    def tokens(self, stage: str, caches: Sequence[Any], n: int) -> None:
        """Check a call of n tokens, all kept, against n calls of one token, then time such calls."""
        query, key, value = (torch.randn(x.shape[0], n, *x.shape[2:], generator=self._generator, device=x.device)
                             .to(x.dtype) for x in (self.query, self.key, self.value))
        scores = torch.full((*self.scores.shape[:2], n), ALWAYS_KEPT, device=self.scores.device)
        other, last = caches[0].clone(), [slice(i, i + 1) for i in range(n)]
        out = caches[0].extend(query, key, value, scores)
        alone = torch.cat([other.extend(query[:, i], key[:, i], value[:, i], scores[..., i]) for i in last], 1)
        pairs = [(out, alone), *((x, other.state_dict()[name]) for name, x in caches[0].state_dict().items())]
        same = all(torch.equal(x, y) for x, y in pairs if torch.is_tensor(x))
        worst = float((out.double() - alone.double()).abs().max()) / 2**-6
        self.checks[stage] = {"equals_single_tokens": same, "worst": worst,
                              "ok": worst <= 1 and (same or not measure.on_gpu())}
        calls = [partial(one.extend, query, key, value, scores, out=torch.empty_like(out)) for one in caches]
        self.record_calls("cupy_dma", stage, calls)

    def result(self, cache: Any, token: Sequence[Any]) -> tuple[Any, Any]:
        """``out`` and ``lse`` of one step."""
        return cache.extend(*token, return_lse=True)

    def host(self, who: str, stage: str, call: Callable[[], Any], how: str) -> None:
        """Wall time from a call until its result is ready ("ms"), and per call when many are queued."""
        row = {"who": who, "stage": stage, "timing": f"wall clock, {how}", "note": "",
               "ms": measure.waited_us(call, 50 if measure.on_gpu() else 1) / 1e3}
        if self.cold:
            row["queued_ms"] = measure.host_us(call, 100 if measure.on_gpu() else 1) / 1e3
        self.rows.append(row)

    # ---- others ----
    def checked_peer(self, who: str, stage: str, make: Maker, deadline: float,
                     check: Callable[[Any], Any], repeat: int = 0, **more: Any) -> None:
        """Record a peer, with the verdict of ``check`` on its result ``(B, 1, H, D)`` as its note.

        ``repeat``: that many calls on the same arrays, instead of one call on each copy.
        """
        if time.monotonic() > deadline:
            self.failed(who, stage, "no time left")
            return
        copies = made = calls = None
        try:
            copies = [self.inputs] if repeat else self.copies()
            made = [x if isinstance(x, tuple) else (x, "") for x in (make(*inputs) for inputs in copies)]
            calls = [call for call, _ in made] * max(repeat, 1)
            found = check(calls[0]().transpose(1, 2)).result()
            self.record_calls(who, stage, calls, suite.with_verdict(made[0][1], found), **more)
        except Exception as error:
            self.failed(who, stage, why_not(error), **more)
        copies = made = calls = None
        measure.free_memory()

    def dense(self, deadline: float) -> None:
        """Attention over all keys."""
        size = sum(x.numel() * x.element_size() for x in (self.key, self.value))
        for who, backend in peers.backends("cudnn", "flash", elsewhere="sdpa").items():
            make = partial(peers.dense, backend)
            self.checked_peer(who, "dense", lambda q, k, v, _, make=make: make(q, k, v), deadline,  # type: ignore[misc]
                              lambda out: self.checked(out, None, None, bias=False), cache_bytes=size)

    def ours(self) -> None:
        self.step(self.case.window)

    def peers(self, deadline: float, flex: bool) -> None:
        self.dense(deadline)


class Serving(Benchmark):
    """Batches of long histories: the cache's step against attention over all keys."""

    def ours(self) -> None:
        window, half = self.case.window, self.case.kv_heads // 2
        self.step(window // 2)
        self.step(window, several=(2, 4, 8))
        self.step((window // 8,) * half + (2 * window - window // 8,) * half)
        fits = self.key.numel() <= ROUNDED  # its rounded copy too
        for storage in ("int8", "fp8") if fits else ():
            with self.rounded(storage):
                self.step(window, storage=storage)


class Original(Benchmark):
    """The rows of the original package's table; each peer builds the same mask its own way."""

    cold = True

    def ours(self) -> None:
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
                found, kept = TokenCheck(), [row.nonzero()[:, 0] for row in added > float("-inf")]
                found.wrong_keys = sum(len(keys) != min(case.window, case.key_length) for keys in kept)
                found.compare(out[0, 0], None, self.query[0, 0], self.key[0], self.value[0], added, kept)
                return found

            def given(q: Any, k: Any, v: Any, scores: Any) -> Any:
                mask = mask_of(q, scores)
                return peers.masked(q, k, v, lambda: mask)

            self.checked_peer("masked", "attention", given, deadline, check)
            self.checked_peer("masked+build", "attention", lambda q, k, v, scores: peers.masked(
                q, k, v, lambda: mask_of(q, scores)), deadline, check)

    def flex(self, deadline: float) -> None:
        """FlexAttention with the interval mask as block mask; compiled where there is a GPU."""
        mask = dma.IntervalMask.top_w(self.scores, window=self.case.window)
        start, stop = (x.expand(self.scores.shape).contiguous() for x in (mask.start, mask.stop))
        # One set of arrays: each copy would be compiled again.
        self.checked_peer("flex", "attention", lambda q, k, v, scores: peers.flex(
            q, k, v, scores, peers.intervals(q, k, start, stop), measure.on_gpu()), deadline,
            lambda out: self.checked(out, None, self.case.window), repeat=8)


FREE_SHARE = 0.8  # of the free memory that a history may fill
COPY_BYTES = 2 * 2**30


def cases(which: str) -> list[Case]:
    if which == "smoke":
        return [Case("original", 2, 1, 16, 1, 256, 100, flex=True), Case("original", 2, 1, 16, 1, 64, 100),
                Case("serving", 4, 2, 16, 1, 70, 32, batch=3)]
    table = [Case("original", 2, 1, 64, 1, n, 1024, flex=n in (4096, 524288))
             for n in (256, 1024, 4096, 16384, 65536, 262144, 524288)]
    model = [Case("serving", heads, 8, 128, 1, n, 2048, batch=batch) for heads in (16, 32) for batch in (1, 8, 32, 128)
             for n in (4096, 32768, 131072, 1048576) if n <= 131072 or batch == 1]
    return table + [case for case in model if fits(case)]


def benchmark(case: Case) -> Benchmark:
    return {"original": Original, "serving": Serving}[case.set](case)


def fits(case: Case) -> bool:
    size = 4 * case.batch * case.key_length * case.kv_heads * case.head_dim  # keys and values in bfloat16
    return size <= FREE_SHARE * measure.free_bytes()


def machine_limits() -> dict[str, Any]:
    """The limits of a step on this machine: copy bandwidth (bytes read and written, TB/s) and replay of an empty graph
    (us)."""
    device, size = ("cuda", COPY_BYTES) if measure.on_gpu() else ("cpu", 2**20)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # A graph runs a plain copy on a copy engine, which is slower than a kernel.
    ms = min(measure.gpu_ms(call)[0] for call in (functools.partial(target.copy_, source),
                                                  functools.partial(torch.bitwise_not, source.view(torch.int32),
                                                                    out=target.view(torch.int32))))
    nothing, _ = measure.captured(target[:1].zero_)
    limits = {"copy_tb_s": 2 * size / ms / 1e9, "empty_replay_us": measure.waited_us(nothing)}
    del source, target
    measure.free_memory()
    return limits


SUITE = suite.Suite("decode", __doc__, cases, benchmark, seconds=100, extra=machine_limits)
add_options, run = SUITE.add_options, SUITE.run
