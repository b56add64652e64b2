"""Kernels compiled ahead for the GPU tests."""
import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.configs import LayoutConfig
from tests.unit.test_jit import needs_compiler

build = pytest.importorskip("tests.emulator.build")
pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

from tests import emulator  # noqa: E402
from tests.gpu import precompile  # noqa: E402


def test_the_grids_reach_every_kernel(monkeypatch):
    """A few cases of the grids request every kernel."""
    monkeypatch.setattr(precompile.cases, "CASES", precompile.cases.CASES[::8])
    monkeypatch.setattr(precompile, "TILES", {name: precompile.TILES[name] for name in ("128x128", "192x64")})
    found = precompile.hopper_configs()
    assert {config.runs for config in found if config.source == "sm90/forward.cu"} == {True, False}
    assert {config.kv_tma for config in found if config.source == "sm90/forward.cu"} == {True, False}
    assert {config.split for config in found if config.source == "sm90/forward.cu"} == {True, False}
    assert {"sm90/combine.cu", "sm90/backward_dkv.cu"} <= {config.source for config in found}
    portable = precompile.portable_configs()
    assert not any(config.source.startswith("sm90") for config in portable)
    assert {"sm80/forward.cu", "sm80/backward_preprocess.cu", "sm80/backward_dq.cu", "sm80/backward_dkv.cu",
            "sm80/backward_dbias.cu", "sm80/backward_reduce.cu", "lists/intervals.cu", "lists/dense_mask.cu",
            } <= {config.source for config in portable}


def test_the_tiles_to_be_tuned(monkeypatch):
    pytest.importorskip("torch")
    from benchmarks.routines import tune_sm90

    few = {(case.kind, case.causal): case for case in tune_sm90.cases(list(tune_sm90.KINDS), [192])}
    monkeypatch.setattr(tune_sm90, "cases", lambda kinds, head_dims: [
        case._replace(heads=2, kv_heads=1) for case in few.values()])
    found = precompile.tuning_configs([192])
    tiles = {(config.block_m, config.block_n, config.stages, config.ping_pong, config.keys, config.bits)
             for config in found if config.source == "sm90/forward.cu"}
    assert len(tiles) == 3 * 4  # two shapes with and without ping-pong; lists, bits, keys in their own order


def test_a_recorder_runs_nothing():
    x = np.ones((1, 5, 1, 16), numpy_dtype("float16"))
    with emulator.hopper_gpu(precompile.Recorder) as runtime:
        dma.attention(x, x, x, backend="emulator")
        assert runtime.configs
    assert dma.attention(x, x, x, backend="emulator").min() == 1  # the emulator works again


@needs_compiler
def test_compiled_once(tmp_path, monkeypatch, capsys):
    jit.compile.cache_clear()  # entries of another test in this process
    monkeypatch.setenv("CUPY_DMA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(precompile, "portable_configs", lambda: {LayoutConfig("__half"): None})
    for new in (1, 0):
        assert precompile.main(["--arch", "sm_80", "--jobs", "1"]) == 0
        assert f"{new} of them new" in capsys.readouterr().out
        assert len(list(tmp_path.glob("*.cubin"))) == 1
