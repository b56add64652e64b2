"""``cupy_dma.distributed`` over NCCL, one GPU per rank: selection, outputs, gradients, no synchronization, CUDA
graphs."""
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cupy_dma.distributed import RankError  # noqa: E402
from tests.distributed import jobs as common  # noqa: E402
from tests.distributed.cases import CASES, Case  # noqa: E402
from tests.distributed.test_attention import is_the_oracle  # noqa: E402
from tests.gpu import distributed_jobs as jobs  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

SEVERAL = [case for case in CASES if case.world > 1]
CASES_ON_GPU = [  # cases with two shards and types that the kernels support
    replace(case, name=f"{case.name}-{dtype}", dtype=dtype, lengths=(sum(case.lengths[:-1]), case.lengths[-1]))
    for case, dtype in zip(SEVERAL, ["bfloat16", "float16"] * len(SEVERAL))]
LONG = Case("long", lengths=(3000, 2600), dtype="bfloat16", batch=1, heads=16, kv_heads=8, head_dim=128, window=1024)


@pytest.fixture(scope="module")
def gpus():
    from tests.distributed.ranks import Ranks

    made = Ranks(2, "nccl")
    yield made
    made.close()


@pytest.mark.feature("cuda forward backward", "distributed", "every case")
@pytest.mark.parametrize("case", CASES_ON_GPU, ids=str)
def test_is_the_oracle(gpus, case):
    is_the_oracle(case, gpus.run(2, common.attend, case, "cuda"))


@pytest.mark.parametrize("changes", [{}, {"documents": "long"}, {"padding": "some", "sinks": 4, "recent": 16}], ids=str)
def test_room_changes_no_bit(gpus, changes):
    case = replace(LONG, name=f"room-{changes}", **changes)
    copying, in_place = (gpus.run(2, common.attend, case, "cuda", room) for room in (False, True))
    for a, b in zip(copying, in_place):
        for x, y in zip((a["out"], a["lse"], *a["gradients"]), (b["out"], b["lse"], *b["gradients"])):
            assert torch.equal(x, y)


@pytest.mark.feature("cuda forward backward", "distributed", "CUDA graphs")
@pytest.mark.parametrize("changes", [{}, {"documents": "long"}, {"padding": "some", "sinks": 4, "recent": 16},
                                     {"scores": "none"}], ids=str)
@pytest.mark.parametrize("what", [jobs.unsynchronized, jobs.graphed])
def test_the_host_does_not_wait_and_graphs_capture(gpus, what, changes):
    assert gpus.run(2, what, replace(LONG, name=f"host-{changes}", **changes)) == [True, True]


@pytest.mark.parametrize("changes", [{}, {"padding": "some", "sinks": 40}, {"scores": "ties", "window": 2048}], ids=str)
def test_same_bits_on_every_run(gpus, changes):
    assert gpus.run(2, jobs.repeated, replace(LONG, name=f"bits-{changes}", **changes), 100) == [True, True]


def test_a_long_shard_is_one_process(gpus):
    """The selected intervals equal those of one GPU, at a size where tiles have their own lists."""
    import cupy_dma as dma

    found = gpus.run(2, common.attend, LONG, "cuda")
    scores, n = LONG.whole("scores"), LONG.lengths[0]
    whole = dma.IntervalMask.top_w(scores.cuda(), LONG.window)
    own = whole.to_dense(LONG.n)[:, :, n:, n:].cpu().numpy()
    rows = found[1]["seen"].shape[-1] - LONG.lengths[1]
    np.testing.assert_array_equal(found[1]["seen"][..., rows:].numpy(), own)
    before = whole.to_dense(LONG.n)[:, :, n:, :n].sum(-1).cpu()
    assert torch.equal(found[1]["seen"][..., :rows].sum(-1), before)


@pytest.mark.parametrize(("changes", "word"), [({"window": 4}, "same window,"), ({"softcap": 2.0}, "same softcap,")])
def test_other_arguments_of_a_first_call_are_named(gpus, changes, word):
    for found in gpus.outcomes(2, jobs.cold, changes):
        assert isinstance(found, RankError) and word in str(found) and "rank 1 got" in str(found)


def test_other_arguments_of_a_later_call_are_named_on_request(gpus):
    for found in gpus.outcomes(2, jobs.checked):
        assert isinstance(found, RankError) and "same window, but rank 1 got 4 and rank 0 got 3" in str(found)
