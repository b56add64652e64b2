"""Parts of the exchange without a process group."""
import pytest

torch = pytest.importorskip("torch")

from cupy_dma.distributed.exchange import Exchange  # noqa: E402
from cupy_dma.distributed.rows import Row  # noqa: E402
from cupy_dma.distributed.survivors import Keep, Own, Survivors, survivors  # noqa: E402


def test_gradients_of_later_ranks_are_rounded_once():
    """1 + 2^-8 + 2^-8 in bfloat16, which has 7 bits: rounding after each addition would give 1."""
    exchange = object.__new__(Exchange)
    exchange._sent = Survivors(torch.tensor([[[1, 1, 1]]]), torch.tensor([[[0, 0, 4]]]), torch.zeros(1, 5))
    own = torch.tensor([3.0, 0.0]).bfloat16()[None, :, None, None]
    parts = [torch.tensor([0.0, 0.0, x]).bfloat16()[None, None, :, None] for x in (1.0, 2.0**-8, 2.0**-8)]
    exchange._add(own, parts)
    assert own.flatten().tolist() == [3.0, 1.0 + 2.0**-7]


def test_empty_slots_write_what_the_last_one_writes(monkeypatch):
    """A GPU does not order writes to one row. Reversing their order here changes nothing."""
    exchange = object.__new__(Exchange)
    exchange._sent = survivors(Own(torch.randn(1, 1, 2), None, None, "numpy"), Keep(4))  # two tokens in four slots
    assert exchange._sent.index.tolist() == [[[1, 1, 0, 1]]] and exchange._sent.ordinal.tolist() == [[[0, 0, 1, 2]]]
    scatter = torch.Tensor.scatter_
    monkeypatch.setattr(torch.Tensor, "scatter_",
                        lambda self, dim, index, src: scatter(self, dim, index.flip(dim), src.flip(dim)))
    own, part = torch.ones(1, 2, 1, 3), torch.tensor([0.0, 0, 10, 20])[:, None].expand(1, 1, 4, 3).contiguous()
    exchange._add(own, [part])
    assert own[0, :, 0, 0].tolist() == [11.0, 21.0]


def test_rows_hold_what_is_put_into_them():
    for kind, score, size in ((torch.bfloat16, torch.float32, 5), (torch.float16, torch.float64, 3),
                              (torch.float64, torch.float64, 1), (torch.float32, torch.float32, 128)):
        row = Row(size, kind, score)
        rows = torch.zeros(2, 3, row.words(True), dtype=torch.int64)
        key, value = (torch.randn(2, 3, size).to(kind) for _ in range(2))
        scores, ordinals = torch.randn(2, 3, dtype=score), torch.arange(6, dtype=torch.int32).reshape(2, 3)
        for field, x in zip((*row.pair(rows), row.scores(rows), row.ordinals(rows)), (key, value, scores, ordinals)):
            field.copy_(x)
        found = (*row.pair(rows), row.scores(rows), row.ordinals(rows))
        assert all(torch.equal(a, b) for a, b in zip(found, (key, value, scores, ordinals)))
