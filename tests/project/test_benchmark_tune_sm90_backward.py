"""The benchmark tune_sm90_backward without a GPU: its cases, and that each way is the one that calls take."""
from __future__ import annotations

from unittest import mock

import pytest

pytest.importorskip("torch")
build = pytest.importorskip("tests.emulator.build")
pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))

from benchmarks.routines import tune_sm90_backward as tune  # noqa: E402
from cupy_dma.backends.cuda.attention import sm90_backward  # noqa: E402
from tests import emulator  # noqa: E402
from tests.emulator.tests.test_sm90_backward import check, gradients  # noqa: E402


def test_cases():
    names = [case.name for case in tune.cases()]
    assert len(names) == len(set(names)) and len(names) > 15
    assert {len(tune.ways(case)) for case in tune.cases()} == {3, 4, 6}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_ways(head_dim):
    case = next(case for case in tune.cases() if case.head_dim == head_dim)
    options = {"length": 300, "head_dim": head_dim}
    for way in tune.ways(case):
        with (emulator.hopper_gpu() as gpu, tune.forced(way),
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


def test_bad_arguments(capsys):
    with pytest.raises(SystemExit):
        tune.main(["--case", "no such case"])
    assert "--case must be part of a case's name" in capsys.readouterr().err
