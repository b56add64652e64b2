"""The routines that tune the Hopper kernels, run without a GPU, and whether the library's choices match their
records."""
import json
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch")

import cupy_dma as dma
from benchmarks.harness import folders, report
from benchmarks.routines import tune_schedule, tune_sm90, tune_sm90_backward
from cupy_dma.backends.cuda.attention import sm90, sm90_backward, sm90_costs, sm90_schedule, sm90_tiles
from cupy_dma.backends.cuda.attention.sm90_schedule import Schedule
from cupy_dma.backends.cuda.attention.sm90_tiles import HopperTile, ScheduleKey
from cupy_dma.backends.cuda.decode import step
from cupy_dma.backends.cuda.runtime import jit

SHAPE = "H=4/2 N=1024 D=64 w=400"


# ---- tiles of the forward -------------------------------------------------------------------------------------------
def test_tuned_tiles_fit():
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


def test_tiles_and_schedules_are_forced_and_given_back():
    before, tile = dma.explain(SHAPE), tune_sm90.CANDIDATES[64][1]
    ways = ((tune_sm90.forced(tile), f"block_m={tile.block_m} block_n={tile.block_n}"),
            (tune_sm90.forced(None), "sm80/forward.cu"),
            (tune_schedule.forced(HopperTile(128, 64, 6, 6, 3), Schedule(3, 3, 1, 0)),
             "sm90/forward.cu              3 x 384 threads"))
    for way, words in ways:
        with pytest.raises(ZeroDivisionError), way:
            shown = dma.explain(SHAPE)
            assert [other in shown for _, other in ways] == [other == words for _, other in ways]
            _ = 1 / 0
        assert dma.explain(SHAPE) == before != shown


def test_kernels_of_another_folder_are_loaded_anew():
    """Kernels of all steps, even if only the first call requests them."""
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


def test_the_fastest_right_tile_is_marked():
    rows = [{"tile": "portable", "ms": 2.0, "right": True}, {"tile": "a", "ms": 1.0, "right": True},
            {"tile": "b", "ms": 0.5, "right": False}]
    assert [row["fastest"] for row in tune_sm90.marked(rows)] == [False, True, False]
    shown = report.text({"device": "GPU", "versions": {}, "commit": "", "cases": [{"name": "a case", "rows": rows}]})
    assert shown.splitlines()[1] == "a case" and shown.endswith("b  ms 0.500  NOT right")


# ---- schedules ------------------------------------------------------------------------------------------------------
def test_the_library_chooses_fast_schedules():
    """For recorded calls, with the library's costs: at most 1 % slower than the fastest schedule on average."""
    lost = []
    for call in folders.read("schedule.json")["calls"]:
        key = ScheduleKey(**call["facts"])
        tile = sm90_schedule.tile_shape(key, 132)
        taken = tile, sm90_schedule.best_schedule(key, tile, 132)._replace(rotation=0)  # the rotation is not a choice
        times = {(HopperTile(*row["tile"]), Schedule(*row["work"])): row["us"] for row in call["rows"]}
        lost.append(times[taken] / min(times.values()) - 1)
    assert len(lost) > 200 and np.mean(lost) < 0.01 and max(lost) < 0.25


def test_costs_are_those_that_were_recorded():
    result, costs = folders.read("schedule.json"), json.loads(sm90_costs.PATH.read_text())
    assert costs["device"] == result["device"]
    assert costs["tiles"] == [tune_schedule.fitted(tile) for tile in result["tiles"]]


def test_costs_of_splits_are_fitted():
    """Times computed from three numbers give back these numbers."""
    waves = [{"keys": n, "whole": 0.01 * n, "launch": 10.0} for n in (256, 1024, 4096)]
    rows = [{"keys": n, "tiles": tiles, "count": count,
             "us": 10 + 0.01 * n / count + 2 + 0.03 * tiles * count + 0.1 * count} for n, tiles, count in (
                 (4096, 1, 8), (4096, 1, 32), (4096, 16, 8), (4096, 33, 4), (1024, 66, 2), (1024, 4, 4))]
    tile = {"kind": "intervals", "head_dim": 64, "tile": [128, 128, 4, 4, 2, True], "waves": waves, "splits": rows}
    assert tune_schedule.fitted(tile)["splits"] == pytest.approx([2, 0.03, 0.1], abs=2e-3)


def test_calls_have_several_ways():
    found = tune_schedule.choices(list(tune_sm90.KINDS), list(tune_schedule.HEAD_DIMS))
    assert len({str(call) for call in found}) == len(found) > 200
    for call in found:
        key = ScheduleKey(call.kind, call.head_dim, 2, 1, call.kv_heads, call.queries, call.length,
                          call.window or call.length, 0, False, call.window > 0, call.causal)
        for tile in sm90_tiles.tiles_of(call.kind, call.head_dim):
            assert next(sm90_schedule.candidates(key, tile, 132))


def test_the_kernels_of_all_tiles_are_compiled_first():
    found = tune_schedule.configs(["intervals", "contiguous"], [64])
    assert {(config.source, getattr(config, "split", None), getattr(config, "causal", None)) for config in found} == {
        ("sm90/combine.cu", None, None), *(("sm90/forward.cu", split, causal)
                                          for split in (False, True) for causal in (False, True))}


def test_losses_are_those_of_what_is_taken():
    rows = [{"us": us, "taken": us == 12.0, "right": us != 15.0, "tile": [], "work": {}} for us in (15.0, 12.0, 10.0)]
    result = {"calls": [{"name": "call", "rows": rows}]}
    assert tune_schedule.losses(result) == [(pytest.approx(0.2), "call")]
    assert "20.00 % over" in tune_schedule.table(result) and "WRONG: call" in tune_schedule.table(result)


# ---- ways of the backward -------------------------------------------------------------------------------------------
def test_cases_of_the_backward():
    names = [case.name for case in tune_sm90_backward.cases()]
    assert len(names) == len(set(names)) and len(names) > 15
    assert {len(tune_sm90_backward.ways(case)) for case in tune_sm90_backward.cases()} == {3, 4, 6}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_each_way_is_the_one_that_calls_take(head_dim):
    build = pytest.importorskip("tests.emulator.build")
    if build.unavailable() is not None:
        pytest.skip(str(build.unavailable()))
    from tests import emulator
    from tests.emulator.tests.test_sm90_backward import check, gradients

    case = next(case for case in tune_sm90_backward.cases() if case.head_dim == head_dim)
    options = {"length": 300, "head_dim": head_dim}
    for way in tune_sm90_backward.ways(case):
        with (emulator.hopper_gpu() as gpu, tune_sm90_backward.forced(way),
              mock.patch.object(sm90_backward, "launch_dkv", side_effect=sm90_backward.launch_dkv) as launch):
            with mock.patch.object(gpu, "load", side_effect=gpu.load) as load:
                check(gradients("emulator", **options), **options)
            portable = way.portable or way.portable_keys
            assert launch.called is not portable
            if not way.one_pass:
                entries = {call.args[0].source for call in load.call_args_list}
                assert ("sm90/backward_dq.cu" in entries) is not way.portable
            if not portable:
                config = next(call.args[0] for call in load.call_args_list if call.args[1] == "backward_dkv")
                assert (config.dquery, config.block_q) == (way.one_pass, way.block_q or 64)
