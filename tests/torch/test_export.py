"""``torch.export`` of layers and masks, for lengths on either side of the window; tracing with integer padding."""
import pytest
import torch

import cupy_dma as dma
from cupy_dma import IntervalMask
from cupy_dma.torch import DynamicMaskAttention, DynamicMaskSelfAttention
from tests.oracle.torch_inputs import HKV, B, D, H

pytestmark = pytest.mark.usefixtures("same_numbers")
W, N, WIDTH = 5, 20, 24
LENGTHS = N, 3, W, W + 1, 33
LAYERS = {"plain": {}, "sinks": {"sinks": 1}, "recent": {"recent": 2, "qk_norm": True},
          "both": {"sinks": 2, "recent": 7}, "checkpoint": {"checkpoint": True},
          "slope": {"slope": (0.3, -0.1)}, "windows": {"window": (3, 7), "recent": 2}}
OUTSIDE = IntervalMask.sliding_window(N, 4, like=torch.zeros(1))


def real(n, dtype=torch.bool):
    return (torch.arange(n) >= torch.tensor([[2], [0]])).to(dtype)


def export(module, *x, strict=False, fixed=(), **more):
    """The exported program of a module for any length, which is axis 1 of all tensors but those at ``fixed`` places."""
    shapes = tuple([None if i in fixed else {1: torch.export.Dim.DYNAMIC} for i in range(len(x) + len(more))])
    program = torch.export.export(Keywords(module, len(x), [*more]), (*x, *more.values()), dynamic_shapes=(shapes,),
                                  strict=strict).module()
    return lambda *x, **more: program(*x, *more.values())


class Keywords(torch.nn.Module):
    """Calls a module or a function: takes all arguments by position and passes some by name."""

    def __init__(self, called, count, names=()):
        super().__init__()
        self.called, self.count, self.names = called, count, names

    def forward(self, *given):
        return self.called(*given[:self.count], **dict(zip(self.names, given[self.count:])))


@pytest.mark.parametrize(("options", "padding", "strict"), [
    *((options, None, False) for options in LAYERS), ("plain", torch.bool, False), ("slope", torch.bool, False),
    ("both", torch.int64, False),
    ("both", torch.int64, True), ("checkpoint", None, True)], ids=str)
def test_layers_of_any_length(options, padding, strict):
    layer = DynamicMaskSelfAttention(WIDTH, H, HKV, A_init=1.0, **{"window": W, **LAYERS[options]})
    more = {} if padding is None else {"padding": real(N, padding)}
    program = export(layer, torch.randn(B, N, WIDTH), strict=strict, **more)
    for n in LENGTHS:
        x, more = torch.randn(B, n, WIDTH), {name: real(n, padding) for name in more}
        assert torch.equal(program(x, **more), layer(x, **more))


@pytest.mark.parametrize("options", [{}, {"sinks": 1, "recent": 2}, {"keys": "global"}], ids=str)
def test_documents_of_any_length(options):
    layer = DynamicMaskAttention(HKV, D, W, A_init=1.0, **options)

    def draw(n):
        return [torch.randn(B, n, h, D) for h in (H, HKV, HKV)], torch.arange(n).expand(B, n) // 4

    given, ids = draw(N)
    program = export(layer, *given, documents=ids.contiguous())
    for n in LENGTHS:
        given, ids = draw(n)
        assert torch.equal(program(*given, documents=ids), layer(*given, documents=ids))


@pytest.mark.parametrize("options", [{}, {"sinks": 1, "recent": 2}], ids=str)
def test_packed_sequences(options):
    layer, bounds = DynamicMaskSelfAttention(WIDTH, H, HKV, W, A_init=1.0, **options), torch.tensor([0, 7, N])
    x = torch.randn(N, WIDTH)
    program = export(layer, x, fixed=(0, 1), cu_seqlens=bounds)
    for given in (bounds, torch.tensor([0, 2, N])):
        assert torch.equal(program(x, cu_seqlens=given), layer(x, cu_seqlens=given))


MASKS = {
    "causal": lambda k, given: IntervalMask.causal(k.shape[1], like=k),
    "sliding_window": lambda k, given: IntervalMask.sliding_window(k.shape[1], 4, like=k),
    "union": lambda k, given: IntervalMask.sliding_window(k.shape[1], 4, like=k) | IntervalMask.sinks(k.shape[1], 2,
                                                                                                      like=k),
    "padding": lambda k, given: IntervalMask.padding(given != 0) & IntervalMask.causal(k.shape[1], like=k),
    "padding of integers": lambda k, given: IntervalMask.padding(given) & IntervalMask.causal(k.shape[1], like=k),
    "documents": lambda k, given: IntervalMask.documents(given),
    "lengths": lambda k, given: IntervalMask.documents(torch.arange(N + 1) * (given[0] != 0) + N * (given[0] == 0),
                                                        key_length=N),
    "from_stop": lambda k, given: IntervalMask.from_stop(4 + torch.arange(k.shape[1]), window=5),
    "from_gate": lambda k, given: IntervalMask.from_gate(k[..., 0].mT, delay=4, threshold=0.2, sinks=1),
    "from_startend": lambda k, given: IntervalMask.from_startend((4 + torch.arange(k.shape[1]))[None, None, :, None]),
    "prefix_lm": lambda k, given: IntervalMask.prefix_lm(k.shape[1], given.sum(1)),
    "start and stop": lambda k, given: IntervalMask(*(torch.arange(i, i + k.shape[1], dtype=torch.int32)
                                                      for i in (0, 3))),
    "from outside": lambda k, given: OUTSIDE,
    "dense too": lambda k, given: (IntervalMask.causal(k.shape[1], like=k), given[:, None, None] != 0),
    "top_w": lambda k, given: IntervalMask.top_w(k.sum(-1).mT, 3, padding=given)}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    def attend(q, k, v, given):
        return dma.attention(q, k, v, mask=MASKS[name](k, given))

    def draw(n):
        own = n + 1 if name == "lengths" else n
        return *(torch.randn(B, n, h, D) for h in (H, HKV, HKV)), (torch.arange(own) < own - 2).long().expand(B, own)

    alone = name in ("from outside", "lengths")  # fixed to the example's length
    program = export(attend, *draw(N), fixed=range(4) if alone else ())
    for n in (N,) if alone else (N, 3, 33):
        given = draw(n)
        assert torch.equal(program(*given), attend(*given))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_integer_padding_eager_and_in_one_graph(dtype):
    layer, x = DynamicMaskSelfAttention(WIDTH, H, HKV, W, A_init=1.0, sinks=1), torch.randn(B, N, WIDTH)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for call in (layer, compiled):
        assert torch.equal(call(x, padding=real(N, dtype)), layer(x, padding=real(N)))


@torch.no_grad()
def test_a_step_of_a_cache_is_refused():
    """Traced tensors have no memory, so no kernel may be launched with their addresses."""
    layer = DynamicMaskAttention(HKV, D, W)
    cache = layer.make_cache(B)
    given = [torch.randn(B, 1, h, D) for h in (H, HKV, HKV)]
    with pytest.raises(TypeError, match=r"key must be a tensor with readable memory.*torch\.export"):
        torch.export.export(Keywords(lambda *x: layer.extend(cache, *x), 3), tuple(given), strict=False)
    with pytest.raises(TypeError, match=r"value must be a tensor with readable memory.*torch\.export"):
        torch.export.export(Keywords(lambda value: dma.backward.key_scores_backward(
            torch.zeros(B, HKV, 1), value, layer.dt_proj.weight, layer.A)[0], 1), (given[2],), strict=False)
    assert cache.length.tolist() == [0] * B


@pytest.mark.parametrize("options", [{}, {"sinks": 1}, {"recent": 2}], ids=str)
def test_padding_and_documents_as_top_w_takes_them(options):
    layer = DynamicMaskAttention(HKV, D, W, A_init=1.0, **options)
    given = [torch.randn(B, N, h, D) for h in (H, HKV, HKV)]
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        assert torch.equal(layer(*given, padding=real(N, dtype)), layer(*given, padding=real(N)))
    bounds = layer(*given, documents=torch.tensor([0, 7, N], dtype=torch.int32))
    for documents in ([0, 7, N], (0, 7, N), [[0] * 7 + [1] * (N - 7)] * B, torch.tensor([0, 7, N])):
        assert torch.equal(layer(*given, documents=documents), bounds)
    both = {"documents": [0, 7, N], "padding": real(N, torch.int32)}
    assert torch.equal(layer(*given, **both), layer(*given, documents=torch.tensor([0, 7, N]), padding=real(N)))
    for wrong, message in (({"padding": 2 * real(N, torch.int32)}, "padding must be 1 for real keys and 0"),
                           ({"padding": real(N, torch.float32)}, "padding must be bool, or integers 1"),
                           ({"padding": real(N)[:, 1:]}, "padding must have shape"),
                           ({"documents": [0, 7]}, "documents must be cumulative lengths")):
        with pytest.raises((TypeError, ValueError), match=message):
            layer(*given, **wrong)
