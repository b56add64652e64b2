"""RetentionGate: the formula, open gates at first, hard and soft gates against dense attention, gradients."""
import copy
import math
import pickle

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cupy_dma.torch import RetentionGate, attention
from tests.oracle.torch_inputs import HKV, B, D, H, N, draw, float64

pytestmark = pytest.mark.usefixtures("same_numbers")
WIDTH, DELAY, SINKS = 12, 4, 2


def gate_of(random=True, dtype=float64, spread=0.01, **options):
    """A gate with logits of both signs, or with its initial ones."""
    made = RetentionGate(WIDTH, HKV, **{"delay": DELAY, "sinks": SINKS, "dtype": dtype, **options})
    if random:
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=spread)
        made.offset = 0.1
    return made


def tokens(dtype=float64, n=N, **options):
    return torch.randn(B, n, WIDTH, dtype=dtype, **options)


def dense(q, k, v, log_gate, delay):
    """Attention with the bias written out, in float64."""
    far = torch.arange(N)[:, None] - torch.arange(N) >= delay
    k, v, log_gate = (x.repeat_interleave(H // HKV, axis) for x, axis in ((k, 2), (v, 2), (log_gate, 1)))
    logits = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(D) + torch.where(far, log_gate[:, :, None], 0)
    logits = logits.masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", logits.softmax(-1), v)


@pytest.mark.parametrize("hidden", [None, 7])
def test_open_at_first(hidden):
    gate, x, (q, k, v, _) = gate_of(random=False, hidden=hidden), tokens(), draw()
    soft = gate(x).log_gate
    assert (soft > -1e-3).float().mean() > 0.9 and soft.requires_grad
    log_gate, kept = gate.eval()(x)
    assert log_gate.shape == (B, HKV, N) and not log_gate.any() and kept.tolist() == [1, 1]
    torch.testing.assert_close(gate.attend(q, k, v, log_gate), attention(q, k, v, causal=True), rtol=0, atol=1e-15)


@pytest.mark.parametrize("hidden", [None, 7])
def test_the_formula(hidden):
    gate, x = gate_of(hidden=hidden), tokens()
    found = gate(x, generator=torch.Generator().manual_seed(3))
    u = torch.rand((B, HKV, N), generator=torch.Generator().manual_seed(3), dtype=float64)
    logit = (gate.offset + gate.gain * gate.proj(functional.rms_norm(x, (WIDTH,), eps=1e-6))).mT
    expected = functional.logsigmoid((logit + u.log() - (1 - u).log()) / gate.temperature)
    assert not found.log_gate[..., :SINKS].any()
    torch.testing.assert_close(found.log_gate[..., SINKS:], expected[..., SINKS:])
    torch.testing.assert_close(found.kept, expected[..., SINKS:].exp().mean((0, 2)))
    hard = gate.eval()(x)
    is_open = logit[..., SINKS:] > 0
    assert 0.2 < is_open.double().mean() < 0.8
    assert torch.equal(hard.log_gate[..., SINKS:], torch.where(is_open, 0, -torch.inf))
    torch.testing.assert_close(hard.kept, is_open.double().mean((0, 2)))


@pytest.mark.feature("numpy forward backward", "torch", "RetentionGate")
@pytest.mark.parametrize("training", [True, False])
def test_attention_and_gradients(training):
    gate, x, (q, k, v, _) = gate_of(threshold=-1e9).train(training), tokens().requires_grad_(), draw()
    log_gate = gate(x).log_gate
    found = gate.attend(q, k, v, log_gate)
    expected = dense(q, k, v, log_gate, DELAY)
    torch.testing.assert_close(found, expected)
    given = [q, k, v, *([x, *gate.parameters()] if training else [])]
    weights = torch.randn_like(found)
    both = [torch.autograd.grad(out, given, weights, retain_graph=True) for out in (found, expected)]
    for ours, theirs in zip(*both):
        assert theirs.any()
        torch.testing.assert_close(ours, theirs)


def test_the_kept_share_has_a_gradient():
    gate = gate_of()
    gate(tokens()).kept.sum().backward()
    assert all(parameter.grad.any() for parameter in gate.parameters())


def test_the_threshold_leaves_out_what_has_no_weight():
    """Outputs change by at most the weight of the dropped keys."""
    gate, x, (q, k, v, _) = gate_of(), tokens(), draw(requires_grad=False)
    log_gate = gate(x).log_gate.detach()
    for threshold in (-12.0, -3.0):
        gate.threshold = threshold
        closed = (log_gate < threshold)[..., :-DELAY]
        assert 0.05 < closed.double().mean() < 0.95
        assert torch.equal(gate.mask(log_gate).stop[..., :-DELAY] < N, closed)
        off = (gate.attend(q, k, v, log_gate) - dense(q, k, v, log_gate, DELAY)).abs().max()
        span = math.exp((q.norm(dim=3).max() * k.norm(dim=3).max() * 2 / math.sqrt(D)).item())
        assert 0 < off <= 2 * N * span * math.exp(threshold) * v.abs().max()


def test_randomness():
    gate, x = gate_of(), tokens()
    given = [gate(x, generator=torch.Generator().manual_seed(seed)).log_gate for seed in (1, 1, 2)]
    assert torch.equal(given[0], given[1]) and not torch.equal(given[0], given[2])
    torch.manual_seed(5)
    first = gate(x).log_gate
    assert not torch.equal(gate(x).log_gate, first)
    torch.manual_seed(5)
    assert torch.equal(gate(x).log_gate, first)
    gate.eval()
    assert torch.equal(gate(x).log_gate, gate(x).log_gate)


@pytest.mark.parametrize("how", ["padding", "documents", "both", "past"])
def test_sinks_are_those_of_each_sequence(how):
    gate, x = gate_of(sinks=2).eval(), tokens()
    padding = torch.ones(B, N, dtype=torch.bool)
    padding[0, :5] = padding[1, 7] = padding[1, 9] = False
    documents = torch.where(torch.arange(N) < 8, 3, 1).expand(B, N)
    options = {"padding": {"padding": padding}, "documents": {"documents": documents[:1]},
               "both": {"padding": padding, "documents": documents}, "past": {"padding": padding}}[how]
    # The first real tokens of each sequence, counted one by one.
    expected = torch.zeros(B, N, dtype=torch.bool)
    for b in range(B):
        seen: dict[int, int] = {}
        for j in range(N):
            which = int(documents[b, j]) if "documents" in options else 0
            if "padding" not in options or padding[b, j]:
                seen[which] = seen.get(which, 0) + 1
                expected[b, j] = seen[which] <= 2
    log_gate, kept = gate(x, **options)
    bare = gate_of(random=False, sinks=0).eval()
    bare.load_state_dict(gate.state_dict())
    bare.offset = gate.offset
    logits = bare(x.masked_fill(~padding[..., None], 0) if "padding" in options else x).log_gate
    assert torch.equal(log_gate, logits.masked_fill(expected[:, None], 0))
    counted = (padding if "padding" in options else torch.ones_like(padding)) & ~expected
    share = (logits == 0).double().mul(counted[:, None]).sum((0, 2)) / counted.sum()
    torch.testing.assert_close(kept, share)
    if how == "past":
        assert torch.equal(gate(x[:, 6:], padding=padding, past=6).log_gate, log_gate[..., 6:])
        assert torch.equal(gate(x[:, 1:], past=1).log_gate, gate(x).log_gate[..., 1:])


def test_padding_has_no_influence():
    gate, x = gate_of(), tokens()
    padding = torch.ones(B, N, dtype=torch.int32)
    padding[0, :5] = 0
    found = []
    for fill in (1.0, math.nan):
        gate.zero_grad()
        gates = gate(x.masked_fill(padding[..., None] == 0, fill), padding=padding,
                     generator=torch.Generator().manual_seed(1))
        (gates.kept.sum() + gates.log_gate.sum()).backward()
        found.append([*gates, *(p.grad for p in gate.parameters())])
    assert all(a.isfinite().all() and torch.equal(a, b) for a, b in zip(*found))
    assert gate(x, padding=torch.zeros(1, N, dtype=torch.bool)).kept.tolist() == [1, 1]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_types(kind):
    gate = gate_of(dtype=torch.float32).eval()
    x = tokens(kind)
    expected = copy.deepcopy(gate).double()(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        found = gate(x)
    assert found.log_gate.dtype == found.kept.dtype == torch.float32
    assert torch.equal(found.log_gate.double(), expected.log_gate)
    half = copy.deepcopy(gate).to(torch.bfloat16)
    assert torch.equal(half(x).log_gate, copy.deepcopy(half).float()(x).log_gate)
    soft = half.train()(x).log_gate
    assert soft.dtype == torch.float32
    soft.sum().backward()
    assert half.proj.weight.grad.dtype == torch.bfloat16


def test_all_open():
    gate, x, (q, k, v, _) = gate_of(), tokens(), draw()
    gate.enabled = False
    log_gate, kept = gate(x)
    assert not log_gate.any() and kept.tolist() == [1, 1]
    assert torch.equal(gate.attend(q, k, v, log_gate), attention(q, k, v, causal=True))


def test_checkpointing_draws_the_same_noise():
    gate, (q, k, v, _) = gate_of(), draw()
    x = tokens(requires_grad=True)

    def layer(x):
        gates = gate(x)
        return gate.attend(q, k, v, gates.log_gate), gates.kept

    found = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        torch.manual_seed(7)
        out, kept = run(x)
        found.append(torch.autograd.grad(out.square().sum() + kept.sum(), [x, *gate.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_compiled():
    gate, x, (q, k, v, _) = gate_of().eval(), tokens(), draw(requires_grad=False)
    whole = torch.compile(lambda x: gate.attend(q, k, v, gate(x).log_gate), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(x), gate.attend(q, k, v, gate(x).log_gate))


def test_saved_copied_pickled():
    gate, x = gate_of(hidden=5).eval(), tokens()
    other = gate_of(hidden=5, random=False).eval()
    other.offset = gate.offset
    other.load_state_dict(gate.state_dict())
    for again in (other, copy.deepcopy(gate), pickle.loads(pickle.dumps(gate))):
        assert torch.equal(again(x).log_gate, gate(x).log_gate)
    assert "hidden=5" in repr(gate)
    gate.reset_parameters()
    assert not gate(x).log_gate.any()


@pytest.mark.parametrize("options, error, message", [
    ({"width": 0}, ValueError, "width"), ({"kv_heads": 1.5}, TypeError, "kv_heads"),
    ({"hidden": 0}, ValueError, "hidden"), ({"delay": 0}, ValueError, "delay must be at least 1"),
    ({"delay": 2**31}, ValueError, "delay"), ({"sinks": -1}, ValueError, "sinks"),
    ({"threshold": 0.0}, ValueError, "threshold must be below 0"),
    ({"threshold": -math.inf}, ValueError, "threshold"),
    ({"temperature": 0.0}, ValueError, "temperature must be above"),
    ({"offset": -1.0}, ValueError, "offset"), ({"gain": "1"}, TypeError, "gain"),
], ids=str)
def test_options(options, error, message):
    with pytest.raises(error, match=message):
        RetentionGate(**{"width": WIDTH, "kv_heads": HKV, **options})
    name, value = next(iter(options.items()))
    if name not in RetentionGate.FIXED:
        with pytest.raises(error, match=message):
            setattr(gate_of(), name, value)


def test_what_is_fixed():
    with pytest.raises(AttributeError, match="width cannot be changed"):
        gate_of().width = 3


@pytest.mark.parametrize("x, options, error, message", [
    (torch.ones(B, N, WIDTH, dtype=torch.long), {}, TypeError, "x must be a floating"),
    (torch.ones(B, N, WIDTH + 1), {}, ValueError, r"x must have shape \(B, N, 12\)"),
    (torch.ones(N, WIDTH), {}, ValueError, "x must have shape"),
    (torch.ones(B, N, WIDTH), {"padding": torch.ones(B, N)}, TypeError, "padding must be a tensor of bools"),
    (torch.ones(B, N, WIDTH), {"padding": torch.ones(B, N + 1).bool()}, ValueError, "padding must have shape"),
    (torch.ones(B, N, WIDTH), {"documents": torch.ones(N).long()}, ValueError, "documents must have shape"),
    (torch.ones(B, N, WIDTH), {"past": -1}, ValueError, "past"),
], ids=str)
def test_inputs(x, options, error, message):
    with pytest.raises(error, match=message):
        gate_of()(x, **options)
