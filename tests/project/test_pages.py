"""Runs the Python blocks of pages that no other test runs."""
import numpy as np
import pytest

from tests.project.pages import DOCS, run_page


def test_biases_and_eviction(capsys):
    pytest.importorskip("torch")
    names = run_page("biases-and-eviction.md", gpu=False)
    seen = names["mask"].to_dense(200)[0, 0].sum(-1)
    assert seen.tolist() == [min(i + 1, 24) for i in range(200)]
    assert names["gates"] == names["M"].from_stop(names["gates"].stop) and names["recorded"] == names["mask"]
    assert names["budgets"].to_dense(200)[0].sum(-1).max(-1).tolist() == [16, 48]
    assert (names["prompt"] < 200).sum() == 150 - 64 and (names["furthest"] < 200).sum() == 200 - 24
    assert names["streaming"].to_dense(200)[0, 0, -1].sum() == 64
    said = capsys.readouterr().out
    assert np.isfinite(names["log_f"].grad.numpy()).all() and said.startswith("[[") and "tensor(True)" in said
    assert not names["log_g"].grad[..., -64:].any() and names["log_g"].grad[..., :-64].all()


def test_get_started(capsys):
    pytest.importorskip("torch")
    names = run_page("get-started.md", gpu=False)
    assert names["out"].shape == (1, 1024, 4, 64) and names["layer"].attention.A.grad is not None
    said = capsys.readouterr().out
    for comment in ("(1, 1024, 4, 64) (1, 4, 1024)", "torch.Size([2])", "torch.Size([2, 1, 64])"):
        assert comment in said  # the output that the page shows


def test_concepts(capsys):
    mask = run_page("concepts.md", gpu=False)["mask"]
    assert capsys.readouterr().out == f"100 {mask.stop[0, 0, 100]}\n"


def test_gallery():
    pytest.importorskip("matplotlib")
    names = run_page("gallery.md", gpu=False)
    assert len(names["figure"].axes) == 3 and names["mask"].shape == (1, 2, 1024)
    kept = names["budgets"].to_dense(1024)[0].sum(-1)
    assert kept.max(-1).tolist() == [192, 32] and names["gates"].to_dense(1024)[0, 0, -1].sum() < 300


def test_sharp_bits():
    names = run_page("sharp-bits.md", gpu=False)
    assert names["out"].shape == names["whole"].shape


def test_jax(capsys):
    pytest.importorskip("jax", minversion="0.9")
    pytest.importorskip("flax")
    names = run_page("jax.md", gpu=False)
    assert np.allclose(names["same"], names["dj"].attention(names["query"], names["key"], names["value"], causal=True),
                       atol=1e-5)
    assert np.array_equal(names["out"], names["attend"](*(names[name] for name in (
        "query", "key", "value", "dt_proj", "A"))))
    assert capsys.readouterr().out == ("(2, 512, 4, 64) [(2, 128), (2,)]\n(2, 2, 512) [(1, 1, 512), (2, 2, 512)]\n"
                                       "(2,) True\n")


def test_evidence():
    pytest.importorskip("torch")
    found = run_page("evidence.md", gpu=False)
    group, = found["optimizer"].param_groups
    assert {id(x) for x in group["params"]} == {id(found["core"].A), id(found["core"].dt_proj.weight)}
    assert found["steady"].A.tolist() == [1, 1] and not found["steady"].A.requires_grad


def test_the_page_about_backends(capsys):
    run_page("backends.md", gpu=False)
    assert "sm90/forward.cu" in capsys.readouterr().out


def test_every_page_is_run_or_holds_no_python():
    """Every page with Python blocks is run here or by the tests of its module."""
    elsewhere = {"decoding.md", "layers.md", "training.md", "coming_from_flash_dmattn.md",
                 "distributed.md", "retrofit.md", "serving.md", "transformers.md", "usage.md", "vllm.md"}
    here = {"biases-and-eviction.md", "get-started.md", "concepts.md", "gallery.md", "sharp-bits.md",
            "jax.md", "evidence.md", "backends.md"}
    with_python = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if "```python\n" in path.read_text()}
    assert with_python == elsewhere | here
