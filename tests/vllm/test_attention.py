"""The attention layer under a scheduler's batches: chunks of prompts, single tokens, reused blocks."""
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from cupy_dma.transformers.layers import GateMask  # noqa: E402
from cupy_dma.vllm.storage import page_bytes, single  # noqa: E402
from tests.vllm.test_storage import HEADS, HOW, SIZE  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
QUERIES, BLOCKS, NAME = 4, 4, "model.layers.0.self_attn.attn"


def layer_of(plugin, how):
    """A layer whose scores are the first element of each value."""
    return plugin.DynamicMaskAttention(NAME, QUERIES, HEADS, SIZE, 0.25, how, lambda value, x: value[..., 0].mT)


def spec_of(layer, dtype=torch.float32):
    return layer.get_kv_cache_spec(SimpleNamespace(model_config=SimpleNamespace(dtype=dtype, max_model_len=64)))


def allocated(layer, blocks=BLOCKS, dtype=torch.float32, device="cpu"):
    """Memory as vLLM allocates it: blocks of the spec's size in bytes, viewed as the spec's type."""
    page = spec_of(layer, dtype).page_size_bytes
    memory = torch.zeros(blocks * page, dtype=torch.int8, device=device)
    layer.kv_cache = memory.view(dtype).view(blocks, 1, 1, -1)
    return layer


def metadata(plugin, batch, padding=0, known=True, device="cpu"):
    """vLLM's metadata for requests ``(block, tokens before, new tokens)``, and ``padding`` requests without tokens."""
    blocks, before, new = zip(*batch)
    counts = torch.tensor([*new, *[0] * padding], dtype=torch.int32)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()])
    length = torch.tensor([*before, *[0] * padding], dtype=torch.int32) + counts
    n, total = len(counts), int(counts.sum()) + padding
    return plugin.CommonAttentionMetadata(
        query_start_loc=bounds.to(device), query_start_loc_cpu=bounds.clone(), seq_lens=length.to(device), num_reqs=n,
        num_actual_tokens=total, max_query_len=int(counts.max()), max_seq_len=int(length.max()),
        block_table_tensor=torch.tensor([*blocks, *[0] * padding], dtype=torch.int32, device=device)[:, None],
        slot_mapping=torch.empty(0), seq_lens_cpu_upper_bound=length.clone() if known else None)


def built(plugin, *batch, **options):
    return plugin.BatchBuilder(None, [NAME], None, torch.device("cpu")).build(0, metadata(plugin, batch, **options))


def test_builder(plugin):
    step = built(plugin, (3, 7, 1), (1, 9, 1))
    assert step.is_step and step.fresh is None and step.slots.tolist() == [3, 1] and step.tokens == 2
    mixed = built(plugin, (3, 7, 1), (2, 0, 5), (1, 4, 6), padding=2)
    assert not mixed.is_step and mixed.slots.tolist() == [3, 2, 1, -1, -1]
    assert mixed.fresh.tolist() == [-1, 2, -1, -1, -1]
    assert mixed.cu_seqlens.tolist() == [0, 1, 6, 12, 12, 12] and mixed.tokens == 14
    begins = built(plugin, (3, 7, 1), (2, 0, 1), padding=1)
    assert begins.is_step and begins.fresh.tolist() == [-1, 2, -1]
    assert not built(plugin, (3, 7, 0), (1, 9, 1), padding=1).is_step  # rows are not requests
    assert built(plugin, (3, 7, 1), known=False).fresh.tolist() == [-1]  # unknown to the host; the device finds it
    padded = metadata(plugin, [(3, 7, 1)], padding=1)
    padded.num_actual_tokens += 3  # rows of a fixed size
    assert not plugin.BatchBuilder(None, [NAME], None, torch.device("cpu")).build(0, padded).is_step


@pytest.mark.parametrize("name", HOW)
def test_spec(plugin, name):
    layer = layer_of(plugin, HOW[name])
    spec, page = spec_of(layer), page_bytes(single(HOW[name], HEADS, SIZE, torch.empty(0)))
    assert spec.page_size_bytes == spec.max_memory_usage_bytes(None) == page
    assert spec.max_num_blocks_per_req(None, 10**6) == 1
    assert not spec.prefix_cacheable and not spec.uses_slot_mapping
    assert spec.copy_with_new_block_size(spec.block_size) == spec
    half = spec_of(layer, torch.bfloat16)
    assert page / 2 < half.page_size_bytes < page and half.dtype == torch.bfloat16
    assert spec.is_uniform_with_collection({"a": spec, "b": half})
    assert not spec.is_uniform_with_collection({"a": spec, "b": object()})
    assert layer.get_attn_backend().supported_kv_cache_layouts() == (plugin.KVCacheLayout.LBHNC,)


class Requests:
    """Requests, each with its own tokens and the results of its own float32 cache, token by token."""

    def __init__(self, how, count, length, dtype=torch.float32, device="cpu", tolerance=1e-5):
        draws = (torch.randn(length, heads * SIZE).to(dtype) for _ in range(count) for heads in (QUERIES, HEADS, HEADS))
        found = list(zip(*[draws] * 3))
        self.tokens = [[x.to(device) for x in each] for each in found]
        self.expected, self.tolerance = [], tolerance
        for q, k, v in ([x.float() for x in each] for each in found):
            cache, rows = single(how, HEADS, SIZE, torch.empty(0)), []
            extra = {"add_gates": False} if isinstance(how, GateMask) else {}
            for i in range(length):
                one = [x[i:i + 1].view(1, 1, -1, SIZE) for x in (q, k, v)]
                rows.append(cache.extend(*one, one[2][..., 0].mT, scale=0.25, **extra).view(-1))
            self.expected.append(torch.stack(rows))

    def run(self, layer, batch, pieces, padding=0):
        """One step of ``pieces (request, begin, end)``."""
        rows = [[x[begin:end] for x in self.tokens[r]] for r, begin, end in pieces]
        q, k, v = (torch.cat([*x, x[0].new_full((padding, x[0].shape[1]), torch.nan)]) for x in zip(*rows))
        out = torch.full_like(q, torch.nan)
        layer.attend(q, k, v, None, out, batch)
        expected = torch.cat([self.expected[r][begin:end] for r, begin, end in pieces])
        torch.testing.assert_close(out[:len(expected)].cpu().float(), expected, rtol=0, atol=self.tolerance)
        assert not out[len(expected):].any()


@pytest.mark.parametrize("name", HOW)
def test_requests_in_turn(plugin, name):
    in_turn(plugin, HOW[name])


def in_turn(plugin, how, dtype=torch.float32, device="cpu", tolerance=1e-5):
    """More requests than blocks, prompts in chunks, padding, and a request that is preempted and restarts."""
    torch.manual_seed(0)
    layer = allocated(layer_of(plugin, how), dtype=dtype, device=device)
    requests = Requests(how, 6, 24, dtype, device, tolerance)
    steps = [[(0, 1, 0, 5)], [(0, 1, 5, 6), (1, 2, 0, 9)], [(1, 2, 9, 17), (0, 1, 6, 7), (2, 3, 0, 1)],
             [(0, 1, 7, 8), (1, 2, 17, 18), (2, 3, 1, 2)],  # one token each
             [(3, 1, 0, 3), (1, 2, 18, 19), (2, 3, 2, 14)],  # request 0 has ended
             [(3, 1, 3, 4), (2, 3, 14, 15)],
             [(4, 2, 0, 1), (3, 1, 4, 5), (2, 3, 15, 16)],  # a prompt of one token
             [(5, 3, 0, 24), (3, 1, 5, 24)],
             [(2, 2, 0, 16)], [(2, 2, 16, 17), (4, 3, 0, 7)]]  # requests 2 and 4 begin again, in other blocks
    for number, pieces in enumerate(steps):
        padding = number % 3
        batch = built(plugin, *((block, begin, end - begin) for _, block, begin, end in pieces), padding=padding,
                      device=device)
        requests.run(layer, batch, [(r, begin, end) for r, _, begin, end in pieces], padding)


def test_more_padding_than_blocks(plugin):
    torch.manual_seed(0)
    layer, requests = allocated(layer_of(plugin, HOW["top"]), blocks=2), Requests(HOW["top"], 1, 4)
    requests.run(layer, built(plugin, (1, 0, 3), padding=5), [(0, 0, 3)], padding=5)
    requests.run(layer, built(plugin, (1, 3, 1), padding=5), [(0, 3, 4)], padding=5)


def test_the_operator(plugin, monkeypatch):
    torch.manual_seed(0)
    layer, requests = allocated(layer_of(plugin, HOW["top"])), Requests(HOW["top"], 1, 6)
    context = SimpleNamespace(attn_metadata=None, no_compile_layers={NAME: layer})
    monkeypatch.setattr(plugin, "get_forward_context", lambda: context)
    q, k, v = requests.tokens[0]
    assert not layer(q, k, v).any()  # vLLM's memory profiling
    context.attn_metadata = {NAME: built(plugin, (2, 0, 6))}
    torch.testing.assert_close(layer(q, k, v), requests.expected[0], rtol=1e-5, atol=1e-5)
    context.attn_metadata = {NAME: built(plugin, (1, 0, 6))}
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), requests.expected[0], rtol=1e-5, atol=1e-5)
    assert layer.cache.length.tolist() == [0, 6, 6, 0]


def test_released_memory(plugin):
    layer, requests = allocated(layer_of(plugin, HOW["top"])), Requests(HOW["top"], 1, 2)
    layer.kv_cache = torch.tensor([])  # as vLLM does after a trial
    assert layer.cache is None
    with pytest.raises(RuntimeError, match="has no cache"):
        requests.run(layer, built(plugin, (1, 0, 2)), [(0, 0, 2)])
