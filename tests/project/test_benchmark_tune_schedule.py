"""The benchmark tune_schedule in parts that need no GPU, and what it recorded: whether the library takes fast ways."""
import json

import numpy as np
import pytest

import cupy_dma as dma
from benchmarks.harness import folders
from benchmarks.routines import tune_schedule, tune_sm90
from cupy_dma.backends.cuda.attention import sm90_costs, sm90_schedule, sm90_tiles
from cupy_dma.backends.cuda.attention.sm90_schedule import Schedule
from cupy_dma.backends.cuda.attention.sm90_tiles import HopperTile, ScheduleKey


def test_the_library_takes_fast_ways():
    """Of the recorded calls, by the costs that it has: at most 1 % slower than the fastest way on average."""
    result = folders.read("schedule.json")
    lost = []
    for call in result["calls"]:
        facts = ScheduleKey(**call["facts"])
        tile = sm90_schedule.tile_shape(facts, 132)
        taken = tile, sm90_schedule.best_schedule(facts, tile, 132)._replace(rotation=0)  # of which there is no choice
        times = {(HopperTile(*row["tile"]), Schedule(*row["work"])): row["us"]
                 for row in call["rows"]}
        lost.append(times[taken] / min(times.values()) - 1)
    assert len(lost) > 200 and np.mean(lost) < 0.01 and max(lost) < 0.25


def test_costs_are_those_that_were_recorded():
    result = folders.read("schedule.json")
    costs = json.loads(sm90_costs.PATH.read_text())
    assert costs["device"] == result["device"]
    assert costs["tiles"] == [tune_schedule.fitted(tile) for tile in result["tiles"]]


def test_what_splits_take_is_fitted():
    """Times that are made up of three numbers give these."""
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
        facts = ScheduleKey(call.kind, call.head_dim, 2, 1, call.kv_heads, call.queries, call.length,
                      call.window or call.length, 0, False, call.window > 0, call.causal)
        for tile in sm90_tiles.tiles_of(call.kind, call.head_dim):
            assert next(sm90_schedule.candidates(facts, tile, 132))


def test_the_kernels_of_all_tiles_are_compiled_first():
    found = tune_schedule.configs(["intervals", "contiguous"], [64])
    assert {(config.source, getattr(config, "split", None), getattr(config, "causal", None)) for config in found} == {
        ("sm90/combine.cu", None, None), *(("sm90/forward.cu", split, causal)
                                          for split in (False, True) for causal in (False, True))}


SHAPE = "H=4/2 N=1024 D=64 w=400"


def test_tiles_and_schedules_are_forced_and_given_back():
    before, schedule = dma.explain(SHAPE), Schedule(3, 3, 1, 0)
    with pytest.raises(ZeroDivisionError), tune_schedule.forced(HopperTile(128, 64, 6, 6, 3), schedule):
        text = dma.explain(SHAPE)
        assert "sm90/forward.cu              3 x 384 threads" in text and "block_m=128 block_n=64" in text
        _ = 1 / 0
    assert dma.explain(SHAPE) == before != text


def test_losses_are_those_of_what_is_taken():
    rows = [{"us": us, "taken": us == 12.0, "right": us != 15.0, "tile": [], "work": {}} for us in (15.0, 12.0, 10.0)]
    result = {"calls": [{"name": "call", "rows": rows}]}
    assert tune_schedule.losses(result) == [(pytest.approx(0.2), "call")]
    assert "20.00 % over" in tune_schedule.table(result) and "WRONG: call" in tune_schedule.table(result)
