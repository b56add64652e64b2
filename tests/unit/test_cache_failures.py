"""A call that runs out of memory, at whichever allocation, leaves a cache unchanged, and succeeds when called again."""
import itertools
import sys
from contextlib import contextmanager

import numpy as np
import pytest

from cupy_dma.arrays import library_named
from cupy_dma.backends.numpy import dynamic_cache
from tests.oracle.cache_cases import History, packed

HISTORY = History(length=60, window=6, sinks=1, recent=2)
RECORDED = History(length=60, window=(6, 3), sinks=1, recent=2, options={"record_stops": True})
BEGIN = 30  # tokens that the cache holds


def later(move, end=60):
    return HISTORY.tokens(BEGIN, end, move)


def in_packed_rows(cache, move, **how):
    rows, bounds = packed(HISTORY.tokens(BEGIN, BEGIN + 5), [2, 5])
    return cache.extend(*map(move, rows), cu_seqlens=move(bounds), **how)


def attend_and_commit(cache, move):
    out = cache.attend(*later(move))
    cache.commit(move(np.array([2, 7])))
    return out


def another_state(move):
    other = HISTORY.cache(move)
    other.extend(*HISTORY.tokens(0, 11, move))
    return other.state_dict()


CALLS = {
    "one token": lambda cache, move: cache.extend(*later(move, BEGIN + 1), return_lse=True),
    "one token into out": lambda cache, move: cache.extend(*later(move, BEGIN + 1),
                                                           out=move(np.empty((2, 1, 4, 8), np.float32))),
    "one token of one row": lambda cache, move: cache.extend(*later(move, BEGIN + 1), lengths=move(np.array([0, 1]))),
    "one token without query": lambda cache, move: cache.update(*later(move, BEGIN + 1)[1:]),
    "many tokens": lambda cache, move: cache.extend(*later(move), return_lse=True),
    "many tokens without query": lambda cache, move: cache.update(*later(move)[1:]),
    "packed tokens": in_packed_rows,
    "reorder": lambda cache, move: cache.reorder(move(np.array([1, 1]))),
    "load_state_dict": lambda cache, move, saved={}: cache.load_state_dict(
        saved.get((move, HISTORY.window)) or saved.setdefault((move, HISTORY.window), another_state(move))),
    "one token of one slot": lambda cache, move: cache.extend(
        *map(move, (x[:1] for x in HISTORY.tokens(BEGIN, BEGIN + 1))), slots=move(np.array([1]))),
    "many tokens of one slot": lambda cache, move: cache.extend(*later(move), slots=move(np.array([1, -1]))),
    "packed tokens of slots": lambda cache, move: in_packed_rows(cache, move, slots=move(np.array([1, 0]))),
    "attend": lambda cache, move: cache.attend(*later(move), return_lse=True),
    "commit": attend_and_commit,
    "reset of one slot": lambda cache, move: cache.reset(move(np.array([1]))),
    "reset": lambda cache, move: cache.reset(),
    "select_batch": lambda cache, move: cache.select_batch([1]).length,
    "clone": lambda cache, move: cache.clone().length,
}


class OutOfMemory(RuntimeError):
    pass


def torch_allocations():
    """``failing(n)``, in which allocation number ``n`` of torch fails, and the conversion of NumPy arrays."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    def storages(tree):
        return {x.untyped_storage()._cdata for x in tree_leaves(tree) if isinstance(x, torch.Tensor)}

    class Failing(TorchDispatchMode):
        def __init__(self, number):
            super().__init__()
            self.left = itertools.count(number, -1)

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            if storages(found) - storages((args, kwargs)) and next(self.left) == 0:
                raise OutOfMemory(function)
            return found

    return Failing, torch.from_numpy


def numpy_allocations():
    """The same for NumPy, both for the array library's functions and for NumPy functions called through
    ``library.xp``."""
    library = library_named("numpy")

    @contextmanager
    def failing(number):
        left = itertools.count(number, -1)

        def counted(function):
            def call(*args, **kwargs):
                if next(left) == 0:
                    raise OutOfMemory(function)
                return function(*args, **kwargs)
            return call

        class Functions:
            def __getattr__(self, name):
                found = getattr(np, name)
                return counted(found) if callable(found) and not isinstance(found, type) else found

        with pytest.MonkeyPatch.context() as patch:
            for name in ("empty", "full", "arange", "cumsum", "astype", "search_right"):
                patch.setattr(library, name, counted(getattr(library, name)), raising=False)
            patch.setattr(library, "xp", Functions())
            yield

    return failing, np.asarray


def same_state(cache, other):
    names = (*cache._state.arrays, "tickets")
    pairs = [[np.asarray(getattr(each._state, name).array) for each in (cache, other)] for name in names]
    if cache._record is not None:
        pairs.append([np.asarray(each.stops()) for each in (cache, other)])
    return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in pairs)


def results(found):
    return [np.asarray(x) for x in (found if isinstance(found, tuple) else (found,)) if x is not None]


@pytest.mark.parametrize("allocations", [torch_allocations, numpy_allocations])
@pytest.mark.parametrize("history", [HISTORY, RECORDED], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_failed_allocation_changes_nothing(name, history, allocations, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "HISTORY", history)
    failing, move = allocations()
    call, cache = CALLS[name], HISTORY.cache(move)
    cache.extend(*HISTORY.tokens(0, BEGIN, move))
    before, twin = cache.clone(), cache.clone()
    expected = results(call(twin, move))
    for number in itertools.count():
        try:
            with failing(number):
                found = results(call(cache, move))
            break
        except OutOfMemory:
            assert same_state(cache, before), f"allocation {number} failed, and the cache is another one"
    assert number > 0 or name == "reset"
    assert len(found) == len(expected) and all(map(np.array_equal, found, expected))
    assert same_state(cache, twin)


@pytest.mark.parametrize("window", [6, (6, 9)])
@pytest.mark.parametrize("recent", [0, 2])
def test_a_step_whose_attention_fails_changes_nothing(recent, window, monkeypatch):
    """The numpy backend writes a token's rows before it attends to them; here they replace rows that were visible."""
    history = History(length=30, window=window, recent=recent, scores="increasing")
    cache = history.cache()
    history.run(cache, [20])
    before = cache.clone()

    def attention(call):
        raise OutOfMemory(call)

    with monkeypatch.context() as patch:
        patch.setattr(dynamic_cache, "attention", attention)
        with pytest.raises(OutOfMemory):
            history.run(cache, [1], begin=20)
    assert same_state(cache, before)
    out, lse = history.run(cache, [1] * 10, begin=20)
    history.check(out, lse, begin=20)
    history.check_kept(cache)
