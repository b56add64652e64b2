"""Which kernels are launched with PDL, recorded by a device whose kernels do nothing."""
import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from cupy_dma.backends.cuda.runtime.program import fresh

build = pytest.importorskip("tests.emulator.build")
pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

from tests import emulator  # noqa: E402
from tests.gpu.precompile import Recorder  # noqa: E402
from tests.oracle import selection_cases  # noqa: E402

HEADS, KV_HEADS, DIM = 4, 2, 64


class Listener(Recorder):
    """Records the name, the blocks and ``pdl`` of every launch."""

    def __init__(self, is_hopper: bool = False):
        super().__init__(is_hopper)
        self.heard: list[tuple[str, int, bool]] = []

    def load(self, config, entry, index, shared_bytes=0):
        listener = self

        class Kernel:
            def launch(self, grid, threads, params, stream, pdl=True):
                listener.heard.append((entry, grid, pdl))

        return Kernel()


def launches(call) -> dict[str, tuple[int, bool]]:
    with emulator.using(Listener) as runtime:
        call()
    return {entry: (grid, pdl) for entry, grid, pdl in runtime.heard}


def pdl(call) -> dict[str, bool]:
    return {entry: pdl for entry, (_, pdl) in launches(call).items()}


def inputs(length):
    return [np.ones((1, length, heads, DIM), numpy_dtype("float16")) for heads in (HEADS, KV_HEADS, KV_HEADS)]


@pytest.mark.parametrize("kind", ["lists", "causal", "dense bias", "dense bias of heads"])
def test_a_backward_pass_is_launched_without_pdl(kind):
    query, key, value = inputs(400)
    options = {"lists": {"mask": dma.IntervalMask.top_w(np.ones((1, KV_HEADS, 400), np.float32), window=50,
                                                        backend="numpy")},
               "causal": {"causal": True},
               "dense bias": {"bias": np.zeros((1, HEADS, 400, 400), np.float32)},
               "dense bias of heads": {"bias": np.zeros((1, 1, 400, 400), np.float32)}}[kind]
    lse = np.zeros((1, HEADS, 400), np.float32)
    found = pdl(lambda: dma.backward.attention_backward(query, query, key, value, query, lse, backend="emulator",
                                                          **options))
    assert found["backward_preprocess"]
    assert {entry for entry, pdl in found.items() if not pdl} == {
        "backward_dq", "backward_dkv", *(["backward_dbias"] if kind == "dense bias of heads" else [])}
    assert found.get("backward_reduce", True)


def test_gradients_of_scores_are_launched_without_pdl():
    scores, value = np.zeros((1, KV_HEADS, 400), np.float32), inputs(400)[2]
    weight, A = np.zeros((KV_HEADS, KV_HEADS * DIM), np.float32), np.zeros(KV_HEADS, np.float32)
    found = pdl(lambda: dma.backward.key_scores_backward(scores, value, weight, A, backend="emulator"))
    assert found == {"key_scores": False, "score_gradients": False, "add_score_gradients": True}


@pytest.mark.parametrize("length, with_pdl", [(1, True), (4000, False)])
def test_scores_of_one_step_are_launched_with_pdl(length, with_pdl):
    value = inputs(length)[2]
    weight, A = np.zeros((KV_HEADS, KV_HEADS * DIM), np.float32), np.zeros(KV_HEADS, np.float32)
    assert pdl(lambda: dma.key_scores(value, weight, A, backend="emulator")) == {"key_scores": with_pdl}


@pytest.mark.parametrize("rows, length, sweeps, with_pdl", [
    (8, 2048, 64, True), (8, 4096, 128, False), (4, 8192, 128, False), (8, 8192, 256, True), (1, 4096, 16, True)])
def test_arrivals_are_swept_without_pdl_where_there_is_an_sm_for_each_block(rows, length, sweeps, with_pdl):
    scores = np.zeros((1, rows, length), np.float32)
    with selection_cases.counting(False):
        found = launches(lambda: dma.IntervalMask.top_w(scores, window=1024, backend="emulator"))
    assert found["sweep_arrivals"] == (sweeps, with_pdl)
    assert found["local_top"][1] and found["filter_arrivals"][1]


CHUNKS, SEEN = ["local_top", "filter_arrivals", "sweep_arrivals"], ["count_seen", "compact_seen"]


@pytest.mark.parametrize("rows, length, ahead", [
    (32, 2048, ["count_better"]), (33, 2048, CHUNKS), (257, 1024, ["count_better"]), (1, 2049, ["count_better", *SEEN]),
    (8, 4096, ["count_better", *SEEN]), (1, 4097, CHUNKS + SEEN)])
def test_few_keys_take_few_launches(rows, length, ahead):
    query, key, value = (np.ones((1, length, rows, 8), np.float16) for _ in range(3))
    scores = np.zeros((1, rows, length), np.float32)
    with fresh():
        found = launches(lambda: dma.dynamic_mask_attention(query, key, value, scores, window=100, backend="emulator"))
    assert list(found) == [*ahead, "tile_lists", "attention_forward"]


@pytest.mark.parametrize("heads, kv_heads, queries, keys, head_dim, shared", [
    (32, 8, 1, 65536, 128, True), (32, 8, 2, 65536, 128, True), (32, 8, 3, 65536, 128, False),
    (2, 1, 9, 2**18, 64, False), (8, 8, 8, 1024, 64, True), (8, 8, 9, 1024, 64, False),
    (16, 8, 2, 4096, 256, True), (16, 8, 3, 4096, 256, False),
    # groups of more heads than tiles have: each of their tiles reads all keys
    (64, 8, 2, 65536, 128, True), (64, 8, 3, 65536, 128, False), (64, 1, 1, 65536, 128, True),
    (64, 1, 4, 65536, 128, False)])
@pytest.mark.parametrize("causal", [False, True])
def test_hopper_tiles_take_calls_that_see_all_keys(heads, kv_heads, queries, keys, head_dim, shared, causal):
    """Except for very few rows. Other calls use split-KV."""
    query = np.ones((1, queries, heads, head_dim), np.float16)
    key = np.broadcast_to(np.ones(head_dim, np.float16), (1, keys, kv_heads, head_dim))
    for is_hopper in (False, True):
        with emulator.using(Listener, is_hopper=is_hopper) as runtime:
            dma.attention(query, key, key, causal=causal, backend="emulator")
        names = [name for name, *_ in runtime.heard]
        assert names == (["flash_decode"] if shared or not is_hopper else ["attention_forward", "combine_splits"])


@pytest.mark.parametrize("heads, kv_heads, queries, keys, window, listed", [
    (32, 32, 64, 8192, 1024, True), (32, 32, 1, 65536, 1024, True), (32, 8, 4, 65536, 1024, True),
    (16, 8, 1, 8192, 1024, False), (8, 8, 4, 65536, 16384, False), (8, 8, 64, 2048, 1024, False)])
def test_few_queries_of_many_scattered_keys_have_lists(heads, kv_heads, queries, keys, window, listed):
    """On Hopper, where lists are faster; a window shared by all heads needs none."""
    query = np.ones((1, queries, heads, 128), np.float16)
    key = np.broadcast_to(np.ones(128, np.float16), (1, keys, kv_heads, 128))
    masks = [dma.IntervalMask(np.broadcast_to(np.arange(keys, dtype=np.int32), shape), np.zeros(shape, np.int32))
             for shape in ((1, kv_heads, keys), (1, 1, keys))]
    for mask, expected in zip(masks, (listed, False)):
        mask._bound = (window, 1)
        for is_hopper in (False, True):
            with emulator.using(Listener, is_hopper=is_hopper) as runtime:
                dma.attention(query, key, key, mask=mask, backend="emulator")
            assert ("tile_lists" in {entry for entry, *_ in runtime.heard}) == (expected and is_hopper)
