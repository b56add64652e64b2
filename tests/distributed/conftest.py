import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(scope="session")
def ranks():
    """Four processes of a gloo process group, for all tests."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    from tests.distributed.ranks import Ranks

    made = Ranks()
    yield made
    made.close()
