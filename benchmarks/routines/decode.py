"""Decoding: the cache's step, the stateless way and the other ways to answer one query, in one run.

    python -m benchmarks decode                       everything, below two minutes on an H200
    python -m benchmarks decode --set table --quick
    python -m benchmarks decode --table                                      print the table from the results
    python -m benchmarks decode --update-docs                                put it into docs/performance.md

Inputs: bfloat16, query, key and value independent normal numbers, scores independent uniform ones (so some are equal),
seeded by the case. One query a sequence, at the end of its history.

Sets. ``table``, the original package's: B1 H2/1 D64, 256 ... 524288 keys, w = 1024. ``model``: batch 1, 8, 32, 128; 16
and 32 heads over 8, D 128; histories of 4096, 32768 and 131072 tokens (batch 1 also 1048576), w 1024 and 2048; what
does not fit into memory is left out. ``smoke``: tiny, runs without a GPU, for trying the script.

Ours. step: ``DynamicCache.extend`` by one token, the cache having seen the history before (by ``update`` in pieces);
the timed token has a score above all others, so that each step displaces a kept key (or fills a cache that is not yet
full). replay and eager: wall time of one step and the wait for it, as a CUDA graph of that step alone and as a call;
among many that are queued ("queued_ms"). stateless: ``dynamic_mask_attention`` from the scores on, selection included.
prepared: ``attention`` with the interval mask given. kept_bytes: keys and values of the kept rows, counted once;
cache_bytes: all arrays of a cache, or keys and values of the whole history.

Peers. cudnn, flash: scaled_dot_product_attention over all keys. masked: the same function as the original package's
models call it, with an additive mask of the topk scores and -inf elsewhere; masked+build: with the time to build it.
flex: compiled FlexAttention with the same interval mask as block mask (given) and the scores as score_mod. A peer that
finds no time within ``--seconds`` is listed as such.

GPU time (see measure.py, ``steps_ms``): up to 20 calls in one graph, each on arrays of its own (as many copies as 4 GiB
hold), as a decode step passes through the layers of a model. cold_ms: one call alone with an empty L2 cache, a few
microseconds of launch included. Copy bandwidth: bytes read plus bytes written by a copy of 2 GiB on the device, by a
kernel or a copy engine, the faster. Empty replay: wall time of a graph of one tiny kernel and the wait for it.

Check: every output, also the peers', against float64 in the first, the last and a drawn sequence, under the rule "at
most twice the error of the plain same-precision computation plus one rounding"; the keys in the cache must be exactly
the best of the whole history, and a replayed step must give the same bits as a call. If a check of this library fails
the run exits with 1 and leaves the recorded results alone.
"""
from __future__ import annotations

import functools
from typing import Any

from benchmarks.harness import render_decode, suite
from benchmarks.harness.decode_cases import Benchmark, Original, Serving, TooLarge
from benchmarks.harness.suite import Case

FREE_SHARE = 0.8  # of the free memory that a history may fill
COPY_BYTES = 2 * 2**30


def cases(which: str, quick: bool = False) -> list[Case]:
    if which == "smoke":
        return [Case("original", 2, 1, 16, 1, 256, 100, flex=True), Case("original", 2, 1, 16, 1, 64, 100),
                Case("serving", 4, 2, 16, 1, 70, 32, batch=3)]
    table = [Case("original", 2, 1, 64, 1, n, 1024, flex=n in (4096, 524288))
             for n in (256, 1024, 4096, 16384, 65536, 262144, 524288)]
    model = [Case("serving", heads, 8, 128, 1, n, 2048, batch=batch) for heads in (16, 32) for batch in (1, 8, 32, 128)
             for n in (4096, 32768, 131072, 1048576) if n <= 131072 or batch == 1]
    if quick:
        table = [case for case in table if case.key_length in (4096, 524288)]
        model = [case for case in model if (case.heads, case.batch, case.key_length) in
                 ((16, 32, 4096), (32, 8, 131072))]
    return {"table": table, "model": model, "all": table + model}[which]


def benchmark(case: Case) -> Benchmark:
    from benchmarks.harness import measure

    size = 4 * case.batch * case.key_length * case.kv_heads * case.head_dim  # keys and values in bfloat16
    if size > FREE_SHARE * measure.free_bytes():
        return TooLarge(case)
    return {"original": Original, "serving": Serving}[case.set](case)


def machine_limits() -> dict[str, Any]:
    """What bounds a step here: the copy bandwidth (bytes read and written, TB/s) and an empty graph's replay (us)."""
    import torch

    from benchmarks.harness import measure

    device, size = ("cuda", COPY_BYTES) if measure.on_gpu() else ("cpu", 2**20)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # In a graph the copy itself is left to a copy engine, which is slower than a kernel.
    ms = min(measure.gpu_ms(call)[0] for call in (functools.partial(target.copy_, source),
                                                  functools.partial(torch.bitwise_not, source.view(torch.int32),
                                                                    out=target.view(torch.int32))))
    nothing, _ = measure.captured(target[:1].zero_)
    limits = {"copy_tb_s": 2 * size / ms / 1e9, "empty_replay_us": measure.waited_us(nothing)}
    del source, target
    measure.free_memory()
    return limits


SUITE = suite.Suite(__doc__ or "", cases, benchmark, render_decode.DECODE, seconds=100, extra=machine_limits)


def main(arguments: list[str] | None = None) -> int:
    return suite.main(SUITE, arguments)
