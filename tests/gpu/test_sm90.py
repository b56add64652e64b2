"""The Hopper forward (kernels/sm90) on a Hopper GPU: the grid of the portable kernels, even where the library would not
use it, and equal bits in every run. Some of it also runs on the emulator, from tests/emulator/tests/test_sm90.py with a
``device`` and lengths of its own."""
import itertools
from contextlib import ExitStack

import pytest

import cupy_dma as dma
from cupy_dma.arrays import library_named
from cupy_dma.backends import cuda
from cupy_dma.backends.cuda.attention import sm90, sm90_schedule
from cupy_dma.backends.cuda.runtime.program import fresh
from cupy_dma.masks.interval import NEVER, Hints
from tests.gpu.sm90_tiles import TILES, portable, taken
from tests.gpu.test_forward import converter, draw, draw_scores
from tests.oracle import cases, schedule_cases, varlen_cases

pytestmark = pytest.mark.gpu

RUNS_MAPS = sm90._runs_maps
FORWARD = [c for c in cases.CASES if c.dtype in ("float16", "bfloat16")]
GRID_IN_SPLITS = ("192x96", "192x64", "128x128", "128x32")  # tiles
VARLEN = [c for c in varlen_cases.CASES + varlen_cases.LONG if c.dtype in ("float16", "bfloat16")]


@pytest.fixture
def torch():
    module = pytest.importorskip("torch")
    if not cuda.runtime.hopper(0):
        pytest.skip("needs a Hopper GPU (compute capability 9.0)")
    return module


@pytest.fixture
def device():
    return "cuda"


@pytest.fixture
def everything(torch, calls_of):
    """Run every call that the kernel supports in it, with the requested tile; returns their number."""
    with fresh(), ExitStack() as stack:  # contexts that the test enters end before this one
        def choose(tile, head_dims):
            stack.enter_context(taken(tile, head_dims))
            return calls_of(sm90, "attention")

        yield choose


def exact(torch, q, k, v, bias=None, softcap=0.0, scale=None, hidden=None):
    """``out`` (Lq, H, D) and ``lse`` (H, Lq) of one sequence with one kv head, in float64."""
    logits = torch.einsum("qhd,kd->hqk", q[0].double(), k[0, :, 0].double()) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits += bias[0].double()
    if hidden is not None:
        logits.masked_fill_(hidden, -torch.inf)
    return torch.einsum("hqk,kd->qhd", logits.softmax(-1).nan_to_num(0.0), v[0, :, 0].double()), logits.logsumexp(-1)


def outside(torch, length, window, device):
    """bool (L, L): the pairs that a sliding window hides."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance < 0) | (distance >= window)


def lse_bound(q, bias):
    """A sum starts at the bias and is truncated to 24 bits after every 16 products. For D > 64 that exceeds the 16 half
    units of the last bit that reference.py allows."""
    return (q.shape[-1] / 16 + 4) * 2**-23 * bias.abs().max() + 1e-5


def check_close(found, expected):
    """Equal to another kernel's result within a rounding of bfloat16."""
    assert (found.float() - expected.float()).abs().max() <= 2**-7 * expected.float().abs().max()


def thirds(chosen, tiles):
    """Every third tile for each case, shifted from case to case, so each tile sees all features of a call."""
    pairs = [(case, tile) for i, case in enumerate(chosen) for j, tile in enumerate(tiles) if (i + j) % 3 == 0]
    return pytest.mark.parametrize(("case", "tile"), pairs, ids=[f"{case}-{tile}" for case, tile in pairs])


@pytest.mark.feature("cuda forward", "attention", "float16, bfloat16", case="float16-D")
@thirds(FORWARD, TILES)
def test_forward_grid(case, tile, everything):
    everything(*TILES[tile])
    cases.check(case, *cases.run(case, converter("torch")))


@pytest.mark.parametrize(("tile", "name", "case"), [
    (*own, case) for *own, masks in (("128x128", "_maps", ("none", "causal")),
                                     ("192x64", "queries_map", ("top_w", "causal")))
    for case in FORWARD if case.mask in masks], ids=str)
def test_without_the_copy_engine(tile, name, case, everything, monkeypatch):
    """Contiguous keys and queries, loaded without TMA."""
    everything(*TILES[tile])
    monkeypatch.setattr(sm90, name, lambda *arguments: None)
    cases.check(case, *cases.run(case, converter("torch")))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("slope", [0.05, 0.4, 3.0, -0.4])
def test_logits_that_rise_and_fall(slope, softcap, masked, tile, everything, torch, device):
    """The reference of the exponentials must follow the logits: sometimes, in every block (at slope 3 only once their
    sum has overflowed), or never after the first. The first block of a tile sets a new reference while the previous
    tile has not been written yet."""
    served, length, window = everything(*TILES[tile]), 1000, 300
    q, k, v = draw(torch, length, length, 2, 1, TILES[tile][1][-1], device=device)
    bias = slope * torch.arange(length, device=device, dtype=torch.float32).expand(1, 1, length)
    mask = dma.IntervalMask.sliding_window(length, window, like=q) if masked else None
    results = []
    for sms in (132, 1):
        with schedule_cases.num_sms(sms):
            results.append(dma.attention(q, k, v, mask=mask, bias=bias, causal=True, softcap=softcap, return_lse=True))
    (out, lse), others = results
    assert torch.equal(out, others[0]) and torch.equal(lse, others[1])
    hidden = outside(torch, length, window if masked else length, device)
    expected, expected_lse = exact(torch, q, k, v, bias, softcap, hidden=hidden)
    assert len(served) == 2
    assert (out[0].double() - expected).abs().max() < 2**-6 * v.abs().max()
    assert (lse[0].double() - expected_lse).abs().max() < lse_bound(q, bias)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("largest", [0.2, 0.45, 3.0])
def test_softcaps_of_small_and_large_products(largest, masked, everything, torch, device):
    """Logits up to a quarter and up to a half of the softcap use polynomials; larger ones do not."""
    served, length, cap = everything(*TILES["192x64"]), 500, 20.0
    q, k, v = draw(torch, length, length, 2, 1, 64, device=device)
    products = torch.einsum("qhd,kd->hqk", q[0].double(), k[0, :, 0].double())
    scale = largest * cap / products.abs().max().item()
    mask = dma.IntervalMask.sliding_window(length, 300, like=q) if masked else None
    out, lse = dma.attention(q, k, v, mask=mask, causal=True, scale=scale, softcap=cap, return_lse=True)
    hidden = outside(torch, length, 300 if masked else length, device)
    expected, expected_lse = exact(torch, q, k, v, None, cap, scale, hidden)
    assert served
    assert (out[0].double() - expected).abs().max() < 2**-7 * v.abs().max()
    assert (lse[0].double() - expected_lse).abs().max() < 2**-19 * min(largest, 1.0) * cap


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("masked", [True, False])
def test_softcaps_of_products_that_change(masked, tile, everything, torch, device):
    """Within a tile, later keys need another polynomial than the first ones, once or twice; or the first keys have the
    largest logits."""
    served, length, cap, sizes = everything(*TILES[tile]), 1000, 20.0, (0.2, 0.2, 0.45, 0.2, 3.0, 0.2, 0.45, 0.45)
    q, k, v = draw(torch, length, length, 2, 1, TILES[tile][1][-1], device=device)
    scale = q.shape[-1] ** -0.5
    for part, size in zip(k[0, :, 0].split(128), sizes):
        part *= size * cap / (scale * torch.einsum("qhd,kd->hqk", q[0].double(), part.double()).abs().max().item())
    bias = torch.randn(1, 1, length, device=device)
    mask = dma.IntervalMask.sliding_window(length, 600, like=q) if masked else None
    out, lse = dma.attention(q, k, v, mask=mask, bias=bias, causal=True, softcap=cap, return_lse=True)
    hidden = outside(torch, length, 600 if masked else length, device)
    expected, expected_lse = exact(torch, q, k, v, bias, cap, scale, hidden)
    assert served
    assert (out[0].double() - expected).abs().max() < 2**-7 * v.abs().max()
    assert (lse[0].double() - expected_lse).abs().max() < 2**-19 * cap
    assert torch.equal(out[:, 0], v[:, 0].expand_as(out[:, 0]))  # a query that sees one key gets its value


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("masked", [True, False])
def test_softcaps_of_values_near_the_largest(masked, tile, everything, torch, device):
    """Sums would overflow if exponentials were not relative to the row's maximum: in all rows, in one row, or where
    other keys than the relevant ones set the running maximum."""
    served, length, cap = everything(*TILES[tile]), 700, 20.0
    for lowest, factor, logit, step in ((7.0, 2.0**114, 1.0, 0.0), (0.0, 2.0**112, 4.0, 0.0),
                                        (-2.0, 2.0**114, 1.0, 11.0)):
        q, k, v = draw(torch, length, length, 2, 1, TILES[tile][1][-1], device=device)
        v *= factor
        q[:, 620] *= logit
        bias = lowest + draw_scores(torch, 1, 1, length, device=device)
        bias[..., 100:] += step
        mask = dma.IntervalMask.sliding_window(length, 600, like=q) if masked else None
        out = dma.attention(q, k, v, mask=mask, bias=bias, softcap=cap)
        expected, _ = exact(torch, q, k, v, bias, cap, hidden=outside(torch, length, 600, device) if masked else None)
        assert (out[0].double() - expected).abs().max() < 2**-7 * v.abs().max()
    assert served


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_of_one_block(head_dim, torch):
    """CTAs that process several tiles of one key block each do not wait for others."""
    q, k, v = draw(torch, 40000, 40000, 4, 2, head_dim)
    mask = dma.IntervalMask.sliding_window(40000, 20, like=q)
    out = dma.attention(q, k, v, mask=mask)
    with portable():
        expected = dma.attention(q, k, v, mask=mask)
    assert not torch.equal(out, expected)  # another kernel
    check_close(out, expected)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("biased", [True, False])
def test_lists_of_every_length(biased, tile, everything, torch, device, every=1):
    """Full and partial keys around block boundaries: invisible keys and empty places must not count. ``every``: tests
    one in so many pairs of lengths."""
    lengths = [*itertools.product((0, 1, 31, 32, 33, 63, 64, 65, 128, 150), (0, 1, 31, 32, 33, 64, 100))][::every]
    served, length, queries = everything(*TILES[tile]), 400, 40
    q, k, v = draw(torch, queries, length, 2, 1, TILES[tile][1][-1], device=device)
    bias = draw_scores(torch, 1, 1, length, device=device) if biased else None
    order = torch.randperm(length - queries, generator=torch.Generator().manual_seed(2)).to(q.device)
    position = torch.arange(length - queries, length, device=q.device)
    for full, partial in lengths:
        stop = torch.zeros(length, dtype=torch.int32, device=q.device)
        stop[order[:full]] = NEVER
        stop[order[full:full + partial]] = length - queries // 2
        mask = dma.IntervalMask._make(library_named("torch"), torch.zeros_like(stop), stop,
                                      Hints(bound=(max(full + partial, 1), 0)))
        keys, values = k.clone(), v.clone()
        keys[0, stop == 0], values[0, stop == 0] = torch.nan, torch.nan
        out, lse = dma.attention(q, keys, values, mask=mask, bias=bias, return_lse=True)

        expected, expected_lse = exact(torch, q, k, v, bias, hidden=position[:, None] >= stop)
        assert (out[0].double() - expected).abs().max() < 2**-6 * v.abs().max(), (full, partial)
        seen = expected_lse > -torch.inf
        assert torch.equal(lse[0] > -torch.inf, seen), (full, partial)
        assert ((lse[0].double() - expected_lse)[seen].abs() < 1e-4).all(), (full, partial)

        if partial:  # invisible to the second half of the queries
            values[0, order[full + partial - 1], 0, 0] = torch.inf
            poisoned = dma.attention(q, keys, values, mask=mask, bias=bias)
            assert torch.equal(poisoned[:, queries // 2:], out[:, queries // 2:]), (full, partial)
            assert (poisoned[:, :queries // 2, :, 0] == torch.inf).all(), (full, partial)
    assert len(served) == sum(2 if partial else 1 for _, partial in lengths)


def test_the_copy_engine_reads_views(torch):
    """TMA reads layouts with heads before rows, and slices of heads and columns; an expanded batch is gathered instead,
    with keys in another order."""
    q = torch.randn(2, 6000, 8, 128, device="cuda").bfloat16()
    wide = torch.randn(2, 4, 6000, 256, device="cuda").bfloat16()
    for k, v in ((wide[..., :128].transpose(1, 2), wide[..., 128:].transpose(1, 2)),
                 (wide[:, 1:3, :, 64:192].transpose(1, 2), wide[:, 2:, :, :128].transpose(1, 2)),
                 (wide[:1, :1, :, :128].transpose(1, 2).expand(2, 6000, 1, 128),) * 2):
        expected, out = (dma.attention(q, *rows, causal=True) for rows in ((k.contiguous(), v.contiguous()), (k, v)))
        assert torch.equal(out, expected) or k.stride(0) == 0
        check_close(out, expected)


@pytest.mark.parametrize("tile", [name for name, (tile, _) in TILES.items() if tile.block_m == 128])
@pytest.mark.parametrize(("masked", "biased"), [(True, False), (False, True), (True, True)])
def test_keys_that_follow_each_other(masked, biased, tile, everything, torch, monkeypatch, device, length=1001):
    """TMA loads runs of consecutive keys in the order of gathered ones, so bits are equal for all lists."""
    _, head_dims = TILES[tile]
    served, boxes = everything(*TILES[tile]), []
    for head_dim in (head_dims[0] + 7, (head_dims[0] + head_dims[-1]) // 2 // 8 * 8, head_dims[-1]):
        q = torch.randn(2, 150, 4, head_dim, device=device).bfloat16()
        wide = torch.randn(2, 2, length, 2 * head_dim, device=device).bfloat16()
        k, v = wide[..., :head_dim].transpose(1, 2), wide[..., head_dim:].transpose(1, 2)
        mask = torch.rand(2, 1, 150, length, device=device) < 0.5
        mask[:, :, :, 300:340], mask[0, :, :, 7 * length // 10], mask[1, :, :100, 8:16] = False, False, False
        bias = torch.randn(2, 4, 150, length + 7, device=device).to(q.dtype)[..., :length]  # rows of 16 bytes
        options = {"mask": mask if masked else None, "bias": bias if biased else None, "return_lse": True}
        monkeypatch.setattr(sm90, "_runs_maps", lambda call: boxes.append(found := RUNS_MAPS(call)) or found)
        results = dma.attention(q, k, v, **options)
        monkeypatch.setattr(sm90, "_runs_maps", lambda call: None)
        for ours, other in zip(results, dma.attention(q, k, v, **options)):
            assert torch.equal(ours, other)
    assert len(served) == 6
    assert len(boxes) == 3 and all(boxes)


@pytest.fixture
def poison(torch):
    """A function that fills all shared memory with a value that no key has, before the next kernel runs."""
    import cupy

    size = cupy.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]
    kernel = cupy.RawKernel(r"""
        extern "C" __global__ void fill(int words) {
            extern __shared__ volatile int shared[];
            for (int i = threadIdx.x; i < words; i += blockDim.x) shared[i] = 0x7fffffff;
        }""", "fill")
    kernel.max_dynamic_shared_size_bytes = size
    return lambda: kernel((8 * cuda.runtime.num_sms(0),), (256,), (size // 4,), shared_mem=size)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_dense_bias_of_short_blocks(head_dim, everything, poison, torch, device):
    """A list's last block has few keys; stale contents of its other places must not count as keys."""
    served, length, queries = everything(*TILES["128x128"]), 400, 40
    q, k, v = draw(torch, queries, length, 2, 1, head_dim, device=device)
    bias = torch.randn(1, 2, queries, length, device=device).to(q.dtype)
    order = torch.randperm(length - queries, generator=torch.Generator().manual_seed(3)).to(q.device)
    for seen in (12, 128 + 12, 128 + 32):
        stop = torch.zeros(length, dtype=torch.int32, device=q.device)
        stop[order[:seen]] = NEVER
        mask = dma.IntervalMask._make(library_named("torch"), torch.zeros_like(stop), stop, Hints(bound=(seen, 0)))
        poison()
        out = dma.attention(q, k, v, mask=mask, bias=bias)
        with portable():
            expected = dma.attention(q, k, v, mask=mask, bias=bias)
        check_close(out, expected)
    assert len(served) == 3


@pytest.mark.parametrize("head_dim", [64, 128])
def test_dense_bias_where_the_kernel_pays(head_dim, poison, torch, calls_of, fresh_programs):
    """A dense bias uses its tiles, with every kind of mask."""
    length, served = 2304, calls_of(sm90, "attention")
    q, k, v = draw(torch, length, length, 16, 8, head_dim)
    bias = torch.randn(1, 16, length, length, device="cuda").to(q.dtype)
    masks = (None, dma.IntervalMask.top_w(draw_scores(torch, 1, 8, length), 300),
             torch.rand(1, 1, length, length, device="cuda") < 0.5)

    for mask, causal in itertools.product(masks, (False, True)):
        with portable():
            expected, expected_lse = dma.attention(q, k, v, mask=mask, bias=bias, causal=causal, return_lse=True)
        poison()
        out, lse = dma.attention(q, k, v, mask=mask, bias=bias, causal=causal, return_lse=True)
        assert torch.equal(lse > -torch.inf, seen := expected_lse > -torch.inf)
        assert (lse - expected_lse)[seen].abs().max() < 1e-5
        check_close(out, expected)
    assert len(served) == 6


@pytest.mark.parametrize(("name", "tile"), [(name, tile) for name in schedule_cases.CASES for tile in TILES
                                            if name != "dense bias" or TILES[tile][0].block_m == 128])
def test_the_same_bits_however_tiles_are_dealt_out(name, tile, everything, torch, device, heads=schedule_cases.HEADS,
                                                   sm_counts=(1, 2, 3, 4, 5, 7, 31, 132), length=1003):
    """One SM processes whole tiles; several SMs process whole tiles and splits of the last ones."""
    served = everything(*TILES[tile])
    for group in heads:
        problem = name, *group, TILES[tile][1][-1], lambda x: torch.tensor(x, device=device), None, length
        results = []
        for sms in sm_counts:
            with schedule_cases.num_sms(sms):
                results.append(schedule_cases.run(*problem))
        for ours, expected in ((x, y) for result in results[1:] for x, y in zip(result, results[0])):
            if schedule_cases.CASES[name]:
                assert torch.equal(ours.view(torch.int16), expected.view(torch.int16))
            else:
                torch.testing.assert_close(ours, expected, rtol=0, atol=2**-8)
        with portable():
            out, lse = schedule_cases.run(*problem)
        torch.testing.assert_close(results[0][0], out, rtol=0, atol=2**-8, equal_nan=True)
        torch.testing.assert_close(results[0][1], lse, rtol=0, atol=1e-4)
    assert len(served) == len(sm_counts) * len(heads)


@pytest.mark.parametrize(("name", "tile"), [(name, tile) for name in schedule_cases.CASES for tile in TILES
                                            if name != "dense bias" or TILES[tile][0].block_m == 128])
def test_tiles_split_up_along_their_keys(name, tile, everything, torch, device, heads=schedule_cases.HEADS,
                                         sm_counts=(3, 7, 20, 31, 132), length=1003):
    """After whole tiles or without any; into few or many splits, some without keys. Two runs give the same bits."""
    everything(*TILES[tile])
    found = set()
    for group in heads:
        problem = name, *group, TILES[tile][1][-1], lambda x: torch.tensor(x, device=device), None, length
        with schedule_cases.num_sms(1):
            expected = schedule_cases.run(*problem)
        for sms in sm_counts:
            with schedule_cases.num_sms(sms, split=True) as splits:
                results, again = (schedule_cases.run(*problem) for _ in range(2))
            found.update(splits)
            for ours, others in zip(results, again):
                assert torch.equal(ours.view(torch.int16), others.view(torch.int16))
            torch.testing.assert_close(results[0], expected[0], rtol=0, atol=2**-8, equal_nan=True)
            torch.testing.assert_close(results[1], expected[1], rtol=0, atol=1e-4)
    whole = "sequences" in name or "all tiles" in name  # the number of keys per query is not known
    assert found == {1} if whole else max(found) > 2


@pytest.mark.parametrize(("name", "tile"), [(name, tile) for name in schedule_cases.CASES for tile in TILES
                                            if TILES[tile][0].block_m == 192 and name != "dense bias"])
def test_a_last_round_of_lower_tiles(name, tile, everything, torch, device, heads=schedule_cases.HEADS,
                                     sm_counts=(4, 6, 14, 16, 26, 32, 48), length=1003):
    """After whole tiles or without any, as many tiles as SMs or fewer. The order of keys in lists changes."""
    everything(*TILES[tile])
    found = set()
    for group in heads:
        problem = name, *group, TILES[tile][1][-1], lambda x: torch.tensor(x, device=device), None, length
        with schedule_cases.num_sms(1):
            expected = schedule_cases.run(*problem)
        for sms in sm_counts:
            with schedule_cases.num_sms(sms, short_tiles=True) as tiles:
                results = schedule_cases.run(*problem)
            found.update(tiles)
            if name in ("none", "key bias", "sequences"):
                assert all(map(torch.equal, results, expected))
            torch.testing.assert_close(results[0], expected[0], rtol=0, atol=2**-8, equal_nan=True)
            torch.testing.assert_close(results[1], expected[1], rtol=0, atol=1e-4)
    assert found == {0} if "sequences" in name or name == "causal" else max(found) > 2


@pytest.mark.parametrize("sms", [10, 12])
@pytest.mark.parametrize("tile", [tile for tile in TILES if TILES[tile][0].block_m == 192])
def test_short_tail_tiles_of_the_last_queries(tile, sms, everything, torch, device, length=1003, queries=700):
    """Short tiles for all of 8 tiles and for the last one, with positions that differ from row numbers, and one mask
    per batch entry."""
    everything(*TILES[tile])
    q, k, v = draw(torch, queries, length, 2, 1, TILES[tile][1][-1], device=device, batch=2)
    scores = torch.randn(2, 1, length, device=device)
    mask = dma.IntervalMask.top_w(scores, 100)
    with schedule_cases.num_sms(sms, short_tiles=True) as tiles:
        out, lse = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True)
    with portable():
        expected = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True)
    assert tiles == [{10: 4, 12: 2}[sms]]
    torch.testing.assert_close(out, expected[0], rtol=0, atol=2**-6)
    torch.testing.assert_close(lse, expected[1], rtol=0, atol=1e-4)


@thirds(FORWARD, GRID_IN_SPLITS)
def test_forward_grid_in_splits(case, tile, everything):
    everything(*TILES[tile])
    with schedule_cases.num_sms(31, split=True):
        cases.check(case, *cases.run(case, converter("torch")))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("biased", "sms"), [(True, 2), (True, 3), (False, 3)])
def test_splits_of_lists_of_every_length(biased, sms, tile, everything, torch, device, every=1):
    """One tile, whose splits have full keys, partial ones, both or none."""
    with schedule_cases.num_sms(sms, split=True) as splits:
        test_lists_of_every_length(biased, tile, everything, torch, device, every)
    assert set(splits) == {sms}


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("slope", [0.05, 3.0, -0.4])
def test_splits_of_logits_that_rise_and_fall(slope, tile, everything, torch, device, softcap=0.0):
    """Some splits have no visible keys; some rows see no key in some splits, or in all."""
    everything(*TILES[tile])
    length, queries = 1000, 60
    q, k, v = draw(torch, queries, length, 2, 1, TILES[tile][1][-1], device=device)
    bias = slope * torch.arange(length, device=device, dtype=torch.float32).expand(1, 1, length)
    start, stop = (torch.zeros(length, dtype=torch.int32, device=device) for _ in range(2))
    stop[:300], stop[600:] = length - queries // 2, length - queries // 4  # queries have the last positions
    bad = k.clone(), v.clone()
    for rows in bad:
        rows[:, 300:600] = torch.nan  # invisible keys
    masks = None, dma.IntervalMask._make(library_named("torch"), start, stop, Hints(bound=(700, 0)))
    position = torch.arange(length - queries, length, device=device)
    for mask, sms in itertools.product(masks, (3, 8)):
        keys, values = (k, v) if mask is None else bad
        with schedule_cases.num_sms(sms, split=True) as splits:
            out, lse = dma.attention(q, keys, values, mask=mask, bias=bias, softcap=softcap, return_lse=True)
        assert splits == [sms]
        hidden = None if mask is None else position[:, None] >= stop
        expected, expected_lse = exact(torch, q, k, v, bias, softcap, hidden=hidden)
        assert (out[0].double() - expected).abs().max() < 2**-6 * v.abs().max()
        seen = expected_lse > -torch.inf
        assert torch.equal(lse[0] > -torch.inf, seen) and bool(seen.all()) == (mask is None)
        assert (lse[0].double() - expected_lse)[seen].abs().max() < lse_bound(q, bias)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "lists"])
def test_heads_that_do_not_fit_into_l2(masked, tile, everything, torch, monkeypatch, device, heads=(10, 5),
                                       sm_counts=(1, 2, 3, 5, 7, 13, 132), length=700, split_on=13):
    """With the maximum number of sections, most of whose last rounds have tiles for some SMs only; and with tiles of
    the last round split along their keys."""
    served, head_dim = everything(*TILES[tile]), TILES[tile][1][-1]
    rotations, rotation = [], sm90_schedule._rotation
    monkeypatch.setattr(sm90_schedule, "_rotation", lambda *facts: rotations.append(rotation(*facts)) or rotations[-1])
    monkeypatch.setattr(sm90_schedule, "SWIZZLE_GROUP_BYTES", 1)
    q, k, v = draw(torch, length, length, *heads, head_dim, device=device)
    options = {"causal": True, "return_lse": True}
    if masked:
        options["mask"] = dma.IntervalMask.top_w(draw_scores(torch, 1, heads[1], length, device=device), 300)
    results = []
    for sms in sm_counts:
        with schedule_cases.num_sms(sms):
            results.append(dma.attention(q, k, v, **options))
    for ours, expected in ((x, y) for result in results[1:] for x, y in zip(result, results[0])):
        assert torch.equal(ours, expected)
    if masked:
        with schedule_cases.num_sms(split_on, split=True) as splits:
            results.append(dma.attention(q, k, v, **options))
        assert splits[0] > 1 and any(rotations)
    with portable():
        expected, expected_lse = dma.attention(q, k, v, **options)
    for out, lse in (results[0], results[-1]):
        check_close(out, expected)
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-4)
    assert len(served) == len(results)


@thirds(VARLEN, TILES)
def test_packed_sequences(case, tile, everything):
    everything(*TILES[tile])
    varlen_cases.check(case, *varlen_cases.run(case, converter("torch")))


@pytest.mark.parametrize("tile", TILES)
def test_the_grid_reaches_the_kernel(tile, everything, torch):
    served = everything(*TILES[tile])
    for dense in (False, True):
        q, k, v = draw(torch, 70, 90, 4, 2, TILES[tile][1][-1])
        dma.attention(q, k, v, causal=True, mask=torch.rand(1, 1, 70, 90, device="cuda") < 0.5 if dense else None)
    bounds = [torch.tensor([0, 20, n], dtype=torch.int32, device="cuda") for n in (70, 90)]
    dma.varlen_attention(q[0], k[0], v[0], *bounds)
    assert len(served) == (3 if TILES[tile][0].block_m == 128 else 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(2000,) * 20, (8000, 3, 0, 5000, 700, 1, 4000, 9000)])
def test_sequences_agree_with_the_portable_kernel(torch, lengths, causal):
    total = sum(lengths)
    q, k, v = (x[0] for x in draw(torch, total, total, 16, 8, 128))
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    with portable():
        expected, expected_lse = dma.varlen_attention(q, k, v, bounds, bounds, causal=causal, return_lse=True)
    out, lse = dma.varlen_attention(q, k, v, bounds, bounds, causal=causal, return_lse=True)
    assert not torch.equal(out, expected)  # another kernel
    assert (lse - expected_lse).abs().max() < 1e-5
    check_close(out, expected)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window"), [
    (16, 8, 128, 256), (4, 4, 128, 1000), (8, 2, 96, 64)])
def test_agrees_with_the_portable_kernel(torch, heads, kv_heads, head_dim, window):
    q, k, v = draw(torch, 30000, 30100, heads, kv_heads, head_dim)
    scores = draw_scores(torch, 1, kv_heads, 30100)
    mask = dma.IntervalMask.top_w(scores, window)
    with portable():
        expected, expected_lse = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True)
    out, lse = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True)
    assert not torch.equal(out, expected)  # another kernel
    assert (lse - expected_lse).abs().max() < 1e-5
    check_close(out, expected)


def test_a_bias_that_a_tiny_scale_would_make_infinite(torch, everything, device):
    everything(*TILES["128x128"])
    q, k, v = draw(torch, 200, 200, 2, 1, 64, device=device)
    bias = torch.randn(1, 1, 200, device=device)
    weights = torch.softmax(bias[0, 0], 0)  # products are negligible compared to the bias
    out = dma.attention(q, k, v, bias=bias, scale=1e-38)
    assert (out.float() - weights @ v[0, :, 0].float()).abs().max() < 1e-2


@pytest.mark.parametrize("dense", [False, True])
def test_same_bits_on_every_run(torch, dense):
    """A race between copies, products and stores of tiles would eventually change bits."""
    q, k, v = draw(torch, 8000, 8000, 16, 8, 128)
    scores = draw_scores(torch, 1, 8, 8000)
    if dense:
        options = {"mask": torch.rand(1, 1, 8000, 8000, device="cuda") < 0.3,
                   "bias": torch.randn(1, 1, 8000, 8000, device="cuda").to(q.dtype)}
    else:
        options = {"mask": dma.IntervalMask.top_w(scores, 300), "bias": scores}
    first, first_lse = dma.attention(q, k, v, **options, return_lse=True)
    for _ in range(300):
        out, lse = dma.attention(q, k, v, **options, return_lse=True)
        assert torch.equal(out, first)
        assert torch.equal(lse, first_lse)


def visible_of(torch, kind, length, device):
    """A mask and its visible pairs (B, 1, Lq, Lk)."""
    if kind == "lists":
        mask = dma.IntervalMask.top_w(draw_scores(torch, 2, 1, length, device=device), 60)
        return mask, mask.to_dense(length)
    if kind == "causal":
        return None, torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril().expand(2, -1, -1, -1)
    mask = torch.rand(2, 1, length, length, device=device) < 0.5
    return mask, mask


@pytest.mark.parametrize(("kind", "tile"), [(kind, tile) for kind in ("lists", "causal", "bits", "bits and bias")
                                            for tile in TILES if "bits" not in kind or TILES[tile][0].block_m == 128])
def test_nonfinite_values_reach_only_queries_that_see_them(kind, tile, everything, torch, device,
                                                           sm_counts=(1, 3, 132), length=700, split=False):
    """A CTA that finds a non-finite output recomputes all its tiles and checks values. The second batch entry has
    none."""
    served = everything(*TILES[tile])
    q, k, v = draw(torch, length, length, 4, 2, TILES[tile][1][-1], batch=2, device=device)
    mask, visible = visible_of(torch, kind, length, device)
    bias = torch.randn(1, 1, length, length, device=device).to(q.dtype) if "bias" in kind else None
    bad = v.clone()
    seen = visible[0, 0].sum(0)
    infinite, nan = torch.nonzero((seen > length // 7) & (seen < 5 * length // 7)).flatten()[:2]
    bad[0, infinite, 0, 3], bad[0, nan, 0, 5] = float("inf"), float("nan")
    for sms in sm_counts:
        with schedule_cases.num_sms(sms, split=split):
            clean, out = (dma.attention(q, k, x, mask=mask, bias=bias, causal=kind == "causal") for x in (v, bad))
        at_infinity, at_nan = visible[0, 0, :, infinite], visible[0, 0, :, nan]
        assert torch.isinf(out[0, at_infinity, :2, 3]).all()
        assert torch.isnan(out[0, at_nan, :2, 5]).all()
        out[0, at_infinity, :2, 3] = clean[0, at_infinity, :2, 3]
        out[0, at_nan, :2, 5] = clean[0, at_nan, :2, 5]
        assert torch.equal(out, clean)
    assert len(served) == 2 * len(sm_counts)


@pytest.mark.parametrize("tile", TILES)
def test_values_that_are_not_finite_in_splits_of_tiles(tile, everything, torch, device):
    """Some CTAs recompute their tiles while others with splits of the same tiles do not."""
    test_nonfinite_values_reach_only_queries_that_see_them("lists", tile, everything, torch, device,
                                                                       (31, 132), split=True)
