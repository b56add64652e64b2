"""Programs under the emulator: a program from an earlier call gives the same bits as a newly built one."""
import weakref
from typing import Any

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from cupy_dma.backends.cuda.runtime import program
from cupy_dma.backends.cuda.runtime.builder import Builder
from cupy_dma.backends.cuda.runtime.program import fresh, overridden
from cupy_dma.backward import dynamic_mask_attention_backward, key_scores_backward
from tests import emulator
from tests.emulator.tests.test_forward import check_bits
from tests.oracle import cases

NAMES = ("bfloat16-D64", "float32-", "mask-", "causal-and-", "window-1", "bias-", "softcap-key", "layout-",
         "lengths-33x129", "dense-both", "dense-columns")
CHOSEN = [case for case in cases.CASES if case.name.startswith(NAMES) and case.dtype != "float64"][::7]


@pytest.fixture(params=[False, True], ids=["portable", "hopper"])
def device(request):
    """A device without programs."""
    with (emulator.hopper_gpu if request.param else emulator.using)() as runtime:
        yield runtime


@pytest.fixture
def built(monkeypatch):
    """The builders of all programs made in a test."""
    made: list[Builder] = []
    monkeypatch.setattr(program, "Builder", lambda *arguments: made.append(Builder(*arguments)) or made[-1])
    return made


def moved(kept: list[np.ndarray]) -> Any:
    """Copies arrays, which stay alive: an address of an earlier call is out of bounds in a later one."""
    def copied(x: np.ndarray) -> np.ndarray:
        kept.append(np.array(x, order="C"))
        return kept[-1]

    return copied


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_later_calls_run_the_programs_of_the_first(case, device, built):
    convert = moved([])
    found = [cases.run_backward(case, convert, with_dlse=True, backend="emulator")]
    count = len(built)
    found += [cases.run_backward(case, convert, with_dlse=True, backend="emulator") for _ in range(2)]
    assert len(built) == count > 0
    for gradients in found[1:]:
        check_bits(found[0], gradients)


@pytest.mark.parametrize("parameter", ["float32", "bfloat16"])
def test_the_whole_chain(parameter, device, built):
    """Scores, selection, lists, attention and all gradients, with new values in each call."""
    rng, convert, counts = np.random.default_rng(0), moved([]), []
    for _ in range(3):
        q, k, v, dout = (convert(rng.standard_normal((1, 200, heads, 64)).astype(numpy_dtype("bfloat16")))
                         for heads in (4, 2, 2, 4))
        weights = [convert(rng.standard_normal(shape).astype(numpy_dtype(parameter)))
                   for shape in ((2, 128), (2,), (2,))]
        options = dict(zip(("dt_proj", "A", "dt_bias"), weights)) | {"window": 30}

        def results() -> tuple[Any, ...]:
            out, lse = dma.dynamic_mask_attention(q, k, v, **options, return_lse=True, backend="emulator")  # noqa: B023
            return out, lse, *dynamic_mask_attention_backward(
                dout, q, k, v, out, lse, **options, deterministic=True, backend="emulator")  # noqa: B023

        found = results()
        counts.append(len(built))
        with fresh():
            check_bits(found, results())
        counts.append(len(built))
    first, second, *_ = steps = np.diff([0, *counts])
    assert list(steps[2::2]) == [0, 0] and list(steps[3::2]) == [second, second] and first > 0


def test_overrides_have_programs_of_their_own(monkeypatch):
    """The overrides imitate cards with less shared memory: their tiles, and at most as many blocks per SM."""
    rng, loaded = np.random.default_rng(0), []
    q, k, v = (rng.standard_normal((1, 70, 1, 64)).astype(np.float16) for _ in range(3))
    with emulator.using() as runtime:
        load = runtime.load
        monkeypatch.setattr(runtime, "load", lambda *own: loaded.append(own) or load(*own))
        for limit in (99, 163, 99):
            with overridden(shared_memory=limit * 1024):
                dma.attention(q, k, v, backend="emulator")
        dma.attention(q, k, v, backend="emulator")
    loaded = [own for own in loaded if own[1] == "attention_forward"]
    needed = [config.shared_bytes for config, *_ in loaded]
    blocks = [228 * 1024 // (shared + 1024) for *_, shared in loaded]
    assert max(needed) <= 99 * 1024 and blocks == [(limit + 1) * 1024 // (n + 1024)
                                                   for limit, n in zip((99, 163, 227), needed)]


def test_the_least_recently_used_go(device, monkeypatch, built):
    monkeypatch.setattr(program, "MAX_PROGRAMS", 3)
    rng = np.random.default_rng(0)

    def call(length: int) -> int:
        before = len(built)
        q, k, v = (rng.standard_normal((1, length, 1, 16)).astype(np.float16) for _ in range(3))
        dma.attention(q, k, v, causal=True, backend="emulator")
        return len(built) - before

    assert [call(n) for n in (20, 21, 22, 20, 23)] == [1, 1, 1, 0, 1]  # evicts 21
    assert [call(n) for n in (20, 22, 23, 21)] == [0, 0, 0, 1]


def test_lists_that_no_mask_keeps_live_until_their_launch(device, monkeypatch):
    """In a capture, for example, masks keep no lists."""
    made, alive = [], []

    def not_kept(mask: Any, identity: Any, stream: Any, make: Any) -> Any:
        found = make()
        made.extend(weakref.ref(x) for x in found.arrays)
        return found

    launch = program.Program.run_at
    monkeypatch.setattr(program, "kept", not_kept)
    monkeypatch.setattr(program.Program, "run_at", lambda *own: (
        alive.append(made[-1]() is not None if made else None), launch(*own))[1])
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 70, 1, 16)).astype(np.float16) for _ in range(3))
    mask = dma.IntervalMask.sliding_window(70, 8)
    expected = dma.attention(q, k, v, mask=mask, backend="numpy")
    for _ in range(4):
        found = dma.attention(q, k, v, mask=mask, backend="emulator")
        assert np.abs(found.astype(np.float32) - expected).max() < 3e-3
    assert made and alive and alive[-1]


def test_arrays_of_no_size_in_a_workspace(device, monkeypatch):
    """With 20 heads, gradients of scores need workspace, which here has size 0."""
    monkeypatch.setattr(device, "separate_arrays", False)
    value, dscores = np.zeros((1, 0, 20, 64), np.float16), np.zeros((1, 20, 0), np.float32)
    weights = np.zeros((20, 20 * 64), np.float32), np.ones(20, np.float32)
    found = key_scores_backward(dscores, value, *weights, backend="emulator")
    assert found.value.shape == value.shape and not any(x.any() for x in found[1:] if x is not None)
