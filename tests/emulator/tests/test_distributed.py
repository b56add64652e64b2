"""A rank's history on the CUDA kernels: received rows before its own keys, with a mask that bounds the keys of a tile.
There are no processes; the test makes the rows that earlier ranks would send."""
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from cupy_dma.distributed.rows import picked  # noqa: E402
from cupy_dma.distributed.survivors import Own, front, history_mask, survivors  # noqa: E402
from cupy_dma.torch import attention  # noqa: E402
from tests.distributed.cases import Case  # noqa: E402
from tests.oracle import reference  # noqa: E402
from tests.oracle.layer_cases import numbers  # noqa: E402

USUAL = {"lengths": (90, 70, 160), "dtype": "bfloat16", "head_dim": 16, "window": 20, "batch": 1}
CASES = [Case("usual", **USUAL), Case("besides", **{**USUAL, "batch": 2}, sinks=3, recent=30, padding="some"),
         Case("documents", **{**USUAL, "batch": 2}, documents="long", recent=5), Case("ties", **USUAL, scores="zero")]


def own(case: Case, rank: int) -> Own:
    scores = case.shard("scores", rank)
    assert scores is not None
    return Own(scores.contiguous(), case.shard("padding", rank), case.shard("documents", rank), "emulator")


@pytest.mark.feature("cuda forward backward", "distributed", "sinks, recent", "padding", "documents")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_last_rank(case):
    """Outputs and gradients of its queries and own keys against the oracle on the whole sequence."""
    rank, keep = case.world - 1, case.keep
    sent = [survivors(own(case, q), keep) for q in range(rank)]
    mine = own(case, rank)

    def rows(name: str) -> torch.Tensor:  # (r, B, Hkv, R, ...)
        shards = []
        for q, found in enumerate(sent):
            x = case.shard(name, q)
            assert x is not None
            shards.append(x.gather(2, found.index) if name == "scores" else picked(x, found.index))
        return torch.stack(shards)

    first = None if mine.documents is None else mine.documents[:, 0].long().expand(case.batch)
    ahead = front(rows("scores"), torch.stack([x.ordinal for x in sent]), torch.stack([x.header for x in sent]), first,
                  keep)

    def seen(name: str) -> torch.Tensor:
        flat = rows(name).movedim(0, 2).flatten(2, 3)  # (B, Hkv, M, ...)
        index = ahead.index if flat.ndim == 3 else ahead.index[..., None].expand(*ahead.index.shape, flat.shape[3])
        return flat.gather(2, index)

    scores = seen("scores").masked_fill(~ahead.filled, -torch.inf)
    mask = history_mask(mine, keep, ahead, scores)
    history = [torch.cat((seen(name).transpose(1, 2), case.shard(name, rank)), 1) for name in ("key", "value")]
    inputs = [x.contiguous().requires_grad_() for x in (case.shard("query", rank), *history)]
    bias = torch.cat((scores, mine.scores), 2)
    out = attention(*inputs, mask=mask, bias=bias, backend="emulator")
    dq, dk, dv = torch.autograd.grad(out, inputs, case.shard("dout", rank))

    arguments, options = case.oracle()
    begin, end = case.bounds[rank], case.bounds[rank + 1]
    own_keys = options["dense_mask"][:, :, begin:end, begin:end]
    np.testing.assert_array_equal(mask.to_dense(end - begin)[..., keep.rows:].numpy(), own_keys)
    exact, plain = (f(*arguments[1:], **options)[0][:, begin:end] for f in (
        reference.attention, reference.same_precision_attention))
    reference.assert_matches_reference(numbers(out), exact, plain, plain.dtype)
    exact, plain = (f(*arguments, **options) for f in (
        reference.attention_gradients, reference.same_precision_attention_gradients))
    for found, i in ((dq, 0), (dk[:, keep.rows:], 1), (dv[:, keep.rows:], 2)):
        reference.assert_matches_reference(numbers(found), exact[i][:, begin:end], plain[i][:, begin:end],
                                           plain[i].dtype, factor=3)


@pytest.mark.parametrize("scores", ["normal", "ties", "zero", "nan", "infinite", "rising", "falling"])
@pytest.mark.parametrize("length, window", [(21, 20), (300, 1), (9000, 700)])
def test_survivors_are_found_by_the_kernels_of_few_queries(scores, length, window):
    case = Case(scores, lengths=(length,), dtype="bfloat16", window=window, scores=scores)
    found, expected = (survivors(own(case, 0)._replace(backend=name), case.keep) for name in ("emulator", "numpy"))
    for a, b in zip(found, expected):
        assert a.dtype == b.dtype and torch.equal(a, b)
