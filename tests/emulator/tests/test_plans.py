"""Plans: launches recorded on stand-ins and repeated, under the emulator, against the calls that they stand for."""
from __future__ import annotations

import functools
import weakref
from typing import Any

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from cupy_dma.backends.cuda.lists import intervals
from cupy_dma.backends.cuda.runtime import plans
from cupy_dma.backends.cuda.runtime.launches import Launches
from cupy_dma.backward import dynamic_mask_attention_backward
from tests import emulator
from tests.oracle import cases

NAMES = ("bfloat16-D64", "float32-", "mask-", "causal-and-", "window-1", "bias-", "softcap-key", "layout-",
         "lengths-33x129", "dense-both", "dense-columns")
CHOSEN = [case for case in cases.CASES if case.name.startswith(NAMES) and case.dtype != "float64"][::4]
SIXTEEN_BIT_BIASES = ("bias-key_per_head-none",)  # the library makes them float32: not planned


@pytest.fixture
def calls(monkeypatch):
    """Which plans were made and run."""
    seen: dict[str, int] = {"made": 0, "run": 0, "refused": 0}
    make, run = plans._made, plans.Plan.run

    def made(function: Any, *arguments: Any) -> Any:
        plan = make(function, *arguments)
        seen["made" if isinstance(plan, plans.Plan) else "refused"] += 1
        return plan

    def ran(plan: plans.Plan, *arguments: Any) -> Any:
        seen["run"] += 1
        return run(plan, *arguments)

    monkeypatch.setattr(plans, "_made", made)
    monkeypatch.setattr(plans.Plan, "run", ran)
    return seen


@pytest.fixture(params=[False, True], ids=["portable", "hopper"])
def device(request, monkeypatch):
    """An emulated device whose calls are planned."""
    run = emulator.Backend._run

    @functools.cache
    def planned(function):
        return plans.planned(function)

    monkeypatch.setattr(emulator.Backend, "_run",
                        lambda backend, function, *rest: run(backend, planned(function), *rest))
    with (emulator.hopper_gpu if request.param else emulator.using)() as runtime, plans.switched(True):
        yield runtime


def same(first: Any, second: Any) -> None:
    for x, y in zip(first, second):
        assert (x is None) == (y is None)
        if x is not None:
            np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


def moved(kept: list[np.ndarray]) -> Any:
    """Copies arrays, which stay alive: an address of an earlier call is out of bounds in a later one."""
    def copied(x: np.ndarray) -> np.ndarray:
        kept.append(np.array(x, order="C"))
        return kept[-1]

    return copied


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_a_plan_gives_what_its_call_gives(case, device, calls):
    convert = moved([])
    found = [cases.run_backward(case, convert, with_dlse=True, backend="emulator") for _ in range(3)]
    assert (calls["refused"] > 0) == (case.name in SIXTEEN_BIT_BIASES)
    assert calls["run"] >= 2 * calls["made"] and (calls["made"] > 0 or calls["refused"] > 0)
    for gradients in found[1:]:
        same(found[0], gradients)


@pytest.mark.parametrize("parameter", ["float32", "bfloat16"])
def test_the_whole_chain_is_planned(parameter, device, calls):
    """Scores, selection, lists, attention and all gradients, of other values in each call."""
    rng, convert, made = np.random.default_rng(0), moved([]), None
    for i in range(3):
        q, k, v, dout = (convert(rng.standard_normal((1, 200, heads, 64)).astype(numpy_dtype("bfloat16")))
                         for heads in (4, 2, 2, 4))
        weights = [convert(rng.standard_normal(shape).astype(numpy_dtype(parameter)))
                   for shape in ((2, 128), (2,), (2,))]
        options = dict(zip(("dt_proj", "A", "dt_bias"), weights)) | {"window": 30}
        results = []
        for planning in (True, False):
            with plans.switched(planning):
                out, lse = dma.dynamic_mask_attention(q, k, v, **options, return_lse=True, backend="emulator")
                found = dynamic_mask_attention_backward(dout, q, k, v, out, lse, **options, deterministic=True,
                                                        backend="emulator")
            results.append((out, lse, *found))
        same(*results)
        made = calls["made"] if i == 1 else made
    assert calls["refused"] == 0 and calls["made"] == made >= 6 and calls["run"] >= 2 * made


def test_lists_that_no_mask_keeps_live_until_their_launch(device, monkeypatch):
    """As in a capture, where a mask keeps nothing."""
    made, alive = [], []

    def not_kept(mask: Any, identity: Any, stream: Any, make: Any) -> Any:
        found = make()
        if hasattr(found, "workspace"):
            made.append(weakref.ref(found.workspace))
        return found

    monkeypatch.setattr(plans, "kept", not_kept)
    monkeypatch.setattr(intervals, "kept", not_kept)
    launch = Launches.run
    monkeypatch.setattr(Launches, "run", lambda *own: (alive.append(made[-1]() is not None if made else None),
                                                       launch(*own))[1])
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 70, 1, 16)).astype(np.float16) for _ in range(3))
    mask = dma.IntervalMask.sliding_window(70, 8)
    expected = dma.attention(q, k, v, mask=mask, backend="numpy")
    for _ in range(4):
        found = dma.attention(q, k, v, mask=mask, backend="emulator")
        assert np.abs(found.astype(np.float32) - expected).max() < 3e-3
    assert made and alive and alive[-1]
