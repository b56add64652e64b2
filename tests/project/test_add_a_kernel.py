"""examples/add_a_kernel, the kernel of docs/add-a-kernel.md: its results, its faults and its machine code."""
import importlib
import re
from pathlib import Path

import numpy as np
import pytest

from cupy_dma.arrays import numpy_dtype

build = pytest.importorskip("tests.emulator.build")
needs_compiler = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))


@pytest.fixture
def module(monkeypatch):
    from tests import emulator

    monkeypatch.setitem(emulator.RESULTS, "key_norms", ("score",))
    return importlib.import_module("examples.add_a_kernel.key_norms")


def key_of(shape, dtype, strided=False):
    key = np.random.default_rng(0).standard_normal(shape).astype(numpy_dtype(dtype))
    return key.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3) if strided else key


# ---- the test -----------------------------------------------------------------------------------------------------

@needs_compiler
@pytest.mark.parametrize("backend", ["numpy", "emulator"])
@pytest.mark.parametrize(("shape", "dtype", "strided"), [
    ((2, 37, 3, 40), "float16", False), ((1, 5, 2, 64), "bfloat16", True), ((1, 9, 1, 1), "float32", False),
    ((2, 0, 3, 8), "float16", False), ((1, 1, 1, 256), "float32", True)])
def test_key_norms(module, backend, shape, dtype, strided):
    key = key_of(shape, dtype, strided)
    scores = module.key_norm_scores(key, backend=backend)
    assert scores.shape == (shape[0], shape[2], shape[1]) and scores.dtype == np.float32
    np.testing.assert_allclose(scores, module.reference(key), rtol=1e-6)


# ---- its faults ---------------------------------------------------------------------------------------------------

FAULTS = [("a key too many", "if (row >= p.rows)", "if (row > p.rows)"),
          ("half of the lanes are not added", "mask = 16", "mask = 8"),
          ("every lane begins at the first element", "d = lane", "d = 0"),
          ("heads are read in the order of keys", "head * p.key_head", "head * p.key_row"),
          ("the last elements are left out", "d < HEAD_DIM", "d + 32 <= HEAD_DIM")]


@needs_compiler
@pytest.mark.parametrize("fault", FAULTS, ids=[fault[0] for fault in FAULTS])
def test_faults_are_caught(module, monkeypatch, tmp_path, fault):
    from cupy_dma.backends.cuda.runtime.program import fresh
    from tests.emulator import EmulatorError

    sound = module.SOURCE.read_text()
    assert sound.count(fault[1]) == 1
    (tmp_path / "key_norms.cu").write_text(sound.replace(*fault[1:]))
    monkeypatch.setattr(module, "SOURCE", tmp_path / "key_norms.cu")
    with fresh(), pytest.raises((AssertionError, EmulatorError)):
        test_key_norms(module, "emulator", (2, 37, 3, 40), "float16", False)


# ---- its machine code ---------------------------------------------------------------------------------------------

def test_no_register_is_spilled(module):
    pytest.importorskip("cupy")
    from cupy_dma.backends.cuda.runtime import jit

    compiled = jit.compile(module.NormConfig("__nv_bfloat16", 128), "sm_90a")
    assert compiled.spill_bytes == 0 and compiled.registers <= 40


def test_arguments_are_checked(module):
    with pytest.raises(ValueError, match=r"key must have shape \(B, Lk, Hkv, D\), got \(3, 4\)"):
        module.key_norm_scores(np.ones((3, 4), np.float32))
    with pytest.raises(TypeError, match="key must be float16 or bfloat16 or float32, got int64"):
        module.key_norm_scores(np.ones((1, 2, 3, 4), np.int64))


# ---- the page -------------------------------------------------------------------------------------------------------

def test_the_page_shows_parts_that_are_there():
    root = Path(__file__).resolve().parents[2]
    shown = re.findall(r'excerpt file="([^"]+)"(?: part="([^"]+)")?', (root / "docs" / "add-a-kernel.md").read_text())
    assert len(shown) >= 9
    for file, part in shown:
        assert not part or f"\n# ---- {part}" in (root / file).read_text(), part
