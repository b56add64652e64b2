"""Ranks whose calls differ: every rank gets an error that names the rank and the argument, and none hangs."""
import time

import pytest

torch = pytest.importorskip("torch")

from cupy_dma.distributed import RankError, context_parallel_attention  # noqa: E402
from tests.distributed import jobs  # noqa: E402

# What one rank passes instead, and the argument named in the message.
OTHERS = [
    ({"window": 4}, "window", "3", "4"), ({"sinks": 1}, "sinks", "0", "1"), ({"recent": 2}, "recent", "0", "2"),
    ({"softcap": 2.0}, "softcap", "0.0", "2.0"), ({"scale": 0.5}, "scale", "0.4", "0.5"),
    ({"scores": None}, "scores", "none", "given"), ({"form": "linear"}, "form", "exp", "linear"),
    ({"padding": torch.ones(1, 5, dtype=torch.bool)}, "padding", "none", "given"),
    ({"documents": torch.zeros(1, 5, dtype=torch.int64)}, "documents", "none", "given"),
    ({"query": torch.ones(2, 5, 8, 6)}, "query", "(2, 4, 6)", "(2, 8, 6)"),
    ({name: torch.ones(3, 5, 2, 6) for name in ("key", "value", "query")} | {"scores": torch.ones(3, 2, 5)}, "query",
     "(2, 4, 6)", "(3, 2, 6)"),
    ({name: torch.ones(2, 5, 2, 6).double() for name in ("query", "key", "value")}, "query", "float32", "float64"),
    ({"key": torch.ones(2, 5, 2, 6, requires_grad=True)}, "requires_grad of key", "False", "True")]


def words(x):
    return x if isinstance(x, str) else ""


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("changes", "argument", "usual", "other"), OTHERS, ids=words)
def test_other_arguments_are_named(ranks, changes, argument, usual, other, warm):
    for found in ranks.outcomes(3, jobs.call, {2: changes}, warm):
        assert isinstance(found, RankError)
        for word in (f"same {argument},", "rank 2 got", "rank 0 got", usual, other):
            assert word in str(found)


# Invalid arguments: the rank that passes one gets the usual error, and the others are told.
WRONG = [
    ({"window": 0}, ValueError, "window must be at least 1, got 0"),
    ({"window": None}, ValueError, "use ring attention"),
    ({"sinks": -1}, ValueError, "sinks must be at least 0, got -1"),
    ({"query": torch.ones(2, 6, 4, 6)}, ValueError, "query must have key's length"),
    ({"value": torch.ones(2, 5, 2, 7)}, ValueError, "value must have key's shape"),
    ({"scores": torch.ones(2, 2, 6)}, ValueError, "scores must have shape (B, Hkv, Lk)"),
    ({"scores": torch.ones(2, 4, 5)}, ValueError, "scores must have shape (B, Hkv, n) = (2, 2, 5)"),
    ({"scores": None, "A": torch.ones(2)}, ValueError, "give either scores or dt_proj and A"),
    ({"padding": torch.ones(2, 6, dtype=torch.bool)}, ValueError, "padding must have shape (1|B, n)"),
    ({"padding": torch.ones(2, 5)}, TypeError, "padding must be bool"),
    ({"documents": torch.tensor([0, 3, 5])}, ValueError, "documents must be ids (1|B, n)"),
    ({"documents": torch.ones(2, 5)}, TypeError, "documents must be int32 or int64"),
    ({"room": True}, ValueError, "key must have memory for 3 rows ahead of each batch entry with room=True"),
    ({"room": 1}, TypeError, "room must be True or False"),
    ({"softcap": -1.0}, ValueError, "softcap must be a finite number of at least 0"),
    ({"backend": "cuda"}, Exception, "backend='cuda'"),
    ({"key": [1.0]}, TypeError, "key must be a torch tensor, got list")]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("changes", "kind", "message"), WRONG, ids=words)
def test_a_wrong_argument_of_one_rank_is_told_to_all(ranks, changes, kind, message, warm):
    found = ranks.outcomes(3, jobs.call, {1: changes}, warm)
    assert isinstance(found[1], kind) and message in str(found[1])
    for other in (found[0], found[2]):
        assert isinstance(other, RankError) and "rank 1 failed" in str(other) and message in str(other)


@pytest.mark.parametrize("where", ["forward", "exchange", "backward"])
def test_a_missing_rank_is_named_within_the_timeout(ranks, where):
    started = time.monotonic()
    found = ranks.outcomes(3, jobs.missing, 1, where, timeout=2.0)
    assert time.monotonic() - started < 30
    assert found[1] == "stayed away" or isinstance(found[1], KeyError)
    for other in (found[0], found[2]):
        assert isinstance(other, RankError) and "rank 1 did not come" in str(other) and "2 s" in str(other)


def test_without_a_process_group():
    x = torch.ones(1, 5, 2, 6)
    with pytest.raises(ValueError, match=r"group must be given, or .*init_process_group"):
        context_parallel_attention(x, x, x, window=3)
    with pytest.raises(TypeError, match=r"group must be a ProcessGroup or DeviceMesh .*, got str"):
        context_parallel_attention(x, x, x, window=3, group="world")
