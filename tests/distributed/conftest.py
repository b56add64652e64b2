import pytest


@pytest.fixture(scope="session")
def _pool():
    """A list whose only item is the processes, so that they can be replaced."""
    made = []
    yield made
    for ranks in made:
        ranks.close()


@pytest.fixture
def ranks(_pool):
    """Four processes of a gloo process group, shared by all tests and replaced after a test that killed some."""
    torch = pytest.importorskip("torch")
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    from tests.distributed.ranks import Ranks

    if _pool and not _pool[0].alive:
        _pool.pop().close()
    if not _pool:
        _pool.append(Ranks())
    return _pool[0]
