"""Step 4: step 3 as a CUDA kernel (step4_kernel.cu), on a GPU or, without one, on the CPU emulator of this checkout.

    python examples/ladder/step4_kernel.py
    python examples/ladder/step4_kernel.py --length 16384 --window 1024 --head-dim 64     on a GPU

New: a CTA per tile, a thread per query, keys and values gathered into shared memory. ``cupy_dma.jit`` compiles the
source, reads its parameter struct and launches it. The emulator also checks every access of every thread.

On a GPU the script also times the library's own kernel, and the last lines say what that kernel does in addition.
"""
from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import cupy_dma as dma
from examples.ladder.step2_intervals import stops
from examples.ladder.step3_gathered_tiles import BLOCK_M, BLOCK_N, key_list

SOURCE = Path(__file__).with_suffix(".cu")
AHEAD = """The library's forward ({lines} lines in kernels/common, sm80 and sm90; this one has {own}) also has:
  tensor cores, in 16-bit types: on an H100 about 15 times as many products per second as float32 without them
  asynchronous copies: the next keys are gathered while these are multiplied (on Hopper by dedicated warps)
  key lists and selection on the GPU, from the intervals; keys that need no mask are listed separately
  GQA (the query heads of a group share the gathered rows), batches, packed sequences, softcap, any strides, lse
  a schedule: which tile goes to which SM, and tiles and keys split where SMs would idle
The gradients need two more passes over the same lists."""


@cache
def kernel(d):
    return dma.jit(SOURCE, defines={"D": d, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N})


def lists(stop):
    """The concatenated key lists of all tiles, int32, and the start of each, ``(tiles + 1)``."""
    n = len(stop)
    found = [key_list(stop, first, min(first + BLOCK_M, n) - 1) for first in range(0, n, BLOCK_M)]
    return np.concatenate(found).astype(np.int32), np.cumsum([0, *map(len, found)]).astype(np.int32)


def prepare(q, k, v, score, w, xp):
    """A function without arguments that launches the kernel on arrays of ``xp``, and the array that it fills."""
    (n, d), stop = q.shape, stops(score, w)
    keys, first = lists(stop)
    arrays = {name: xp.asarray(x) for name, x in (("q", q), ("k", k), ("v", v), ("score", score), ("stop", stop),
                                                  ("keys", keys), ("first", first))}
    out = xp.zeros((n, d), np.float32)
    return lambda: kernel(d)(len(first) - 1, BLOCK_M, **arrays, out=out, n=n, scale=d**-0.5), out


def on_gpu():
    return "cuda" in dma.get_available_backends()


def attention(q, k, v, score, w):
    if on_gpu():
        import cupy

        launch, out = prepare(q, k, v, score, w, cupy)
        launch()
        return out.get()
    import tests.emulator  # noqa: F401 - what the kernel runs on without a GPU

    launch, out = prepare(q, k, v, score, w, np)
    launch()
    return out


def compare(n, w, d):
    """The speedup of the library's own kernels on this GPU, including their key lists; bfloat16."""
    import cupy
    import ml_dtypes
    from cupyx.profiler import benchmark

    from examples.ladder.check import inputs

    q, k, v, score = inputs(n, d)
    launch, _ = prepare(q, k, v, score, w, cupy)
    query, key, value = (cupy.asarray(x).astype(ml_dtypes.bfloat16)[None, :, None] for x in (q, k, v))
    bias = cupy.asarray(score)[None, None]
    mask = dma.IntervalMask.top_w(bias, w)
    times = [float(benchmark(f, n_warmup=3, n_repeat=20).gpu_times.mean()) for f in (
        launch, lambda: dma.attention(query, key, value, mask=mask, bias=bias))]
    print(f"on {cupy.cuda.runtime.getDeviceProperties(0)['name'].decode()}, {n} tokens, window {w}, D {d}, one head: "
          f"this kernel {1e3 * times[0]:.3f} ms, cupy_dma.attention in bfloat16 {1e3 * times[1]:.3f} ms, "
          f"{times[0] / times[1]:.0f} times as fast")


def main(arguments=None):
    from examples.ladder import check
    from examples.ladder.step3_gathered_tiles import attention as before

    status = check.main(attention, before, arguments)
    print("ran on", "the GPU" if on_gpu() else "the CPU emulator, whose time says nothing about a GPU")
    if on_gpu():
        compare(16384, 1024, 64)
    kernels = SOURCE.parents[2] / "kernels"
    files = [path for folder in ("common", "sm80", "sm90") for path in (kernels / folder).glob("*.cu*")
             if "backward" not in path.name]
    print(AHEAD.format(lines=sum(path.read_text().count("\n") for path in files), own=SOURCE.read_text().count("\n")))
    return status


if __name__ == "__main__":
    sys.exit(main())
