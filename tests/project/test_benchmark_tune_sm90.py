"""The benchmark tune_sm90 in parts that need no GPU."""

import pytest

import cupy_dma as dma
from benchmarks.routines import tune_sm90


def test_tuned_tiles_fit():
    from cupy_dma.backends.cuda.attention import sm90, sm90_tiles

    found = tune_sm90.cases(list(tune_sm90.KINDS), [64, 96, 128, 192, 256])
    assert len({str(case) for case in found}) == len(found)
    for case in found:
        candidates = tune_sm90.tiles(case)
        assert set(sm90_tiles.tiles_of(case.kind, case.head_dim)) <= set(candidates)
        for tile in candidates:
            config = sm90.HopperForwardConfig(
                "__nv_bfloat16", case.head_dim, 2, *tile, "KEYS_LISTED", case.causal, 1, False, case.kind == "bits",
                "float", False, False, True, False)
            assert config.shared_bytes <= 227 * 1024


def test_tuned_tiles_are_forced_and_given_back():
    shape, tile = "H=4/2 N=1024 D=64 w=400", tune_sm90.CANDIDATES[64][1]
    before = dma.explain(shape)
    for forced in (tile, None):
        with pytest.raises(ZeroDivisionError), tune_sm90.forced(forced):
            text = dma.explain(shape)
            assert (f"block_m={tile.block_m} block_n={tile.block_n}" in text) == (forced is not None)
            assert ("sm80/forward.cu" in text) == (forced is None)
            _ = 1 / 0
        assert dma.explain(shape) == before


def test_kernels_of_another_folder_are_loaded_anew():
    """Those of every step, also where only the first call asks for them."""
    from cupy_dma.backends.cuda.decode import step
    from cupy_dma.backends.cuda.runtime import jit

    asked = []

    class Runtime:
        def load(self, config, entry, *more):
            asked.append(entry)

    runtime = Runtime()

    def ask():
        step._kernel(runtime, 0, 1, "__half", 64, 64, True, 2, 4, False, 1, True, 1, False, False)

    ask()
    with tune_sm90.kernels_of(jit.kernels_directory()):
        ask()
        ask()
    ask()
    assert asked == ["decode_step"] * 3


@pytest.mark.parametrize(("arguments", "message"), [
    (["--head-dim", "300"], "--head-dim must be 1 to 256, got"),
    (["--kernels", "tests"], "--kernels must be folders like kernels/, got tests, which has no arch.cuh"),
    (["--case", "17/8"],
     "--case must be part of a case's name, such as short intervals, D64 2/1 N2048 w128; got 17/8")])
def test_tuning_refuses_what_it_cannot_do(arguments, message, capsys):
    with pytest.raises(SystemExit):
        tune_sm90.main(arguments)
    assert message in capsys.readouterr().err


def test_table_of_tuned_tiles():
    rows = [{"tile": "portable", "ms": 2.0, "right": True}, {"tile": "a", "ms": 1.0, "right": True, "in_use": False},
            {"tile": "b", "ms": 0.5, "right": False, "in_use": True}]
    lines = tune_sm90.table({"cases": [{"name": "a case", "rows": rows}]}).splitlines()
    assert [line.split()[-1] for line in lines] == ["case", "ms", "fastest", "WRONG"] and "in use" in lines[3]
