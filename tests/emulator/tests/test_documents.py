"""Documents and ``keys="global"``: kernels against array code, and calls as programs."""
from typing import Any

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.arrays import describe, library_named
from cupy_dma.backends import numpy as numpy_backend
from cupy_dma.backends.cuda.runtime.program import fresh
from cupy_dma.backends.cuda.select import documents as kernels
from cupy_dma.masks import selection
from cupy_dma.masks.documents import document_runs
from cupy_dma.masks.interval import NEVER
from tests import emulator
from tests.oracle import reference, selection_cases

CHUNK = 4096  # keys of a block of the kernel


def ids_of(rows: int, length: int, changes: list[int], dtype: str = "int32") -> np.ndarray:
    """Documents with alternating ids 0 and 1 that begin at these keys; each row begins its documents one key later."""
    begins = np.zeros((rows, length), np.int64)
    for row in range(rows):
        begins[row, [at + row for at in changes if at + row < length]] = 1
    return (begins.cumsum(1) % 2).astype(dtype)


def lengths_of(length: int, count: int, dtype: str = "int32") -> np.ndarray:
    cuts = np.random.default_rng(count).integers(0, length + 1, count - 1)
    return np.array([0, *np.sort(cuts), length], dtype)


DOCUMENTS = {
    "one key": lengths_of(1, 1), "one document": lengths_of(300, 1, "int64"), "a few": lengths_of(300, 7),
    "most of them empty": lengths_of(30, 90, "int64"), "of one key each": np.arange(301, dtype=np.int32),
    "every other length": lengths_of(300, 20)[::2], "empty at both ends": np.array([0, 0, 300, 300], np.int32),
    "one id": ids_of(2, 300, []), "some ids": ids_of(2, 300, [1, 31, 32, 40, 95, 200, 299], "int64"),
    "an id each": ids_of(1, 70, list(range(70))),
    "ids in columns": np.asfortranarray(ids_of(3, 300, [7, 150])), "one id, chunks": ids_of(2, 2 * CHUNK + 100, []),
    "ids, chunks": ids_of(2, 3 * CHUNK + 5, [1, 1000, CHUNK - 1, CHUNK + 64, 3 * CHUNK - 700]),
    "ids that begin with chunks": ids_of(2, 3 * CHUNK, [CHUNK - 1, 2 * CHUNK - 1]),
    "ids in a few words": ids_of(1, 2 * CHUNK, [33, 1055, 1056, 3000, CHUNK + 31, CHUNK + 2047])}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_first_key_and_end(name):
    given = describe(DOCUMENTS[name], "documents")
    length = given.shape[1] if given.ndim == 2 else int(given.array[-1])
    expected = document_runs(given, length)
    first, end = emulator.BACKEND._run(kernels.document_runs, given, length)
    assert np.array_equal(first, expected.first) and np.array_equal(end, expected.end)


@pytest.mark.parametrize("keys", ["prefix", "global"])
@pytest.mark.parametrize("name", [None, "a few", "of one key each", "empty at both ends", "some ids", "one id",
                                  "every other length"])
def test_the_mask_is_that_of_numpy(name, keys):
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((2, 2, 300)).astype(np.float32)
    documents = None if name is None else DOCUMENTS[name]
    for window in (5, 300, (1, 90)):
        for padding in (None, rng.random((1, 300)) < 0.8, rng.random((2, 300)) < 0.8):
            options = {"keys": keys, "documents": documents, "padding": padding}
            found, expected = (dma.IntervalMask.top_w(scores, window, **options, backend=backend)
                               for backend in ("emulator", "numpy"))
            assert found._hints == expected._hints and found.start.shape == expected.start.shape
            assert np.array_equal(found.start, expected.start) and np.array_equal(found.stop, expected.stop)


def test_documents_of_long_rows():
    """Rows of several blocks in each kernel, with the kernels for many keys."""
    scores = np.random.default_rng(0).standard_normal((2, 1, CHUNK + 100)).astype(np.float32)
    documents = ids_of(2, CHUNK + 100, [700, 2000, CHUNK - 1, CHUNK + 60])
    with selection_cases.counting(False):
        for keys in ("prefix", "global"):
            selection_cases.check(scores, 90, backend="emulator", keys=keys, documents=documents)


@pytest.mark.parametrize("apart", [False, True])
def test_keys_behind_the_last_document(apart):
    """As in packed sequences, keys after the last document are no candidates. Their stop may be any position after the
    document's last key, because attention separates sequences itself."""
    scores = describe(np.random.default_rng(0).standard_normal((1, 2, 300)).astype(np.float32), "scores")
    documents = describe(np.array([0, 100, 100, 210], np.int32), "documents")
    padding = describe((np.arange(300) % 105 < 90)[None] & (np.arange(300) < 210), "padding")
    for keys, real in (("prefix", None), ("prefix", padding), ("global", padding)):
        found, expected = (selection.select(scores, 9, keys, selection.Candidates(real, documents, apart), module)
                           for module in (emulator.BACKEND, numpy_backend))
        assert np.array_equal(np.ravel(found.start), np.ravel(expected.start))
        end = document_runs(documents, 300).end if apart and keys == "prefix" else NEVER
        assert np.array_equal(np.minimum(found.stop, end), np.minimum(expected.stop, end))


@pytest.mark.parametrize("lengths", [(0, 400, 100, 300), (-5, 70, 300), (10, 20, 30)])
def test_wrong_lengths_on_a_device_read_nothing_else(lengths):
    """A device does not check lengths. Wrong first keys must not make the selection read other memory."""
    given = describe(np.array(lengths, np.int32), "documents")
    first, _ = emulator.BACKEND._run(kernels.document_runs, given, 300)
    assert (first >= 0).all() and (first <= np.arange(300)).all()


# ---- calls of torch ----
torch = pytest.importorskip("torch")

from cupy_dma.masks import interval  # noqa: E402
from tests.emulator.tests.test_torch_call_keys import check as check_neighbours  # noqa: E402
from tests.emulator.tests.test_torch_call_keys import laid, of  # noqa: E402
from tests.emulator.tests.test_torch_programs import (  # noqa: E402
    HKV,
    N,
    W,
    check,
    draw,
    draw_values,
    dynamic,
    from_values,
    same,
    step,
)

LENGTHS, IDS = torch.tensor([0, 40, 40, 41, N]), torch.arange(2 * N).view(2, N) // 60
PADDING = torch.arange(2 * N).view(2, N) % 7 > 0
CALLS: dict[str, dict[str, Any]] = {
    "lengths": {"documents": LENGTHS}, "ids": {"documents": IDS.int()}, "global": {"keys": "global"},
    "global, all keys": {"keys": "global", "window": N}, "global, not causal": {"keys": "global", "causal": False},
    "global ids, padding": {"keys": "global", "documents": IDS, "padding": PADDING},
    "global lengths": {"keys": "global", "documents": LENGTHS.int(), "window": (9, 30)},
    "ids of all rows, padding": {"documents": IDS[:1], "padding": PADDING, "window": (W, N)}}


@pytest.mark.parametrize("gpu", [emulator.using, emulator.hopper_gpu])
@pytest.mark.parametrize("name", CALLS)
def test_calls_have_programs(name, gpu, chain_runs):
    with gpu():
        check(lambda *x: dynamic(*x, **CALLS[name]), lambda i: draw(i, batch=2), chain_runs)


def test_later_calls_do_without_the_array_library(chain_runs, monkeypatch):
    inputs, options = draw(0, batch=2), {"keys": "global", "documents": IDS, "padding": PADDING}
    expected = step(lambda *x: dynamic(*x, **options), *inputs)

    def refuse(*_: Any) -> Any:
        raise AssertionError

    for name in ("full", "arange", "cumsum", "search_right", "astype", "contiguous"):
        monkeypatch.setattr(type(library_named("torch")), name, refuse)
    monkeypatch.setattr(interval, "select", refuse)
    same(step(lambda *x: dynamic(*x, **options), *inputs), expected)
    with fresh(), pytest.raises(AssertionError):
        dynamic(*inputs, **options)


def dense(scores: Any, window: Any = W, keys: str = "prefix", padding: Any = None, documents: Any = None,
          causal: bool = True) -> np.ndarray:
    """The mask by its definition."""
    windows = window if isinstance(window, tuple) else (window,) * HKV
    given = [None if x is None else x.numpy() for x in (padding, documents)]
    seen = np.concatenate([reference.top_w_dense(scores[:, h:h + 1].detach().numpy(), w, keys, *given)
                           for h, w in enumerate(windows)], axis=1)
    return np.tril(seen) if causal else seen


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_the_definition(name, chain_runs):
    inputs = draw(0, batch=2, dtype=torch.float32)
    for _ in range(2):
        found = step(lambda *x: dynamic(*x, **CALLS[name]), *inputs, with_lse=False)
    assert chain_runs == {"forward": 2, "backward": 2}
    torch.manual_seed(1)
    dout = torch.randn_like(found[0]).numpy()  # that of ``step``
    (out, lse, *gradients), (*rows, scores) = ([x.detach().numpy() for x in y] for y in (found, inputs))
    options = {"dense_mask": dense(inputs[3], **CALLS[name]), "bias": scores, "tf32": True}
    reference.check_attention((out, lse), *rows, **options)
    reference.check_attention_gradients(gradients, dout, *rows, **options)


def test_scores_from_values(chain_runs):
    check(lambda *x: from_values(*x, documents=LENGTHS, keys="global"), draw_values, chain_runs)


def test_without_gradients(chain_runs):
    for i in range(2):
        dynamic(*draw(i, grad=False), documents=LENGTHS)
    assert chain_runs == {"forward": 2, "backward": 0}


def test_facts_of_documents_are_in_the_key(chain_runs):
    n = 44  # tokens of ``of``
    lengths, ids = torch.tensor([0, 9, 30, n], dtype=torch.int32), (torch.arange(2 * n).view(2, n) // 13).int()
    check_neighbours(of(dynamic, documents=lengths), {
        "others": of(dynamic, documents=torch.tensor([0, 1, 20, n], dtype=torch.int32)),
        "fewer": of(dynamic, documents=torch.tensor([0, 20, n], dtype=torch.int32)),
        "int64": of(dynamic, documents=lengths.long()), "none": of(dynamic),
        "at an odd address": of(dynamic, documents=laid(lengths, offset=1)),
        "every other": of(dynamic, documents=torch.tensor([0, 5, 9, 5, 30, 5, n], dtype=torch.int32)[::2]),
        "ids": of(dynamic, documents=ids), "global": of(dynamic, documents=lengths, keys="global")})
    check_neighbours(of(dynamic, documents=ids), {
        "of all rows": of(dynamic, documents=ids[:1]), "in columns": of(dynamic, documents=ids.T.contiguous().T),
        "at an odd address": of(dynamic, documents=laid(ids, offset=1)), "int64": of(dynamic, documents=ids.long()),
        "in longer rows": of(dynamic, documents=torch.nn.functional.pad(ids, (0, 8))[:, :n])})


def test_lists_and_numpy_arrays_have_no_key(chain_runs):
    inputs = draw(0)
    expected = dynamic(*inputs, documents=LENGTHS)[0]
    for _ in range(2):
        assert torch.equal(dynamic(*inputs, documents=LENGTHS.tolist())[0], expected)
        with pytest.raises(TypeError, match="documents"):
            dynamic(*inputs, documents=LENGTHS.numpy())
    assert chain_runs["forward"] == 1
