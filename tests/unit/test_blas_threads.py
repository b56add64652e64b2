"""The NumPy backend multiplies with one BLAS thread, and leaves the user's number of threads as it was."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest
import threadpoolctl
from threadpoolctl import ThreadpoolController

import cupy_dma as dma
from cupy_dma.backends.numpy import backward, forward, scores
from cupy_dma.backends.numpy.threads import one_blas_thread

BLAS = ThreadpoolController().select(user_api="blas")
OTHERS = 3  # threads that the user wants
pytestmark = pytest.mark.skipif(not BLAS.lib_controllers, reason="threadpoolctl does not know NumPy's BLAS")


def threads() -> list[int]:
    return [library.num_threads for library in BLAS.lib_controllers]


@pytest.fixture(params=[1, OTHERS])
def users(request):
    """What the user has set: the number of threads of each BLAS library."""
    before = threads()
    _set([request.param] * len(before))
    yield threads()
    _set(before)


def _set(numbers: list[int]) -> None:
    for library, number in zip(BLAS.lib_controllers, numbers):
        library.set_num_threads(number)
    if hasattr(threadpoolctl.OpenBLASController, "clear_controlling_thread"):  # or other threads cannot set it
        threadpoolctl.OpenBLASController.clear_controlling_thread()
    assert threads() == numbers


def draw():
    rng = np.random.default_rng(0)
    q, do = rng.standard_normal((2, 2, 60, 4, 16), np.float32)
    k, v = rng.standard_normal((2, 2, 60, 2, 16), np.float32)
    return do, q, k, v, rng.standard_normal((2, 2, 60), np.float32)


def everything():
    """Every function of the backend that multiplies matrices."""
    do, q, k, v, s = draw()
    mask = dma.IntervalMask.top_w(s, window=20)
    out, lse = dma.attention(q, k, v, mask=mask, bias=s, return_lse=True)
    dma.backward.attention_backward(do, q, k, v, out, lse, mask=mask, bias=s)
    dt_proj, A = np.ones((2, 32), np.float32), np.ones(2, np.float32)
    dma.key_scores(v, dt_proj, A)
    dma.backward.key_scores_backward(s, v, dt_proj, A)
    cache = dma.DynamicCache(2, 2, 20, 16, dtype=np.float32)
    cache.extend(q[:, :1], k[:, :1], v[:, :1], s[:, :, :1])


def watch(monkeypatch, module, name, seen, fail=False):
    """Note how many threads BLAS has whenever ``module.name`` runs."""
    right = getattr(module, name)

    def watched(*arguments, **options):
        seen.append(threads())
        if fail:
            raise FloatingPointError("in the middle")
        return right(*arguments, **options)

    monkeypatch.setattr(module, name, watched)


INSIDE = [(forward, "logits"), (forward, "weighted_sum"), (backward, "logits"), (backward, "weighted_sum")]


@pytest.mark.parametrize(("module", "name"), INSIDE, ids=lambda x: getattr(x, "__name__", x))
def test_products_have_one_thread(module, name, users, monkeypatch):
    seen: list[list[int]] = []
    watch(monkeypatch, module, name, seen)
    everything()
    assert seen
    assert all(number == 1 for numbers in seen for number in numbers)
    assert threads() == users


class Watched(np.ndarray):
    """An array whose products note the number of threads."""

    seen: list[list[int]]

    def __matmul__(self, other):
        Watched.seen.append(threads())
        return np.asarray(self) @ np.asarray(other)

    def __rmatmul__(self, other):
        return Watched.__matmul__(other, self)


def test_products_of_scores_have_one_thread(users, monkeypatch):
    right = scores.host
    monkeypatch.setattr(scores, "host", lambda operand: right(operand).view(Watched))
    Watched.seen = []
    everything()
    assert len(Watched.seen) >= 4
    assert all(number == 1 for numbers in Watched.seen for number in numbers)
    assert threads() == users


@pytest.mark.parametrize(("module", "name"), INSIDE, ids=lambda x: getattr(x, "__name__", x))
def test_an_exception_restores_the_number(module, name, users, monkeypatch):
    watch(monkeypatch, module, name, [], fail=True)
    with pytest.raises(FloatingPointError):
        everything()
    assert threads() == users


def test_the_first_of_two_calls_ends_first(users):
    """The second finds one thread, which is the first call's limit, not the user's number."""
    first_inside, second_inside, first_left = Event(), Event(), Event()

    def first():
        with one_blas_thread():
            first_inside.set()
            assert second_inside.wait(10)
        first_left.set()

    def second():
        assert first_inside.wait(10)
        with one_blas_thread():
            second_inside.set()
            assert first_left.wait(10)

    with ThreadPoolExecutor(2) as pool:
        for call in [pool.submit(first), pool.submit(second)]:
            call.result(20)
    assert threads() == users


def test_many_concurrent_calls(users):
    with ThreadPoolExecutor(4) as pool:
        for call in [pool.submit(everything) for _ in range(16)]:
            call.result(60)
    assert threads() == users


def test_nested(users):
    with one_blas_thread():
        with one_blas_thread():
            assert threads() == [1] * len(users)
        assert threads() == [1] * len(users)
    assert threads() == users
