"""Runs the prototype of the Hopper backward on the CPU emulator, with its race detector, and prints relative errors.

    PYTHONPATH=. python docs/lab/prototypes/hopper_backward_emulated.py ORDER HEAD_DIM BLOCK_Q

ORDER 0, 1 or 2; HEAD_DIM 64 or 128; BLOCK_Q 64 or, with HEAD_DIM 64, 128.
"""
from __future__ import annotations

import struct
import sys
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np

import cupy_dma as dma
from cupy_dma.arrays import library_named
from cupy_dma.backends.cuda.attention import tma
from cupy_dma.backends.cuda.runtime import jit
from tests import emulator
from tests.emulator import build

SOURCE = Path(__file__).with_suffix("").with_name("hopper_backward.cu")
BATCH, N, HEADS, KV_HEADS, WINDOW, SUPER, BLOCK_N = 1, 300, 2, 1, 60, 256, 128


def super_lists(start: np.ndarray, stop: np.ndarray) -> list[list[int]]:
    """Keys of each super-tile: those that die in it, those that all of it sees, those that enter."""
    lists = []
    for first in range(0, N, SUPER):
        last = min(first + SUPER, N) - 1
        seen = [j for j in range(N) if start[j] < stop[j] and start[j] <= last and stop[j] > first]
        lists.append(sorted(seen, key=lambda j: (0 if stop[j] <= last else 1 if start[j] <= first else 2, j)))
    return lists


def source() -> str:
    folder = jit.kernels_directory()
    jit.source_text.cache_clear()
    with mock.patch.object(jit, "kernels_directory", lambda: Overlay(folder)):
        return build.with_twins(jit.source_text("prototype.cu"))


class Overlay:
    """The folder of the kernels, with the prototype in it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __truediv__(self, file: str) -> Path:
        return SOURCE if file == "prototype.cu" else self.folder / file


def main(order: int, head_dim: int, block_q: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((BATCH, N, heads, head_dim)).astype(ml_dtypes.bfloat16)
                     for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    scores = rng.standard_normal((BATCH, KV_HEADS, N)).astype(np.float32)
    mask = dma.IntervalMask.top_w(scores, WINDOW)
    out, lse = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True, backend="numpy")
    expected = dma.backward.attention_backward(dout, q, k, v, out, lse, mask=mask, bias=scores, backend="numpy")
    start, stop = (np.ascontiguousarray(np.broadcast_to(x, scores.shape)) for x in (mask.start, mask.stop))
    lists = super_lists(start[0, 0], stop[0, 0])
    capacity = -(-(WINDOW + SUPER - 1) // BLOCK_N) * BLOCK_N
    listed, lengths = np.zeros((len(lists), capacity), np.int32), np.array([len(x) for x in lists], np.int32)
    for row, found in zip(listed, lists):
        row[:len(found)] = found
    tiles, entries, group = -(-N // block_q), len(lists) * capacity, HEADS // KV_HEADS
    made = {"statistics": np.zeros((2, HEADS, tiles * block_q), np.float32),
            "sums": np.zeros(HEADS * tiles * block_q * head_dim, np.float32),
            "semaphores": np.zeros(HEADS * tiles * 2, np.int32), "ranges": np.zeros(2 * entries // BLOCK_N, np.int32),
            "partial_key": np.zeros((entries, head_dim), np.float32),
            "partial_value": np.zeros((entries, head_dim), np.float32),
            "partial_bias": np.zeros((entries, group), np.float32), "dquery": np.zeros(q.shape, ml_dtypes.bfloat16)}
    read = {"query": q, "key": k, "value": v, "dout": dout, "out": out, "lse": lse, "bias": scores, "start": start,
            "stop": stop, "super_list": listed, "super_lengths": lengths}
    fields = {name: x.ctypes.data for name, x in (read | made).items()}
    for name in ("query", "key", "value", "dout", "out"):
        fields |= {f"{name}_{axis}": read[name].strides[i] // 2 for i, axis in enumerate(("batch", "row", "head"))}
    fields |= {"bias_batch": N, "bias_group": N, "bias_key": 1, "start_batch": N, "start_head": N, "stop_batch": N,
               "stop_head": N, "mask_batch": 1, "mask_group": 1, "mask_heads": 1, "batch": BATCH, "query_length": N,
               "key_length": N, "heads": HEADS, "kv_heads": KV_HEADS, "supers": len(lists), "super_capacity": capacity,
               "super_queries": SUPER, "super_entries": entries, "scale": head_dim**-0.5}
    struct_of = jit.params("common/params.cuh", "AttentionParams")
    macros = {"ELEMENT": "__nv_bfloat16", "HEAD_DIM": head_dim, "STAGES": 2, "LISTED": 1, "CAUSAL": 0, "BIAS": 1,
              "DQ": order, "BLOCK_Q": block_q, "SHIFT": int(order == 1), "MOST": 1}
    text = "".join(f"#define {name} {value}\n" for name, value in macros.items()) + source()
    with emulator.hopper_gpu() as runtime, runtime.memory.session() as session:
        describe = library_named("numpy").describe
        packed = b"".join(tma.queries_map(describe(x, "rows"), block_q, 1) or b"" for x in (q, dout))
        packed += struct_of.pack_some({name: x for name, x in fields.items() if name in struct_of.names})
        packed += struct.pack("@PPPPii", *(fields[name] for name in ("statistics", "sums", "semaphores", "ranges")),
                              tiles * block_q, tiles)
        packed += bytes(-len(packed) % 64)
        for name, x in read.items():
            session.readable(x, name)
        for name, x in made.items():
            build.driver().initialise_region(session.writable(x, name))
        launches = [("prepare", tiles * block_q * HEADS // 8, 256), ("find_ranges", entries // BLOCK_N, 128),
                    ("backward_kv", entries // BLOCK_N, 384)]
        if order:
            launches.append(("convert_dq", HEADS * tiles, 256))
        for entry, grid, threads in launches:
            shared = 226 * 1024 if entry == "backward_kv" else 0
            runtime.load_text(text, entry, shared).launch(grid, threads, packed)
    dk, dv, dbias = np.zeros((N, head_dim)), np.zeros((N, head_dim)), np.zeros(N)
    for i, found in enumerate(lists):
        rows = slice(i * capacity, i * capacity + len(found))
        dk[found] += made["partial_key"][rows]
        dv[found] += made["partial_value"][rows]
        dbias[found] += made["partial_bias"][rows].sum(1)
    pairs = {"dk": (dk, expected.key[0, :, 0]), "dv": (dv, expected.value[0, :, 0]),
             "dbias": (dbias, expected.bias[0, 0])}
    if order:
        pairs["dq"] = made["dquery"], expected.query
    for name, (x, y) in pairs.items():
        difference = x.astype(np.float64) - y.astype(np.float64)
        print(name, np.linalg.norm(difference) / np.linalg.norm(y.astype(np.float64)))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
