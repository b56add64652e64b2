"""``context_parallel_attention`` over gloo ranks, against the oracle: exact selection, outputs, gradients, bytes."""
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cupy_dma.distributed import exchanged_bytes  # noqa: E402
from tests.distributed import jobs  # noqa: E402
from tests.distributed.cases import CASES, Case  # noqa: E402
from tests.oracle import reference  # noqa: E402
from tests.oracle.layer_cases import numbers  # noqa: E402


def selected(case: Case, found: list[dict]) -> np.ndarray:
    """bool ``(B, Hkv, N, N)``: what each query sees, in positions of the whole sequence."""
    seen = np.zeros((case.batch, case.kv_heads, case.n, case.n), bool)
    for rank, result in enumerate(found):
        begin, end = case.bounds[rank], case.bounds[rank + 1]
        shown = result["seen"].numpy()
        shown = np.broadcast_to(shown, (case.batch, case.kv_heads, *shown.shape[2:]))
        rows = shown.shape[-1] - (end - begin)
        seen[:, :, begin:end, begin:end] = shown[..., rows:]
        if not rows:
            continue
        index, filled = (x.numpy() for x in result["front"])
        assert not shown[..., :rows].any(2)[~filled].any()
        for b, g, slot in np.argwhere(filled):
            source, place = divmod(index[b, g, slot], case.keep.rows)
            position = case.bounds[source] + found[source]["sent"][b, g, place]
            assert not seen[b, g, begin:end, position].any(), "a key stands twice in the history"
            seen[b, g, begin:end, position] = shown[b, g, :, slot]
    return seen


@pytest.mark.feature("numpy forward backward", "distributed", "every case")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_the_oracle(ranks, case):
    is_the_oracle(case, ranks.run(case.world, jobs.attend, case))


def is_the_oracle(case: Case, found: list[dict]) -> None:
    """Check visible pairs, outputs and gradients, joined from all ranks."""
    arguments, options = case.oracle()
    np.testing.assert_array_equal(selected(case, found), options["dense_mask"])

    joined = tuple(numbers(torch.cat([result[name] for result in found], axis)) for name, axis in (
        ("out", 1), ("lse", 2)))
    reference.check_attention(joined, *arguments[1:], **options)

    if case.scores in ("nan", "infinite"):
        return  # gradients of all keys are NaN, or cancel
    joined = [numbers(torch.cat(parts, 2 if i == 3 else 1))
              for i, parts in enumerate(zip(*(result["gradients"] for result in found)))]
    reference.check_attention_gradients(joined, *arguments, **options)


@pytest.mark.parametrize("case", [case for case in CASES if case.world > 1][::3], ids=str)
def test_room_changes_no_bit(ranks, case):
    """Writing received rows into the room before keys and values gives the same bits as copying all."""
    copying, in_place = (ranks.run(case.world, jobs.attend, case, "cpu", room) for room in (False, True))
    for rank, (a, b) in enumerate(zip(copying, in_place)):
        assert a["copied"] == [rank > 0] * 2 and b["copied"] == [False] * 2
        for x, y in zip((a["out"], a["lse"], *a["gradients"]), (b["out"], b["lse"], *b["gradients"])):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", [case for case in CASES if case.world > 1][::4], ids=str)
def test_bytes_are_the_formula(ranks, case):
    """One all-gather and one all-to-all, whose size does not depend on the length, and 8 bytes to compare arguments."""
    kind = getattr(torch, case.dtype)
    for rank, result in enumerate(ranks.run(case.world, jobs.attend, case)):
        forward, backward = exchanged_bytes(case.batch, case.kv_heads, case.head_dim, kind, case.window,
                                            world=case.world, rank=rank, sinks=case.sinks, recent=case.recent,
                                            bias_delay=case.bias_delay)
        compared = 8 * (case.world - 1)
        assert result["moved"] == [("all-gather", compared), ("all-gather", forward), ("all-to-all", backward)]


def test_the_formula():
    """16/8 heads of 128 in bfloat16 with 2048 keys, by hand."""
    row = 2 * 128 * 2 + 4 + 4
    forward, backward = exchanged_bytes(1, 8, 128, torch.bfloat16, 2048, world=2)
    assert forward == 8 * 2048 * row + 40 and backward == 8 * 2048 * row
    assert exchanged_bytes(1, 8, 128, torch.bfloat16, 2048, world=8, rank=7)[1] == 0
