"""A cache in given memory behaves like any other."""
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from cupy_dma.transformers.layers import DynamicMask, GateMask  # noqa: E402
from cupy_dma.vllm.storage import page_bytes, parts, placed, single  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
HEADS, SIZE, PAGES = 2, 16, 3
HOW = {"top": DynamicMask(5, sinks=1, recent=2), "per head": DynamicMask((5, 3), sinks=1),
       "gates": GateMask(3, -12.0, 1, 0.1, capacity=4), "gates per head": GateMask(3, -12.0, 1, 0.1, capacity=(2, 4))}


def tokens(batch, length, dtype=torch.float32):
    q, k, v = (torch.randn(batch, length, heads, SIZE).to(dtype) for heads in (4, HEADS, HEADS))
    return q, k, v, torch.randn(batch, HEADS, length)


def memory_of(cache, pages=PAGES):
    return torch.full((pages * page_bytes(cache),), 77, dtype=torch.int8)  # left over from another request


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize(("dtype", "storage"), [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "fp8")])
def test_placed_is_a_cache(name, dtype, storage):
    torch.manual_seed(0)
    cache = single(HOW[name], HEADS, SIZE, torch.empty(0, dtype=dtype), storage)
    expected = cache.select_batch([0] * PAGES)
    memory = memory_of(cache)
    assert placed(cache, memory) is cache
    assert cache.batch == PAGES
    for length in (4, 1, 7, 1, 1):
        given = tokens(PAGES, length, dtype)
        assert torch.equal(cache.extend(*given), expected.extend(*given))
    for found, wanted in zip(cache.kept(), expected.kept()):
        assert torch.equal(found, wanted)
    assert cache.length.tolist() == [14] * PAGES


@pytest.mark.parametrize("name", HOW)
def test_it_fills_the_memory(name):
    """Every array but the counters is in the given memory, at multiples of 16 bytes, without overlap."""
    cache = single(HOW[name], HEADS, SIZE, torch.empty(0))
    memory = memory_of(cache)
    names = [part.name for part in parts(cache)]
    placed(cache, memory)
    spans = sorted((x.data_ptr() - memory.data_ptr(), x.numel() * x.element_size())
                   for x in (getattr(cache._state, name).array for name in names))
    assert all(begin % 16 == 0 for begin, _ in spans)
    assert all(begin + size <= later for (begin, size), (later, _) in zip(spans, [*spans[1:], (memory.numel(), 0)]))
    held = sum(size for _, size in spans)
    assert memory.numel() - held < 16 * PAGES * len(names)
    assert cache.memory_bytes - held == (0 if cache._state.segments is None else 20 * PAGES * HEADS)
    assert not cache._state.tickets.array.any()


def test_errors():
    cache = single(HOW["top"], HEADS, SIZE, torch.empty(0))
    page = page_bytes(cache)
    for wrong in (torch.zeros(page + 1, dtype=torch.int8), torch.zeros(page, dtype=torch.uint8),
                  torch.zeros(2 * page, dtype=torch.int8)[::2], torch.zeros(page + 1, dtype=torch.int8)[1:],
                  torch.zeros(2, page, dtype=torch.int8)):
        with pytest.raises(ValueError, match="whole pages of"):
            placed(cache, wrong)
    assert cache.batch == 1
    with pytest.raises(ValueError, match="device"):
        placed(cache, torch.zeros(page, dtype=torch.int8, device="meta"))
    with pytest.raises(ValueError, match="needs a capacity"):
        single(GateMask(3, -12.0, 1, 0.1), HEADS, SIZE, torch.empty(0))
