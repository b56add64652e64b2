"""Code shared by the benchmarks: folders and tables of results, and, with torch, checks and peers."""
import importlib.util
import json
import shutil
import subprocess

import numpy as np
import pytest

import cupy_dma as dma
from benchmarks.harness import folders, report
from benchmarks.harness.report import milliseconds
from cupy_dma.masks.interval import IntervalMask

if importlib.util.find_spec("torch"):
    import torch

    from benchmarks.harness import check, peers
    from benchmarks.harness.suite import Case

needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs torch")
uncompiled = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")


# ---- folders --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("device", "folder"), [
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"),
    ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA RTX 6000 Ada Generation", "rtx-6000"),
    ("NVIDIA Graphics", "graphics"), ("x86_64", "cpu"), ("", "cpu")])
def test_each_kind_of_gpu_has_a_folder(device, folder):
    assert folders.folder_of(device) == folder
    assert folders.output(None, device) == folders.RESULTS / folder


def test_the_newest_result_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "RESULTS", tmp_path)
    assert folders.recorded("a.json") is None
    for name, date in (("h100", "2026-11-02T10:00:00Z"), ("h200", "2026-11-02T09:00:00Z")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.json").write_text(json.dumps({"date": date}))
    assert folders.recorded("a.json") == tmp_path / "h100" / "a.json"
    assert folders.recorded("a.json", str(tmp_path / "h200")) == tmp_path / "h200" / "a.json"
    assert folders.read("a.json") == {"date": "2026-11-02T10:00:00Z"} and len(folders.newest("*.json")) == 1
    with pytest.raises(SystemExit, match=r"b\.json is not recorded in"):
        folders.read("b.json")
    assert folders.recorded("a.json", str(tmp_path)) is None and folders.output("elsewhere").name == "elsewhere"


def test_every_result_lies_in_the_folder_of_its_device():
    for path in folders.RESULTS.glob("*/*.json"):
        result = json.loads(path.read_text())
        expected = "evidence" if path.parent == folders.EVIDENCE else folders.folder_of(result["device"])
        assert path.parent.name == expected, path
    assert not list(folders.RESULTS.glob("*.json"))


def test_git_ignores_no_result():
    """A page that links to a file that git ignores would build only on this machine."""
    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=folders.RESULTS, capture_output=True).returncode

    if not shutil.which("git") or git("status"):
        pytest.skip("needs a git checkout")
    for name in ("compare.json", "model.png", "build/a.json"):
        assert git("check-ignore", "--no-index", f"h200/{name}") == 1, name


# ---- words and tables -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("ms", "shown"), [
    (None, "–"), (0.0, "0"), (0.01234, "0.0123"), (1.234, "1.23"), (12.34, "12.3"), (141.2, "141"), (1412.0, "1412")])
def test_three_digits(ms, shown):
    assert milliseconds(ms) == shown


def test_the_text_says_what_failed_or_was_not_measured():
    case = {"name": "plain", "rows": [{"who": "cudnn", "stage": "backward", "ms": None}],
            "check": {"ok": True, "worst": 0.5}}
    result = {"device": "GPU", "versions": {}, "commit": "", "cases": [case]}
    assert report.text(result).endswith("plain: check: 0.50 of what is allowed\n  cudnn  backward")
    case["check"] = {"ok": False, "worst": 2}
    assert "plain: check FAILED" in report.text(result)


@needs_torch
def test_pairs_are_counted_as_the_mask_counts_them():
    one = Case("smoke", 4, 2, 32, 300, 300, 64)
    mask = IntervalMask.top_w(np.random.default_rng(0).standard_normal((1, 2, 300)).astype(np.float32), 64)
    assert one.kept_pairs == 2 * int(mask.count(300).sum())


# ---- checks ---------------------------------------------------------------------------------------------------------
def small(heads=4, kv_heads=2, n=256, dtype=None, window=40):
    """dout, query, key, value, scores, mask."""
    generator = torch.Generator().manual_seed(1)
    do, q, k, v = (torch.randn(1, n, h, 16, generator=generator, dtype=dtype) for h in
                   (heads, heads, kv_heads, kv_heads))
    scores = torch.randn(1, kv_heads, n, generator=generator)
    return do, q, k, v, scores, IntervalMask.top_w(scores, window=window)


def gradients_of(do, q, k, v, scores, mask):
    out, lse = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True)
    return out, lse, dma.backward.attention_backward(do, q, k, v, out, lse, mask=mask, bias=scores)


def wrong(x):
    return x * 1.05, x * float("nan"), x + 0.1


@needs_torch
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradient_check(dtype):
    """Right gradients pass; each kind of wrong one fails."""
    do, q, k, v, scores, mask = small(n=500, dtype=getattr(torch, dtype))
    out, lse, found = gradients_of(do, q, k, v, scores, mask)
    start, stop = mask.start.expand(1, 2, 500), mask.stop.expand(1, 2, 500)

    def checked(**changed):
        return check.check_interval_gradients(found._replace(**changed), do, q, k, v, out, lse, scores, start, stop)

    right = checked()
    assert right["ok"] and right["unseen_keys"] > 0 and right["keys"] > 4, right
    for name, gradient in found._asdict().items():
        assert not any(checked(**{name: x})["ok"] for x in wrong(gradient)[:2]), name
    g, j = (stop[0] <= start[0]).nonzero()[0].tolist()
    for name, index in (("key", (0, j, g)), ("value", (0, j, g)), ("bias", (0, g, j))):
        leak = getattr(found, name).clone()
        leak[index] = 1e-6
        assert not checked(**{name: leak})["unseen_are_zero"]


@needs_torch
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("window", [None, 40])
def test_token_check(dtype, window):
    """Right outputs and kept keys pass; each kind of wrong one fails."""
    _, q, k, v, scores, _ = small(n=200, dtype=getattr(torch, dtype))
    scores = (4 * scores).round() / 4  # ties
    q = q[:, -1:]
    kept = None if window is None else check.best_keys(scores[0], window)
    mask = None if window is None else IntervalMask.top_w(scores, window=window)
    out, lse = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True)

    def right(out, lse, positions=None):
        found = check.TokenCheck()
        found.compare(out[0, 0], lse[0, :, 0], q[0, 0], k[0], v[0], scores[0], kept)
        if positions is not None:
            found.compare_kept(positions, kept)
        return found.result()["ok"]

    assert right(out, lse)
    assert not any(right(x, lse) for x in wrong(out)) and not any(right(out, x) for x in wrong(lse))
    if window is not None:
        for shown, ok in ((mask, True), (IntervalMask.top_w(scores, window=window + 1), False)):
            found = check.TokenCheck()
            found.compare_rows(out[0], lse[0], q[0], k[0], v[0], scores[0], *(x.expand(1, 2, 200)[0] for x in (
                shown.start, shown.stop)), window, [0])
            assert found.result()["ok"] is ok
        cache = dma.DynamicCache(1, 2, window, 16, dtype=q.dtype, like=q)
        cache.update(k, v, scores)
        positions = cache.positions[0]
        assert right(out, lse, positions)
        positions[1, 7] = -1
        assert not right(out, lse, positions)


@needs_torch
@pytest.mark.parametrize("key_bias", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dense_check(dtype, key_bias):
    """Right outputs and gradients pass; each kind of wrong one fails."""
    do, q, k, v, scores, _ = small(n=200, dtype=getattr(torch, dtype))
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(1, 2, 200, 200, generator=generator) < 0.5
    mask[:, :, 100] = False  # a query that sees nothing
    bias = scores if key_bias else torch.randn(1, 4, 200, 200, generator=generator, dtype=getattr(torch, dtype))
    out, lse, found = gradients_of(do, q, k, v, bias, mask)
    problem = check.Problem(q[0], k[0], v[0], lambda i, j: mask[0][:, i][:, :, j],
                            bias[0][:, None] if key_bias else bias[0])
    rows = check.sample(200, 0)
    assert 100 in rows

    def forward(out, lse):
        return check.check_forward(problem, out[0], lse[0], rows)["ok"]

    assert forward(out, lse)
    assert not any(forward(x, lse) for x in wrong(out)) and not any(forward(out, x) for x in wrong(lse))

    def backward(**changed):
        gradients = [x[0] for x in found._replace(**changed)]
        if key_bias:
            gradients[3] = gradients[3][:, None]
        return check.check_backward(check.Given(problem, do[0], out[0], lse[0]), gradients, rows, rows)["ok"]

    assert backward()
    for name, gradient in found._asdict().items():
        assert not any(backward(**{name: x}) for x in wrong(gradient)[:2]), name


# ---- peers compute what this library computes -----------------------------------------------------------------------
@needs_torch
def test_dense_mask_of_the_peers_is_the_same_mask():
    scores = torch.randn(1, 2, 50, generator=torch.Generator().manual_seed(0))
    dense = peers.dense_mask(scores, 50, 7, torch.float32, group=2)
    mask = IntervalMask.top_w(scores, window=7).to_dense(50).repeat_interleave(2, dim=1)
    assert torch.equal(dense > float("-inf"), mask)
    assert torch.equal(dense[mask], scores.repeat_interleave(2, dim=1)[:, :, None].expand_as(dense)[mask])


@needs_torch
def test_blocks_of_an_interval_mask():
    scores = torch.randn(1, 2, 96, generator=torch.Generator().manual_seed(0))
    mask = IntervalMask.top_w(scores, window=40)
    seen, full = peers.interval_blocks(mask.start.expand(1, 2, 96), mask.stop, 96, 16)
    dense = mask.to_dense(96).reshape(1, 2, 6, 16, 6, 16)
    assert torch.equal(seen, dense.any(5).any(3)) and torch.equal(full, dense.all(5).all(3))
    assert full.any() and not full.all()


@needs_torch
@uncompiled
@pytest.mark.parametrize("queries", [256, 1])
def test_flex_computes_the_same(queries):
    _, q, k, v, scores, mask = small()
    q = q[:, -queries:]
    blocks = peers.intervals(q, k, mask.start.expand(1, 2, 256), mask.stop)
    call = peers.flex(q, k, v, scores, blocks, compiled=False)
    ours = dma.dynamic_mask_attention(q, k, v, scores, window=40)
    assert torch.allclose(call().transpose(1, 2), ours, atol=2e-5)


@needs_torch
@uncompiled
def test_flex_gradients_are_those_of_the_same_mask(monkeypatch):
    """torch refuses these gradients on the CPU, although it can compute them."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None, raising=False)
    do, q, k, v, scores, mask = small()
    blocks = peers.intervals(q, k, mask.start.expand(1, 2, 256).contiguous(), mask.stop)
    call, note = peers.flex_backward(q, k, v, do, scores, blocks, compiled=False)
    ours = gradients_of(do, q, k, v, scores, mask)[2]
    *theirs, bias = call()
    assert note == "" and torch.allclose(bias, ours.bias, atol=1e-4)
    assert all(torch.allclose(x.transpose(1, 2), y, atol=1e-4) for x, y in zip(theirs, ours))


@needs_torch
@pytest.mark.parametrize("forward", [False, True])
def test_dense_gradients(forward):
    do, q, k, v, _, _ = small()
    call, note = peers.dense_backward(None, q, k, v, do, forward=forward)
    out, lse = dma.attention(q, k, v, causal=True, return_lse=True)
    ours = dma.backward.attention_backward(do, q, k, v, out, lse, causal=True)
    assert note == ""
    for _ in range(2):  # the forward pass is retained
        assert all(torch.allclose(x.transpose(1, 2), y, atol=1e-4) for x, y in zip(call(), ours))


@needs_torch
def test_peers_expand_heads_where_groups_are_not_served():
    def make(k, v):
        def call():
            if k.shape[1] != 4:
                raise RuntimeError("no groups")
            return k, v

        return call

    k, v = torch.zeros(2, 1, 2, 8, 16)
    call, note = peers.expanded_if_needed(make, k, v, group=2)
    assert call()[0].shape == (1, 4, 8, 16) and "expanded" in note
    with pytest.raises(RuntimeError, match="no groups"):
        peers.expanded_if_needed(make, k, v, group=1)


@needs_torch
def test_tiles_of_a_peer_that_do_not_fit():
    def choose(*times):
        """The time of the call that is chosen, the note, and the choices that were tried."""
        made = []

        def make(options):
            made.append(options["bwd_x"])
            ms = times[options["bwd_x"]]
            return (lambda: ms) if ms is not None else lambda: {}["out of resource"]

        call, note = peers.first_or_fastest(make, lambda call: call(), tuple({"bwd_x": i} for i in range(3)))
        return call(), note, made

    assert choose(3.0, 1.0, 2.0) == (3.0, "", [0])
    best, note, made = choose(None, 2.0, 1.0)
    assert best == 1.0 and "x 2" in note and made == [0, 1, 2]
    assert choose(None, None, 5.0)[0] == 5.0
    with pytest.raises(RuntimeError, match="KeyError: 'out of resource'"):
        choose(None, None, None)


@needs_torch
@pytest.mark.gpu
def test_flex_with_a_learned_bias():
    """The peer, at a head dim for which torch's tiles did not fit, against autograd through the definition."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 256, heads, 128, device="cuda").bfloat16() for heads in (2, 1, 1, 2))
    mask = torch.rand(1, 2, 256, 256, device="cuda") < 0.5
    bias = torch.randn(1, 2, 256, 256, device="cuda").bfloat16()
    call, note = peers.flex_backward(q, k, v, do, bias, peers.block_mask(mask, True))
    print(note or "torch's own tiles")
    inputs = [x.float().requires_grad_() for x in (q, k, v, bias)]
    s = inputs[0].transpose(1, 2) @ inputs[1].permute(0, 2, 3, 1) * 128**-0.5 + inputs[3]
    out = s.masked_fill(~mask, float("-inf")).softmax(-1) @ inputs[2].transpose(1, 2)
    expected = torch.autograd.grad(out, inputs, do.float().transpose(1, 2))
    for found, wanted in zip(call(), (*(x.transpose(1, 2) for x in expected[:3]), expected[3])):
        assert (found.float() - wanted).norm() < 2e-2 * wanted.norm()
