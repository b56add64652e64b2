"""Calls that differ in one property get different programs: after one call has built its programs, each neighbouring
call gives the same result as with newly built programs."""
import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from cupy_dma.backends.cuda.runtime.program import fresh
from cupy_dma.backward import attention_backward, dynamic_mask_attention_backward

B, N, H, HKV, D, W = 2, 48, 2, 1, 16, 11


class Arrays:
    """The arrays of a call: every call gets new values at new addresses, and earlier arrays stay alive."""

    def __init__(self) -> None:
        self.rng, self.kept = np.random.default_rng(0), []

    def placed(self, x: np.ndarray, order: tuple[int, ...] | None = None, offset: int = 0) -> np.ndarray:
        """A copy with this ``order`` of axes in memory, ``offset`` elements after a multiple of 64 bytes."""
        order = order or tuple(range(x.ndim))
        memory = np.zeros(x.nbytes + 64 * x.itemsize + 64, np.uint8)
        self.kept.append(memory)
        begin = -memory.ctypes.data % 64 + offset * x.itemsize
        flat = memory[begin:begin + x.nbytes].view(x.dtype)
        found = flat.reshape([x.shape[axis] for axis in order]).transpose(np.argsort(order))
        found[...] = x
        return found

    def normal(self, *shape: int, dtype: str = "float16") -> np.ndarray:
        return self.rng.standard_normal(shape).astype(numpy_dtype(dtype))


def interval_mask(arrays: Arrays, kind: str, keys: int, places: dict[str, Any]) -> Any:
    """A mask by the name of its special property; all but the last have arrays of the same shapes."""
    start = np.arange(keys, dtype=np.int32)
    lives = arrays.rng.integers(1, W, (B, HKV, keys))
    stop = (start + lives).astype(np.int32)
    if kind == "dense":
        return arrays.placed(arrays.rng.random((B, H, N, keys)) < 0.5, **places.get("mask", {}))
    if kind == "everything":  # plain causality, and its hints say so
        stop[...] = 2**31 - 1
        return dma.IntervalMask._make(dma.IntervalMask.causal(keys).library, start, stop,
                                      dma.IntervalMask.causal(keys)._hints)
    if kind == "window":
        return dma.IntervalMask.from_stop(arrays.placed(stop, **places.get("stop", {})), window=W)
    if kind == "wider window":
        return dma.IntervalMask.from_stop(arrays.placed(stop, **places.get("stop", {})), window=2 * W)
    if kind == "open":
        return dma.IntervalMask(np.full(keys, -5, np.int32), stop)
    if kind == "starts of each head":
        start = np.broadcast_to(start, stop.shape)
    return dma.IntervalMask(arrays.placed(start), arrays.placed(stop, **places.get("stop", {})))


def attend(arrays: Arrays, queries: int = N, keys: int = N, heads: int = H, kv_heads: int = HKV, head_dim: int = D,
           dtype: str = "float16", mask: str | None = "window", bias: tuple[int, ...] | None = (B, HKV, N),
           bias_dtype: str = "float32", places: dict[str, dict[str, Any]] | None = None,
           needs: tuple[str, ...] | None = None, with_dlse: bool = False, deterministic: bool = False,
           **options: Any) -> list[Any]:
    """Results and gradients of attention, with programs of earlier calls and with newly built ones."""
    places = places or {}
    shapes = {"query": (queries, heads), "key": (keys, kv_heads), "value": (keys, kv_heads), "dout": (queries, heads)}
    x = {name: arrays.placed(arrays.normal(B, *shape, head_dim, dtype=dtype), **places.get(name, {}))
         for name, shape in shapes.items()}
    if mask is not None:
        options["mask"] = interval_mask(arrays, mask, keys, places)
    if bias is not None:
        options["bias"] = arrays.placed(arrays.normal(*bias, dtype=bias_dtype), **places.get("bias", {}))
    dlse = arrays.normal(B, heads, queries, dtype="float32") if with_dlse else None
    rows, results = (x["query"], x["key"], x["value"]), []
    needs = ("query", "key", "value", *(["bias"] if bias is not None else [])) if needs is None else needs
    for keep in (True, False):
        with contextlib.nullcontext() if keep else fresh():
            out, lse = dma.attention(*rows, **options, return_lse=True, backend="emulator")
            placed = arrays.placed(out, **places.get("out", {}))
            found = attention_backward(x["dout"], *rows, placed, lse, **options, dlse=dlse, needs=needs,
                                       deterministic=deterministic, backend="emulator")
        results.append([out, lse, *found])
    return results


def select(arrays: Arrays, computed: bool = False, places: dict[str, dict[str, Any]] | None = None,
           dtype: str = "float32", padded: bool = False, window: int = W, **options: Any) -> list[Any]:
    """The same for attention from scores, given or computed."""
    places = places or {}
    q, k, v, dout = (arrays.placed(arrays.normal(B, N, heads, D), **places.get(name, {})) for name, heads in (
        ("query", H), ("key", HKV), ("value", HKV), ("dout", H)))
    given = {"scores": arrays.normal(B, HKV, N, dtype=dtype)}
    if computed:
        given = {"dt_proj": arrays.normal(HKV, HKV * D, dtype=dtype), "A": arrays.normal(HKV, dtype=dtype),
                 "dt_bias": arrays.normal(HKV, dtype=dtype)}
    options |= {name: arrays.placed(x, **places.get(name, {})) for name, x in given.items()}
    if padded:
        options["padding"] = arrays.placed(arrays.rng.random((B, N)) < 0.7, **places.get("padding", {}))
    results = []
    for keep in (True, False):
        with contextlib.nullcontext() if keep else fresh():
            out, lse = dma.dynamic_mask_attention(q, k, v, window=window, **options, return_lse=True,
                                                  backend="emulator")
            found = dynamic_mask_attention_backward(dout, q, k, v, out, lse, window=window, **options,
                                                    deterministic=True, backend="emulator")
        results.append([out, lse, *found])
    return results


def check(call: Callable[..., list[Any]], first: dict[str, Any], neighbours: dict[str, dict[str, Any]]) -> None:
    """Run each neighbour after the first call, then once more, then the first call again."""
    arrays = Arrays()
    call(arrays, **first)
    kinds = [(name, first | change) for name, change in neighbours.items() for _ in range(2)]
    for name, facts in (*kinds, ("the first kind", first)):
        for found, expected in zip(*call(arrays, **facts)):
            assert (found is None) == (expected is None)
            assert found is None or found.tobytes() == expected.tobytes(), name


def at(**places: Any) -> dict[str, Any]:
    """One array with another memory layout: another order of axes, or an offset in elements."""
    return {"places": {name: {"offset": place} if isinstance(place, int) else {"order": place}
                       for name, place in places.items()}}


CALLS: dict[str, tuple[Callable[..., list[Any]], dict[str, Any], dict[str, dict[str, Any]]]] = {
    "strides and alignment of rows": (attend, {
        "heads": 4, "kv_heads": 2, "bias": None, "mask": None, "causal": True}, {
        f"{name} {place}": at(**{name: place}) for name in ("query", "key", "value", "dout", "out")
        for place in ((0, 2, 1, 3), 3)}),
    "strides and alignment of interval masks": (attend, {}, {
        "bias of keys first": at(bias=(2, 0, 1)), "bias at an odd address": at(bias=1),
        "stop at an odd address": at(stop=1), "starts of each head": {"mask": "starts of each head"}}),
    "strides and alignment of dense masks": (attend, {"mask": "dense", "bias": (B, H, N, N), "bias_dtype": "float16"}, {
        "mask of heads first": at(mask=(1, 0, 2, 3)), "mask of queries first": at(mask=(2, 0, 1, 3)),
        "mask at an odd address": at(mask=1), "bias of heads first": at(bias=(1, 0, 2, 3)),
        "bias of queries first": at(bias=(2, 0, 1, 3)), "bias at an odd address": at(bias=3)}),
    "hints and kinds of masks": (attend, {}, {str(kind): {"mask": kind} for kind in (
        "everything", "wider window", "unknown", "starts of each head", "open", "dense", None)}),
    "biases": (attend, {"heads": 4, "kv_heads": 2, "mask": None, "causal": True, "bias": (B, 2, N)}, {
        "none": {"bias": None}, "of query heads": {"bias": (B, 4, N)}, "shared": {"bias": (1, 1, N)},
        "of 16 bits": {"bias_dtype": "float16"}, "dense": {"bias": (1, 1, N, N)},
        "one for all keys": {"bias": (B, 2, 1, 1)}}),
    "options": (attend, {"scale": 0.3, "softcap": 2.0}, {
        "scale": {"scale": 0.2}, "negative scale": {"scale": -0.3}, "softcap": {"softcap": 3.0},
        "no softcap": {"softcap": 0.0}, "causal": {"causal": True}, "deterministic": {"deterministic": True},
        "dlse": {"with_dlse": True}, "query": {"needs": ("query",)}, "key and bias": {"needs": ("key", "bias")}}),
    "shapes and types": (attend, {"heads": 4, "kv_heads": 2, "mask": None, "causal": True, "bias": None}, {
        "queries": {"queries": N - 1}, "keys": {"keys": N + 1}, "heads": {"heads": 2}, "kv heads": {"kv_heads": 4},
        "dtype": {"dtype": "bfloat16"}}),
    "scores": (select, {}, {
        "window": {"window": W + 1}, "everything": {"window": N}, "global": {"keys": "global"},
        "padding": {"padded": True}, "documents": {"documents": np.array([0, N // 3, N], np.int32)},
        "scores of 16 bits": {"dtype": "float16"}, "later heads first": at(scores=(1, 2, 0)),
        "computed": {"computed": True}}),
    "parameters of scores": (select, {"computed": True}, {
        "linear": {"form": "linear"}, "16 bits": {"dtype": "float16"}, "dt_proj at an odd address": at(dt_proj=1),
        "value at an odd address": at(value=1), "value transposed": at(value=(1, 0, 2, 3))})}


@pytest.mark.parametrize("name", CALLS)
def test_neighbours_have_programs_of_their_own(name):
    check(*CALLS[name])
