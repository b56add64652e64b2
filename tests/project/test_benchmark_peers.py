"""The peers of the benchmarks compute what this library computes."""
import pytest

import cupy_dma as dma
from cupy_dma.masks.interval import IntervalMask
from tests.project.benchmark_runs import gradients_of, small

torch = pytest.importorskip("torch")
from benchmarks.harness import peers  # noqa: E402  needs torch


def test_dense_mask_of_the_peers_is_the_same_mask():
    scores = torch.randn(1, 2, 50, generator=torch.Generator().manual_seed(0))
    dense = peers.dense_mask(scores, 50, 7, torch.float32, group=2)
    mask = IntervalMask.top_w(scores, window=7).to_dense(50).repeat_interleave(2, dim=1)
    assert torch.equal(dense > float("-inf"), mask)
    assert torch.equal(dense[mask], scores.repeat_interleave(2, dim=1)[:, :, None].expand_as(dense)[mask])


def test_blocks_of_an_interval_mask():
    scores = torch.randn(1, 2, 96, generator=torch.Generator().manual_seed(0))
    mask = IntervalMask.top_w(scores, window=40)
    seen, full = peers.interval_blocks(mask.start.expand(1, 2, 96), mask.stop, 96, 16)
    dense = mask.to_dense(96).reshape(1, 2, 6, 16, 6, 16)
    assert torch.equal(seen, dense.any(5).any(3))
    assert torch.equal(full, dense.all(5).all(3))
    assert full.any()
    assert not full.all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_block_mask_is_the_same_mask():
    """The peer's result, uncompiled, against this library's."""
    q, k, v = (torch.randn(1, 256, heads, 16, generator=torch.Generator().manual_seed(1)) for heads in (4, 2, 2))
    scores = torch.randn(1, 2, 256, generator=torch.Generator().manual_seed(0))
    mask = IntervalMask.top_w(scores, window=40)
    call = peers.flex(q, k, v, mask.start.expand(1, 2, 256), mask.stop, scores, compiled=False)
    ours = dma.attention(q, k, v, mask=mask, bias=scores)
    assert torch.allclose(call().transpose(1, 2), ours, atol=2e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_answers_one_query():
    _, q, k, v, scores, _ = small(torch)
    mask = IntervalMask.top_w(scores, window=40)
    call = peers.flex(q[:, -1:], k, v, mask.start.expand(1, 2, 256), mask.stop, scores, compiled=False)
    ours = dma.dynamic_mask_attention(q[:, -1:], k, v, scores, window=40)
    assert torch.allclose(call().transpose(1, 2), ours, atol=2e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_gradients_are_those_of_the_same_mask(monkeypatch):
    """The peer's gradients, uncompiled, against this library's. torch refuses them on the CPU, although it can."""
    from torch.nn.attention import flex_attention


    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None, raising=False)
    do, q, k, v, scores, mask = small(torch)
    call, note = peers.flex_backward(q, k, v, do, mask.start.expand(1, 2, 256).contiguous(), mask.stop, scores,
                                     compiled=False)
    ours = gradients_of(do, q, k, v, scores, mask)[2]
    *theirs, bias = call()
    assert note == ""
    for x, y in zip(theirs, ours):
        assert torch.allclose(x.transpose(1, 2), y, atol=1e-4)
    assert torch.allclose(bias, ours.bias, atol=1e-4)


@pytest.mark.parametrize("forward", [False, True])
def test_dense_gradients(forward):
    do, q, k, v, _, _ = small(torch)
    call, note = peers.dense_backward(None, q, k, v, do, forward=forward)
    out, lse = dma.attention(q, k, v, causal=True, return_lse=True)
    ours = dma.backward.attention_backward(do, q, k, v, out, lse, causal=True)
    assert note == ""
    for _ in range(2):  # the forward pass is retained
        for x, y in zip(call(), ours):
            assert torch.allclose(x.transpose(1, 2), y, atol=1e-4)


def test_peers_expand_heads_where_groups_are_not_served():
    def make(k, v):
        def call():
            if k.shape[1] != 4:
                raise RuntimeError("no groups")
            return k, v

        return call

    k, v = torch.zeros(2, 1, 2, 8, 16)
    call, note = peers.expanded_if_needed(make, k, v, group=2)
    assert call()[0].shape == (1, 4, 8, 16)
    assert "expanded" in note
    with pytest.raises(RuntimeError, match="no groups"):
        peers.expanded_if_needed(make, k, v, group=1)


def test_tiles_of_a_peer_that_do_not_fit():
    from benchmarks.harness.peers_dense import first_or_fastest

    class Call:
        def __init__(self, milliseconds):
            self.milliseconds = milliseconds

        def __call__(self):
            if self.milliseconds is None:
                raise ValueError("out of resource")

    def choose(*times):
        made = []

        def make(options):
            made.append(options["bwd_x"])
            return Call(times[options["bwd_x"]])

        call, note = first_or_fastest(make, lambda call: call.milliseconds, tuple({"bwd_x": i} for i in range(3)))
        return call.milliseconds, note, made

    assert choose(3.0, 1.0, 2.0) == (3.0, "", [0])
    best, note, made = choose(None, 2.0, 1.0)
    assert best == 1.0 and "x 2" in note and made == [0, 1, 2]
    assert choose(None, None, 5.0)[0] == 5.0
    with pytest.raises(RuntimeError, match="ValueError: out of resource"):
        choose(None, None, None)


@pytest.mark.gpu
def test_flex_with_a_learned_bias():
    """The peer at the head dim at which torch's tiles did not fit, against autograd through the definition."""
    pytest.importorskip("triton")
    from benchmarks.harness import peers_dense

    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 256, heads, 128, device="cuda").bfloat16() for heads in (2, 1, 1, 2))
    mask = torch.rand(1, 2, 256, 256, device="cuda") < 0.5
    bias = torch.randn(1, 2, 256, 256, device="cuda").bfloat16()
    blocks = peers_dense.block_mask(mask, True)
    call, note = peers_dense.flex_backward(q, k, v, do, mask, bias, blocks)
    print(note or "torch's own tiles")
    inputs = [x.float().requires_grad_() for x in (q, k, v, bias)]
    s = inputs[0].transpose(1, 2) @ inputs[1].permute(0, 2, 3, 1) * 128**-0.5 + inputs[3]
    out = s.masked_fill(~mask, float("-inf")).softmax(-1) @ inputs[2].transpose(1, 2)
    expected = torch.autograd.grad(out, inputs, do.float().transpose(1, 2))
    for found, wanted in zip(call(), (*(x.transpose(1, 2) for x in expected[:3]), expected[3])):
        assert (found.float() - wanted).norm() < 2e-2 * wanted.norm()
