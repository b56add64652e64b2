"""examples/ladder: each step gives the results of the previous step and of the library, and no check is vacuous."""
import importlib
import sys

import numpy as np
import pytest

import cupy_dma as dma
from tests.project.pages import ROOT, said_by

LADDER = ROOT / "examples" / "ladder"
STEPS = ["step0_dense", "step1_masked_loop", "step2_intervals", "step3_gathered_tiles", "step4_kernel"]


def step(name):
    if name == "step4_kernel" and "cuda" not in dma.get_available_backends():
        build = pytest.importorskip("tests.emulator.build")
        if build.unavailable() is not None:
            pytest.skip(str(build.unavailable()))
    return importlib.import_module(f"examples.ladder.{name}")


def test_every_step_is_here():
    assert sorted(path.stem for path in LADDER.glob("step*.py")) == STEPS


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("n", "w", "d"), [(150, 20, 16), (1, 1, 8), (65, 200, 8), (130, 1, 8)])
def test_every_step_is_the_library(name, n, w, d):
    from examples.ladder import check

    q, k, v, score = check.inputs(n, d)
    score = np.round(score, 1)  # some tie
    query, key, value = (x[None, :, None].astype(np.float64) for x in (q, k, v))
    expected = dma.dynamic_mask_attention(query, key, value, score[None, None].astype(np.float64), window=w)
    np.testing.assert_allclose(step(name).attention(q, k, v, score, w), expected[0, :, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", STEPS)
def test_every_step_runs_as_a_script(name):
    step(name)
    said = said_by(sys.executable, LADDER / f"{name}.py", "--length", "100", "--window", "16", "--head-dim", "8")
    assert ("the same" in said) == (name != "step0_dense") and "NOT" not in said
    if name == "step4_kernel":
        assert "The library's forward" in said and "tensor cores" in said


def test_a_wrong_step_is_noticed(capsys, monkeypatch):
    from examples.ladder import check, step0_dense, step1_masked_loop

    def wider(q, k, v, score, w):
        return step1_masked_loop.attention(q, k, v, score, w + 1)

    arguments = ["--length", "60", "--window", "8", "--head-dim", "8"]
    assert check.main(wider, step0_dense.attention, arguments) == 1
    assert "NOT THE SAME" in capsys.readouterr().out
    assert check.main(lambda *inputs: step0_dense.attention(*inputs) * np.nan, step0_dense.attention, arguments) == 1


@pytest.mark.parametrize(("old", "new", "noticed"), [
    ("        __syncthreads();  // all threads are done with the previous block\n", "", "race on shared memory"),
    ("        __syncthreads();  // the block is in shared memory\n", "", "uninitialised shared memory"),
    ("i >= stop[c]", "false", "Not equal"), ("l *= rescale;", ";", "Not equal"),
    ("if (i < p.n)\n", "", "of global memory|out of bounds|outside|no array")])
def test_faults_of_the_kernel_are_noticed(monkeypatch, tmp_path, old, new, noticed):
    step4 = step("step4_kernel")
    if step4.on_gpu():
        pytest.skip("on a GPU nobody watches")
    text = step4.SOURCE.read_text()
    assert text.count(old) == 1
    (tmp_path / "faulty.cu").write_text(text.replace(old, new))
    monkeypatch.setattr(step4, "SOURCE", tmp_path / "faulty.cu")
    step4.kernel.cache_clear()
    try:
        with pytest.raises((AssertionError, RuntimeError), match=noticed):
            test_every_step_is_the_library("step4_kernel", 100, 20, 8)
    finally:
        step4.kernel.cache_clear()


def test_lengths():
    assert len((LADDER / "step4_kernel.cu").read_text().splitlines()) < 120
    definition = (LADDER / "step0_dense.py").read_text()
    assert len(definition[definition.index("def attention"):definition.index("if __name__")].split("\n")) <= 20
    for path in LADDER.glob("*.py"):
        assert len(path.read_text().splitlines()) < 120


@pytest.mark.parametrize("d", [32, 64])
def test_the_kernel_compiles_for_gpus_without_spills(d):
    from cupy_dma.backends.cuda.runtime import jit
    from examples.ladder import step4_kernel

    try:
        jit.find_headers()
    except jit.CompileError as error:
        pytest.skip(str(error))
    for arch in ("sm_80", "sm_90a"):
        compiled = jit.compile(step4_kernel.kernel(d)._config, arch)
        assert compiled.spill_bytes == compiled.stack_bytes == 0, f"{d} on {arch}: {compiled}"
