"""Plans: launches recorded on stand-ins and repeated, under the emulator, against the calls that they stand for."""
from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from cupy_dma.backends.cuda.runtime import plans
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


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_a_plan_gives_what_its_call_gives(case, device, calls):
    run = functools.partial(cases.run_backward, case, np.ascontiguousarray, with_dlse=True, backend="emulator")
    found = [run() for _ in range(3)]
    assert (calls["refused"] > 0) == (case.name in SIXTEEN_BIT_BIASES)
    assert calls["run"] >= 2 * calls["made"] and (calls["made"] > 0 or calls["refused"] > 0)
    for gradients in found[1:]:
        same(found[0], gradients)
