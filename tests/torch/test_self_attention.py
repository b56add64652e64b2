"""``DynamicMaskSelfAttention`` on CPU tensors, against dense formulas, against its parts, and in decoding against whole
sequences."""
import copy
import io
import itertools
import pickle

import numpy as np
import pytest
import torch
from torch.nn import functional

import cupy_dma as dma
from cupy_dma.masks.windows import each_head
from cupy_dma.torch import DynamicMaskSelfAttention
from tests.oracle import reference
from tests.oracle.torch_inputs import float64, gradients, same
from tests.project.pages import run_page
from tests.torch.test_module import real_tokens

pytestmark = pytest.mark.usefixtures("same_numbers")
WIDTH, HEADS, KV_HEADS, W, B, N = 24, 4, 2, 5, 2, 18
OPTIONS = {
    "usual": {}, "no rope": {"rope": None}, "base": {"rope": 100.0}, "qk_norm": {"qk_norm": True},
    "bias": {"bias": True, "dt_bias": True}, "linear": {"form": "linear"}, "softcap": {"softcap": 1.5, "scale": 0.7},
    "head_dim": {"head_dim": 10}, "mha": {"kv_heads": None}, "sinks": {"sinks": 2, "recent": 3},
    "input": {"scores": "input", "dt_bias": True}, "input kept": {"scores": "input", "recent": 3},
    "slope": {"slope": (0.3, -0.1)}, "input slope": {"scores": "input", "slope": 0.2, "sinks": 1, "recent": 2},
    "delay": {"bias_delay": 4}, "delays": {"window": (3, 8), "bias_delay": 4, "sinks": 1, "recent": 2},
    "all": {"qk_norm": True, "bias": True, "form": "linear", "softcap": 2.0, "head_dim": 4, "sinks": 1, "recent": 2}}
every_option = pytest.mark.parametrize("options", OPTIONS)


def layer(dtype=torch.float32, window=W, **options):
    made = DynamicMaskSelfAttention(WIDTH, HEADS, options.pop("kv_heads", KV_HEADS), window, dtype=dtype, **options)
    scored = made.attention  # at 0 the mask is a sliding window
    torch.nn.init.normal_(scored.A if scored.width is None else scored.score_proj.weight)
    for norm in (made.q_norm, made.k_norm):
        if norm is not None:
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return made


def tokens(dtype=torch.float32, n=N, requires_grad=False):
    return torch.randn(B, n, WIDTH, dtype=dtype).requires_grad_(requires_grad)


def rotated(x, base):
    """Rotary positions by complex numbers; ``x (B, N, heads, D)``."""
    order = torch.arange(x.shape[-1] // 2, dtype=float64)
    turn = torch.polar(torch.ones(()).double(), torch.arange(x.shape[1])[:, None] * base ** (-2 * order / x.shape[-1]))
    pairs = torch.complex(*x.double().chunk(2, -1)) * turn[:, None]
    return torch.cat((pairs.real, pairs.imag), -1).to(x.dtype)


def dense(module, x):
    """The layer by its definition, with a dense mask, in the type of the module and ``x``."""
    def heads(project):
        return project(x).unflatten(-1, (-1, module.head_dim))

    core, (q, k, v) = module.attention, map(heads, (module.q_proj, module.k_proj, module.v_proj))
    if module.q_norm is not None:
        q, k = (y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight
                for y, norm in ((q, module.q_norm), (k, module.k_norm)))
    if module.rope is not None:
        q, k = rotated(q, module.rope), rotated(k, module.rope)
    if core.width is None:
        scores = core.A[:, None] * functional.softplus(core.dt_proj(v.flatten(2))).mT
        scores = scores.exp() if core.form == "exp" else scores
    else:
        scores = core.score_proj(x).mT
    n, place = x.shape[1], torch.arange(x.shape[1])
    scores = scores + torch.as_tensor(core.slope, dtype=scores.dtype).reshape(-1, 1) * place
    ranked = scores.detach().double().numpy()
    best = np.concatenate([reference.top_w_dense(ranked[:, h:h + 1], window)
                           for h, window in enumerate(each_head(core.window, core.kv_heads))], 1)
    besides = (place <= place[:, None]) & ((place < core.sinks) | (place > place[:, None] - core.recent))
    mask, group = torch.from_numpy(best) | besides, module.heads // module.kv_heads
    k, v, mask, bias = (y.repeat_interleave(group, axis) for y, axis in ((k, 2), (v, 2), (mask, 1), (scores, 1)))
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * (core.scale or module.head_dim**-0.5)
    if core.softcap:
        logits = core.softcap * torch.tanh(logits / core.softcap)
    far = place[:, None] - place >= core.bias_delay
    weights = (logits + bias[:, :, None] * far).masked_fill(~mask.expand(-1, -1, n, -1), -torch.inf).softmax(-1)
    return module.o_proj(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))


def right(found, exact, plain, factor=2, terms=0.0):
    kind = reference.ml_dtypes.bfloat16 if plain.dtype == torch.bfloat16 else str(plain.dtype)[6:]
    reference.assert_matches_reference(*(y.detach().double().numpy() for y in (found, exact, plain)), kind, factor,
                                       terms)


def twin(module, dtype=float64):
    return copy.deepcopy(module).to(dtype)


# ---- whole sequences ----
@pytest.mark.feature("numpy forward backward", "torch", "DynamicMaskSelfAttention")
@every_option
def test_forward_and_gradients_are_the_definition(options):
    module, x = layer(**OPTIONS[options]), tokens(requires_grad=True)
    exact, wide = twin(module), x.detach().double().requires_grad_()
    outs = module(x), dense(exact, wide), dense(module, x)
    right(*outs)
    weights = torch.randn_like(outs[0])
    leaves = (x, *module.parameters())
    found, plain = (gradients(out, leaves, weights) for out in (outs[0], outs[2]))
    wanted = gradients(outs[1], (wide, *exact.parameters()), weights.double())
    largest = max(y.abs().max().item() for y in wanted)  # float32 sums over the tokens; small gradients cancel in them
    for a, b, c in zip(found, wanted, plain):
        right(a, b, c, factor=3, terms=largest)


def test_axes_in_the_other_order():
    module, x = layer(), tokens()
    other = layer(batch_first=False)
    other.load_state_dict(module.state_dict())
    real = torch.arange(N)[None] >= torch.tensor([[3], [0]])
    for given in ({}, {"padding": real}):
        assert torch.equal(other(x.transpose(0, 1), **given).transpose(0, 1), module(x, **given))
    with torch.no_grad():
        cache = other.make_cache(B)
        outs = [other(part.transpose(0, 1), cache=cache).transpose(0, 1) for part in x.split(7, 1)]
    right(torch.cat(outs, 1), dense(twin(module), x.double()), module(x))


def test_positions_are_the_rotations_only():
    module, x = layer(), tokens()
    out = module(x)
    assert torch.equal(module(x, positions=torch.arange(N)), out)
    right(module(x, positions=torch.arange(N).expand(B, N) + 10**6), dense(twin(module), x.double()), out)
    assert not torch.allclose(module(x, positions=2 * torch.arange(N)), out, atol=1e-3)
    without = layer(rope=None)
    assert torch.equal(without(x, positions=2 * torch.arange(N)), without(x))


# ---- decoding ----
def extended(module, x, pieces, cache=None, **given):
    cache = cache or module.make_cache(x.shape[0])
    with torch.no_grad():
        return torch.cat([module(part, cache=cache, **given) for part in x.split(pieces, 1)], 1)


@pytest.mark.feature("numpy forward", "torch", "DynamicMaskSelfAttention, with")
@every_option
@pytest.mark.parametrize("pieces", [(11, *[1] * 7), (4, 7, 1, 6), (1,) * N, (N,)], ids=lambda pieces: len(pieces))
def test_decoding_is_forward(options, pieces):
    module, x = layer(**OPTIONS[options]), tokens()
    right(extended(module, x, pieces), dense(twin(module), x.double()), module(x))


@pytest.mark.parametrize("autocast", [False, True])
def test_decoding_in_bfloat16(autocast):
    """With a window that keeps every key, because rounded scores could select other keys than exact ones."""
    dtype = torch.float32 if autocast else torch.bfloat16
    module, x = layer(dtype, window=N, qk_norm=True), tokens(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        whole, found = module(x), extended(module, x, (11, *[1] * 7))
    assert whole.dtype == found.dtype == torch.bfloat16
    right(found, dense(twin(module), x.double()), whole)


def test_decoding_with_scores_of_another_type():
    """In 16-bit models, parameters of the scores often stay float32."""
    module, x = layer(torch.bfloat16), tokens(torch.bfloat16)
    module.attention.float()
    assert "dtype='bfloat16'" in repr(module.make_cache(B))
    assert extended(module, x, (11, 7)).dtype == module(x).dtype == torch.bfloat16


def test_a_cache_has_no_gradient():
    module, x = layer(), tokens()
    with pytest.raises(NotImplementedError, match=r"require grad.*torch\.no_grad"):
        module(x, cache=module.make_cache(B))
    with torch.inference_mode():
        right(module(x, cache=module.make_cache(B)), dense(twin(module), x.double()), module(x))
    module.requires_grad_(False)(x, cache=module.make_cache(B))


# ---- padding and packing ----
KINDS = "left", "right", "holes"


def spoiled(x, real):
    """``x`` with NaN where it is padding."""
    return torch.where(real[..., None], x.detach(), torch.nan).requires_grad_(x.requires_grad)


@pytest.mark.parametrize(("options", "kind"), [
    (options, kind) for options in OPTIONS for kind in KINDS
    if kind != "holes" or "bias_delay" not in OPTIONS[options]])  # padding between two tokens counts for a delay
def test_padded_rows_are_rows(kind, options):
    """Values and gradients: contents of padding influence nothing, and outputs of padding are 0."""
    module, real = layer(**OPTIONS[options]), real_tokens(kind)
    x = spoiled(tokens(requires_grad=True), real)
    out, rows = module(x, padding=real), [x.detach()[b, real[b]][None].requires_grad_() for b in range(B)]
    apart = [module(row)[0] for row in rows]
    for b in range(B):
        right(out[b, real[b]], dense(twin(module), rows[b].detach().double())[0], apart[b])
    assert not out[~real].any()
    weights = torch.randn_like(out)
    found = gradients(out, (x, *module.parameters()), weights)
    wanted = torch.autograd.grad(apart, (*rows, *module.parameters()), [weights[b, real[b]] for b in range(B)])
    torch.testing.assert_close(found[0][real], torch.cat([row[0] for row in wanted[:B]]), rtol=0, atol=1e-5)
    assert not found[0][~real].any()
    torch.testing.assert_close(found[1:], wanted[B:], rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", ["usual", "slope", "all"])
def test_padded_prompts_are_continued(kind, options):
    module, x, more, real = layer(**OPTIONS[options]), tokens(), tokens(n=4), real_tokens(kind)
    cache = module.make_cache(B)
    with torch.no_grad():
        prompt = module(spoiled(x, real), padding=real, cache=cache)
        steps = extended(module, more[:, :3], 1, cache)
        last = module(more[:, 3:], padding=torch.tensor([[0], [1]]), cache=cache)  # the first sequence has ended
    assert cache.length.tolist() == [int(real[0].sum()) + 3, int(real[1].sum()) + 4]
    assert not prompt[~real].any() and not last[0].any()
    for b in range(B):
        whole = torch.cat((x[b, real[b]], more[b]))[None, :-1 if b == 0 else None]
        found = torch.cat((prompt[b, real[b]], steps[b], last[b][:b]))
        right(found, dense(twin(module), whole.double())[0], module(whole)[0])


@every_option
@pytest.mark.parametrize("listed", [False, True])
def test_packed_sequences_are_sequences(options, listed):
    module, x = layer(**OPTIONS[options]), tokens(requires_grad=True)
    bounds = [0, 7, 7, 8, N]
    out = module(x[0], cu_seqlens=bounds if listed else torch.tensor(bounds, dtype=torch.int32))
    parts = [module(x[:1, a:b])[0] for a, b in itertools.pairwise(bounds) if b > a]
    exact = [dense(twin(module), x[:1, a:b].double())[0] for a, b in itertools.pairwise(bounds) if b > a]
    right(out, torch.cat(exact), torch.cat(parts))
    weights, leaves = torch.randn_like(out), (x, *module.parameters())
    torch.testing.assert_close(gradients(out, leaves, weights), gradients(torch.cat(parts), leaves, weights),
                               rtol=0, atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"slope": (0.3, -0.1)}], ids=str)
@torch.no_grad()
def test_packed_decoding(options):
    module, x = layer(sinks=1, **options), tokens()
    cache, bounds = module.make_cache(B), torch.tensor([0, 5, 14])
    first = module(torch.cat((x[0, :5], x[1, :9])), cu_seqlens=bounds, cache=cache)
    second = module(torch.cat((x[0, 5:8], x[1, 9:10])), cu_seqlens=[0, 3, 4], cache=cache)
    for b, found in enumerate((torch.cat((first[:5], second[:3])), torch.cat((first[5:], second[3:])))):
        whole = x[b:b + 1, :len(found)]
        right(found, dense(twin(module), whole.double())[0], module(whole)[0])


# ---- torch's module interface ----
GIVEN = [{}, {"padding": torch.arange(N)[None].expand(B, N) > 2}, {"cu_seqlens": torch.tensor([0, 7, N])}]
each_given = pytest.mark.parametrize("given", GIVEN, ids=lambda given: next(iter(given), "plain"))


@each_given
def test_checkpointing(given):
    """Gradients are equal bit for bit, and only the input and its options are kept until the backward pass."""
    module, x = layer(qk_norm=True, sinks=1), tokens(requires_grad=True)
    x = x if "cu_seqlens" not in given else x[0].detach().requires_grad_()
    leaves, kept, found = (x, *module.parameters()), [], []
    for module.checkpoint in (False, True):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda y: sizes.append(y.numel()) or y, lambda y: y):  # noqa: B023
            out = module(x, **given)
        kept.append(sum(sizes))
        found.append(gradients(out, leaves))
    assert same(*found) and kept[1] <= 2 * x.numel() < kept[0] / 5
    with torch.no_grad():
        assert not module(x, **given).requires_grad


@each_given
@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "sinks": 2, "recent": 3}, {"checkpoint": True},
                                     {"slope": (0.3, -0.1)}], ids=str)
def test_compile_in_one_graph(given, options):
    module, x = layer(**options), tokens(requires_grad=True)
    x = x if "cu_seqlens" not in given else x[0].detach().requires_grad_()
    compiled, leaves = torch.compile(module, fullgraph=True, backend="aot_eager"), (x, *module.parameters())
    torch.testing.assert_close(gradients(module(x, **given), leaves), gradients(compiled(x, **given), leaves),
                               rtol=0, atol=1e-6)


def test_autocast():
    module, x = layer(qk_norm=True), tokens(requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    assert out.dtype == torch.bfloat16
    assert {y.dtype for y in gradients(out, (x, *module.parameters()))} == {torch.float32}


@every_option
def test_saved_and_loaded(options):
    module, x = layer(**OPTIONS[options]), tokens()
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = layer(**OPTIONS[options])
    assert not torch.equal(other(x), module(x))
    other.load_state_dict(torch.load(file, weights_only=True))
    for same_one in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(same_one(x), module(x)) and repr(same_one) == repr(module)


def test_parameters_are_those_of_llama_and_doge():
    names = {name: tuple(y.shape) for name, y in layer(qk_norm=True, head_dim=10, bias=True).state_dict().items()}
    assert names == {
        "q_proj.weight": (40, 24), "q_proj.bias": (40,), "k_proj.weight": (20, 24), "k_proj.bias": (20,),
        "v_proj.weight": (20, 24), "v_proj.bias": (20,), "o_proj.weight": (24, 40), "o_proj.bias": (24,),
        "q_norm.weight": (10,), "k_norm.weight": (10,), "attention.A": (2,), "attention.dt_proj.weight": (2, 20)}


def test_device_dtype_and_reset():
    with torch.device("meta"):
        empty = DynamicMaskSelfAttention(WIDTH, HEADS, KV_HEADS, W, qk_norm=True, dt_bias=True)
    module = DynamicMaskSelfAttention(WIDTH, HEADS, KV_HEADS, W, qk_norm=True, device="meta", dtype=torch.bfloat16)
    assert {(y.device.type, y.dtype) for y in module.parameters()} == {("meta", torch.bfloat16)}
    made = empty.to_empty(device="cpu")
    for y in made.parameters():
        torch.nn.init.constant_(y, torch.nan)
    torch.manual_seed(1)
    made.reset_parameters()
    assert all(y.isfinite().all() for y in made.parameters()) and not made.attention.A.any()
    assert made.q_norm.weight.eq(1).all() and made(tokens()).isfinite().all()
    assert 0 < made.q_proj.weight.abs().max() <= WIDTH**-0.5  # as nn.Linear initialises it
    text = repr(made)
    for shown in ("width=24", "heads=4", "kv_heads=2", "head_dim=6", "rope=10000.0", "window=5", "batch_first=True"):
        assert shown in text


def test_the_documentation_runs(tmp_path, monkeypatch, capsys):
    """Every Python block of docs/layers.md."""
    monkeypatch.chdir(tmp_path)
    names = run_page("layers.md", gpu=False)
    assert names["text"].shape == (4, 50) and (tmp_path / "model.pt").exists()
    assert "tensor([31, 41])" in capsys.readouterr().out


WRONG = {
    "width": (lambda m, x: m(x[..., :20]), r"x must have shape \(B, N, width\), .* width=24, got \(2, 18, 20\)"),
    "axes": (lambda m, x: m(x[0]), r"x must have shape \(B, N, width\), or \(total, width\) with cu_seqlens.*\(18, 24"),
    "packed": (lambda m, x: m(x, cu_seqlens=[0, N]), r"x must have shape \(total, width\) with cu_seqlens.*\(2, 18, 2"),
    "numpy": (lambda m, x: m(x.numpy()), "x must be a torch tensor, got ndarray"),
    "both": (lambda m, x: m(x[0], cu_seqlens=[0, N], padding=torch.ones(1, N) > 0), "either padding .* or cu_seqlens"),
    "padding shape": (lambda m, x: m(x, padding=torch.ones(N, B) > 0),
                      r"padding must have shape \(B, N\) = \(2, 18\).*got \(18, 2\)"),
    "padding type": (lambda m, x: m(x, padding=torch.ones(B, N)), "padding must be bool, or integers .*float32"),
    "padding value": (lambda m, x: m(x, padding=torch.full((B, N), 2)), "padding must be 1 for real keys"),
    "short": (lambda m, x: m(x[0], cu_seqlens=[0, 7]), r"cu_seqlens must .* end at x's length 18, got \[0, 7\]"),
    "long": (lambda m, x: m(x[0], cu_seqlens=[0, 7, 19]), r"cu_seqlens must .* end at x's length 18, got \[0, 7, 19\]"),
    "falling": (lambda m, x: m(x[0], cu_seqlens=[0, 7, 3, N]), "cu_seqlens must be cumulative lengths"),
    "lengths": (lambda m, x: m(x[0], cu_seqlens=torch.tensor(N)), r"cu_seqlens must have shape \(B \+ 1,\)"),
    "float": (lambda m, x: m(x[0], cu_seqlens=torch.tensor([0.0, N])), "cu_seqlens must be int32 or int64"),
    "listed": (lambda m, x: m(x[0], cu_seqlens=[0, 1.5]), r"cu_seqlens must be .* a list of ints, got \[0, 1.5\]"),
    "positions": (lambda m, x: m(x, positions=torch.arange(N - 1)), r"positions must have shape .*got \(17,\)"),
    "no cache": (lambda m, x: m(x, cache=[]), "cache must be a DynamicCache, as make_cache makes it, got list"),
    "batch": (lambda m, x: m(x, cache=m.make_cache(3)), "cache must be for x's batch of 2, got .* a batch of 3"),
    "sequences": (lambda m, x: m(x[0], cu_seqlens=[0, 1, 2, N], cache=m.make_cache(2)),
                  "cu_seqlens must have the 2 sequences of the cache, got 3"),
    "another's cache": (lambda m, x: m(x, cache=layer(window=4).make_cache(B)), "layer's window=5, got window=4"),
    "numpy cache": (lambda m, x: m(x, cache=dma.DynamicCache(B, 2, W, 6, dtype="float32")),
                    "cache must hold torch tensors on x's device cpu"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_in_the_users_terms(name):
    call, message = WRONG[name]
    with torch.no_grad(), pytest.raises((TypeError, ValueError), match=message):
        call(layer(), tokens())


@pytest.mark.parametrize(("options", "message"), [
    ({"heads": 5, "kv_heads": None}, "width must be a multiple of heads .* got width=24, heads=5"),
    ({"kv_heads": 3}, "heads must be a multiple of kv_heads, got heads=4, kv_heads=3"),
    ({"head_dim": 5}, "rotary positions need an even head_dim, got head_dim=5"),
    ({"rope": True}, "rope must be a real number"),
    ({"qk_norm": 1}, "qk_norm must be True or False"), ({"width": 2.0}, "width must be an int"),
])
def test_options_are_checked_when_the_layer_is_made(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        DynamicMaskSelfAttention(**{"width": WIDTH, "heads": HEADS, "kv_heads": KV_HEADS, "window": W, **options})


# ---- changed options ----
CHANGES = {"window": 3, "sinks": 2, "recent": 4, "form": "linear", "scale": 0.3, "softcap": 1.5, "rope": 100.0,
           "slope": (0.5, -0.5), "bias_delay": 4}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_a_changed_option_counts(name):
    """Applies to whole sequences and decoding as if the layer had been built with it."""
    value, module, x = CHANGES[name], layer(), tokens()
    before, made = module(x), layer(**{name: value})
    made.load_state_dict(module.state_dict())
    assert getattr(module, name) != value
    setattr(module, name, value)
    assert getattr(module, name) == value
    assert torch.equal(module(x), made(x)) and not torch.allclose(module(x), before, atol=1e-4)
    assert torch.equal(extended(module, x, (11, 7)), extended(made, x, (11, 7)))
    if name != "rope":
        assert getattr(module.attention, name) == value and repr(module) == repr(made)
        assert f"{name}={value!r}" in repr(module)


def test_other_options_reach_the_core():
    module = layer()
    module.deterministic, module.backend, module.A_init = True, "numpy", 0.5
    assert (module.attention.deterministic, module.attention.backend) == (True, "numpy")
    module.reset_parameters()
    assert module.attention.A.tolist() == [0.5] * KV_HEADS
    module.scale = None
    assert module.scale is module.attention.scale is None
    module.window = torch.tensor([3, 7])
    assert module.window == module.make_cache(B).window == (3, 7) and "window=(3, 7)" in repr(module)
    module.window = [4, 4]
    assert module.window == module.make_cache(B).window == 4


@pytest.mark.parametrize(("name", "wrong", "error", "message"), [
    ("window", 0, ValueError, "window must be at least 1, got 0"), ("window", 2.5, TypeError, "window must be an int"),
    ("window", (3, 4, 5), ValueError, "window must be an int, or one int for each of 2 kv heads, got 3 of them"),
    ("bias_delay", -1, ValueError, "bias_delay must be at least 0, got -1"),
    ("sinks", -1, ValueError, "sinks must be at least 0"), ("recent", True, TypeError, "recent must be an int"),
    ("form", "square", ValueError, "form must be 'exp' or 'linear'"), ("scale", "x", TypeError, "scale must be a real"),
    ("softcap", -1, ValueError, "softcap must be a finite number of at least 0"),
    ("deterministic", 1, TypeError, "deterministic must be True or False"),
    ("backend", 3, TypeError, "backend must be a str or None"), ("A_init", None, TypeError, "A_init must be a real"),
    ("slope", "x", TypeError, "slope must be a real number, got str 'x'"),
    ("slope", (1, float("inf")), ValueError, r"slope\[1\] must be a finite number"),
    ("slope", (1, 1, 1), ValueError, "slope must be a number, or one for each of 2 kv heads, got 3"),
    ("rope", -1.0, ValueError, "rope must be a positive base"), ("checkpoint", "no", TypeError, "checkpoint must be"),
    ("batch_first", 0, TypeError, "batch_first must be True or False")])
def test_a_wrong_change_changes_nothing(name, wrong, error, message):
    with pytest.raises(error, match=message):
        layer(**{name: wrong})
    module = layer()
    owners = [module] if name in ("rope", "checkpoint", "batch_first") else [module, module.attention]
    for owner in owners:
        before = getattr(owner, name)
        with pytest.raises(error, match=message):
            setattr(owner, name, wrong)
        assert getattr(owner, name) == before


@pytest.mark.parametrize("name", ["width", "heads", "kv_heads", "head_dim", "qk_norm", "bias", "dt_bias"])
def test_sizes_cannot_be_changed(name):
    module = layer()
    owners = [module, module.attention] if name in ("kv_heads", "head_dim", "dt_bias") else [module]
    for owner in owners:
        with pytest.raises(AttributeError, match=f"{name} cannot be changed.*parameters"):
            setattr(owner, name, 8)


def test_options_that_do_not_fit_each_other():
    core = layer().attention
    with pytest.raises(ValueError, match="causal=False needs keys='global'"):
        core.causal = False
    core.keys = "global"
    for name in ("sinks", "recent"):
        with pytest.raises(ValueError, match=rf"sinks and recent need keys='prefix', got .*{name}=2"):
            setattr(core, name, 2)
    core.causal = False
    with pytest.raises(ValueError, match="causal=False needs keys='global', got keys='prefix'"):
        core.keys = "prefix"
    assert (core.keys, core.causal, core.sinks, core.recent) == ("global", False, 0, 0)
    odd = DynamicMaskSelfAttention(WIDTH, HEADS, head_dim=5, rope=None)
    with pytest.raises(ValueError, match="rotary positions need an even head_dim, got head_dim=5"):
        odd.rope = 100.0


def test_a_core_of_another_kind_has_no_options():
    module = layer()
    module.attention = torch.nn.Identity()
    assert not hasattr(module, "window") and module.process_group is None


@pytest.mark.parametrize("autocast", [True, False])
def test_norms_of_another_type_are_fused(recwarn, autocast):
    """torch warns when it uses the slow norm; the result is computed in the type of the norm's weights and rounded
    once."""
    module, x = layer(torch.float32 if autocast else torch.bfloat16, qk_norm=True), tokens()
    module.q_norm.float(), module.k_norm.float()
    seen = []
    module.q_norm.register_forward_hook(lambda norm, args, out: seen.append((args[0].dtype, out.dtype)))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        module(x if autocast else x.bfloat16())
    assert seen == [(torch.float32, torch.float32)]
    assert not [str(given.message) for given in recwarn if "rms" in str(given.message).lower()]
