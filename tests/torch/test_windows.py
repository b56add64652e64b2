"""A window per kv head in torch, on CPU tensors: functions, options of layers, compiled and exported. The tests
of the layers have windows among their options."""
import pytest

import cupy_dma as dma

torch = pytest.importorskip("torch")

from cupy_dma.torch import DynamicMaskAttention, DynamicMaskSelfAttention  # noqa: E402
from tests.oracle.torch_inputs import HKV, B, D, H, N, draw, gradients, same  # noqa: E402
from tests.unit.test_windows import WRONG, own  # noqa: E402

WINDOWS = (3, 7)


def dynamic(q, k, v, s):
    return dma.dynamic_mask_attention(q, k, v, s, window=WINDOWS)


def by_parts(q, k, v, s):
    mask = dma.IntervalMask.top_w(s, WINDOWS) | dma.IntervalMask.sliding_window(N, [2, 4], like=q)
    return dma.attention(q, k, v, mask=mask, bias=s)


def packed(q, k, v, s):
    return dma.varlen_dynamic_mask_attention(q[0], k[0], v[0], torch.tensor([0, 7, N]), torch.tensor([0, 7, N]), s[0],
                                             window=list(WINDOWS), keys="global")


@pytest.mark.parametrize("tensors", [WINDOWS, torch.tensor(WINDOWS)], ids=type)
def test_a_call_of_each_head(tensors):
    arguments = draw()
    out = dma.dynamic_mask_attention(*arguments, window=tensors)
    alone = torch.cat([dma.dynamic_mask_attention(*own(head, *arguments), window=window)
                       for head, window in enumerate(WINDOWS)], 2)
    torch.testing.assert_close(out, alone, rtol=1e-12, atol=1e-12)
    for a, b in zip(gradients(out, arguments), gradients(alone, arguments)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("function", [dynamic, by_parts, packed])
def test_compiled(function):
    arguments = draw(torch.float32)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    eager, found = function(*arguments), compiled(*arguments)
    assert torch.equal(eager, found)
    assert same(gradients(eager, arguments), gradients(found, arguments))


@pytest.mark.parametrize(("window", "error", "message"), WRONG[:2], ids=range(2))
def test_a_wrong_number_under_compile(window, error, message):
    q, k, v, s = draw(torch.float32)
    for call in (lambda: dma.dynamic_mask_attention(q, k, v, s, window=window),
                 lambda: dma.IntervalMask.top_w(s, window)):
        with pytest.raises(error, match=message):
            torch.compile(call, backend="eager")()


def test_options_of_layers():
    layer = DynamicMaskSelfAttention(24, H, HKV, window=[3, 7])
    assert layer.window == WINDOWS and "window=(3, 7)" in repr(layer)
    layer.window = [4, 4]
    assert layer.window == 4 and layer.make_cache(B).window == 4
    layer.window = 5
    with pytest.raises(ValueError, match="window must be an int, or one int for each of 2 kv heads, got 3 of them"):
        layer.window = 3, 4, 5
    assert layer.window == 5
    assert DynamicMaskAttention(HKV, D, WINDOWS).make_cache(B).window == WINDOWS


def test_export():
    layer, x = DynamicMaskSelfAttention(24, H, HKV, WINDOWS, A_init=1.0, recent=2), torch.randn(B, N, 24)
    program = torch.export.export(layer, (x,), dynamic_shapes=({1: torch.export.Dim.DYNAMIC},), strict=False).module()
    for n in (5, N, 30):
        x = torch.randn(B, n, 24)
        assert torch.equal(program(x), layer(x))
