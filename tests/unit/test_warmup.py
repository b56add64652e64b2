"""``warmup`` compiles the kernels that calls need, for any head dim, group and architecture."""
import itertools

import pytest

from cupy_dma.backends.cuda.decode import step
from cupy_dma.backends.cuda.runtime import jit, warmup
from tests.unit.test_jit import ARCHITECTURES, needs_compiler

DTYPES = ("float16", "bfloat16", "float32")


def test_shared_memory_of_each_architecture():
    assert {arch: warmup.shared_memory_limit(arch) // 1024 for arch in ARCHITECTURES} == ARCHITECTURES


@needs_compiler
def test_architectures_are_named_as_devices_are():
    found = jit.architectures()
    assert set(ARCHITECTURES) <= set(found)
    assert "sm_75" not in found and "sm_90" not in found


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_head_dim_has_its_tiles(arch):
    configs = [job.args[0] for _, job in warmup.jobs(arch, None, tuple(range(1, 257)), DTYPES, (1, 3, 8))]
    limit = warmup.shared_memory_limit(arch)
    assert {config.head_dim for config in configs if hasattr(config, "head_dim")} == set(range(1, 257))
    for config in configs:
        size = 4 if getattr(config, "element", "") == "float" else 2
        if getattr(config, "vector", False) or config.source.startswith("sm90/"):
            assert config.head_dim * size % 16 == 0, config  # as rows_aligned requires
        if config.source == "sm80/forward.cu":
            assert config.shared_bytes <= limit, config


@pytest.mark.parametrize(("head_dim", "group"), [
    *itertools.product((1, 64, 128, 256), (1, 7, 16, 17, 32, 100))])
def test_steps_are_those_of_the_cache(head_dim, group):
    for dtype in DTYPES:
        plan = step.split((1, 1, 64, head_dim), head_dim, group, dtype, 132, clusters=True)
        every = warmup.decode_configs((head_dim,), (dtype,), (group,), clusters=True)
        found = [config for config in every if isinstance(config, step.StepConfig)]
        assert len(every) == len(found) + 1
        assert {config.rows for config in found} == {plan.rows}
        assert len(found) == (2 if plan.sets == 1 else 1)


@needs_compiler
def test_large_groups_compile():
    for config in warmup.decode_configs((33, 256), ("bfloat16",), (32,)):
        assert jit.compile(config, "sm_80").registers > 0
