"""The NumPy backend multiplies with one BLAS thread, and leaves the user's number of threads as it was."""
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread, get_ident
from types import SimpleNamespace

import numpy as np
import pytest
import threadpoolctl

import cupy_dma as dma
from cupy_dma.backends.numpy import backward, forward, scores
from cupy_dma.backends.numpy import threads as of_backend
from cupy_dma.backends.numpy.threads import one_blas_thread

BLAS = of_backend._blas()  # libraries loaded later do not matter
OTHERS = 3  # the user's number of threads
pytestmark = pytest.mark.skipif(not BLAS.lib_controllers, reason="threadpoolctl does not know NumPy's BLAS")


def threads() -> list[int]:
    return [library.num_threads for library in BLAS.lib_controllers]


@pytest.fixture(params=[1, OTHERS])
def users(request):
    """The user's setting: the number of threads of each BLAS library."""
    before = threads()
    _set([request.param] * len(before))
    yield threads()
    _set(before)


def _set(numbers: list[int]) -> None:
    for library, number in zip(BLAS.lib_controllers, numbers):
        library.set_num_threads(number)
    if hasattr(threadpoolctl.OpenBLASController, "clear_controlling_thread"):  # else other threads cannot set it
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
    """Record BLAS's number of threads whenever ``module.name`` runs."""
    right = getattr(module, name)

    def watched(*arguments, **options):
        seen.append(threads())
        if fail:
            raise FloatingPointError("in the middle")
        return right(*arguments, **options)

    monkeypatch.setattr(module, name, watched)


INSIDE = [(forward, "logits"), (forward, "weighted_sum"), (backward, "logits"), (backward, "weighted_sum"),
          (scores, "weighted_sum"), (np, "logaddexp")]  # of products that scores are made from


@pytest.mark.parametrize(("module", "name"), INSIDE, ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize("long", [of_backend.LONG, 1])
def test_products_have_one_thread_and_pass_exceptions_on(module, name, long, users, monkeypatch):
    """In the calling thread, and in those for long sequences."""
    monkeypatch.setattr(of_backend, "LONG", long)
    seen: list[list[int]] = []
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, module, name, seen)
        everything()
    assert seen and all(number == 1 for numbers in seen for number in numbers)
    assert threads() == users
    watch(monkeypatch, module, name, [], fail=True)
    with pytest.raises(FloatingPointError, match="in the middle"):
        everything()
    assert threads() == users


def test_the_first_of_two_calls_ends_first(users):
    """The second call finds one thread, which is the first call's limit and not the user's number."""
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


def test_a_call_begins_while_another_restores_two_libraries(monkeypatch):
    """It must not mistake the limit of the second library for the user's number."""
    libraries = [SimpleNamespace(num_threads=OTHERS) for _ in range(2)]
    restoring, begun, restored = Event(), Event(), Event()

    class Limit:
        def __init__(self, limits):
            self.before = [library.num_threads for library in libraries]
            for library in libraries:
                library.num_threads = limits

        def restore_original_limits(self):
            for library, number in zip(libraries, self.before):
                library.num_threads = number
                restoring.set()
                begun.wait(0.2)

    monkeypatch.setattr(of_backend, "_blas", lambda: SimpleNamespace(lib_controllers=libraries, limit=Limit))

    def second():
        assert restoring.wait(10)
        with one_blas_thread():
            begun.set()
            assert restored.wait(10)

    with ThreadPoolExecutor(1) as pool:
        with one_blas_thread():
            call = pool.submit(second)
        restored.set()
        call.result(20)
    assert [library.num_threads for library in libraries] == [OTHERS] * 2


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


# ---- threads for long sequences ----
def gradients(bias):
    """Gradients of two batch entries with two kv heads, and the threads that computed them."""
    do, q, k, v, s = draw()
    mask, used = dma.IntervalMask.top_w(s, window=20), set()
    right = backward.logits

    def logits(*arguments):
        used.add(get_ident())
        return right(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward, "logits", logits)
        out, lse = dma.attention(q, k, v, mask=mask, bias=bias, return_lse=True)
        found = dma.backward.attention_backward(do, q, k, v, out, lse, mask=mask, bias=bias)
    return [out, lse, *found], used


@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (1, 2), (2, 1), (1, 4)])
def test_long_sequences_have_threads(shape, users, monkeypatch):
    """Bits stay equal; one thread computes a bias gradient shared by batch entries or kv heads."""
    bias = np.random.default_rng(1).standard_normal((*shape, 60), np.float32)
    expected, _ = gradients(bias)
    monkeypatch.setattr(of_backend, "LONG", 60)
    found, used = gradients(bias)
    assert all(np.array_equal(x, y) for x, y in zip(found, expected))
    alone = users == [1] * len(users) or shape not in ((2, 2), (2, 4))
    assert (get_ident() in used and len(used) == 1) if alone else (get_ident() not in used)
    assert threads() == users


def test_threads_do_not_warn(users, monkeypatch):
    """Non-finite numbers cause no warnings, in these threads as in the calling thread."""
    monkeypatch.setattr(of_backend, "LONG", 1)
    do, q, k, v, _ = draw()
    q[0, 3], v[1, 7] = np.inf, np.nan
    with np.errstate(all="raise"):
        out, lse = dma.attention(q, k, v, causal=True, return_lse=True)
        dma.backward.attention_backward(do, q, k, v, out, lse, causal=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning")  # a warning of jax, if another test imported it
def test_a_process_forked_while_another_thread_holds_the_lock():
    """The child computes; without the lock's fork hooks it would wait forever for a thread that does not exist
    there."""
    held, (read, end) = Event(), os.pipe()

    def hold():
        with of_backend._lock:
            held.set()
            time.sleep(0.2)

    holder = Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.alarm(5)
        with one_blas_thread():
            os.write(end, b"computed")
        os._exit(0)
    holder.join()
    assert os.waitpid(child, 0)[1] == 0 and os.read(read, 100) == b"computed"
    with one_blas_thread():  # the lock is free here too
        pass
