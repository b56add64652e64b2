"""``cupy_dma.explain``: the launches of a call on a described GPU."""
import re

import pytest

import cupy_dma as dma
from cupy_dma.__main__ import main
from cupy_dma.backends.cuda.attention import sm90_stored
from cupy_dma.backends.cuda.explain import DescribedDevice
from cupy_dma.backends.cuda.runtime.program import fresh

TRAINING = "B=1 H=16/8 N=8192 D=128 w=1024 backward"


def entries(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line.startswith("  ") and " threads, " in line]


def test_a_training_step():
    text = dma.explain(TRAINING)
    assert entries(text) == ["local_top", "filter_arrivals", "sweep_arrivals", "count_seen", "compact_seen",
                             "tile_lists", "attention_forward", "super_lists", "backward_preprocess", "backward_dkv",
                             "backward_dq_stored", "backward_reduce", "add_rows"]
    assert "sm90/forward.cu" in text and "block_m=192 block_n=64" in text and text.count("bytes besides") == 2


def test_other_gpus_take_the_portable_kernels():
    text = dma.explain(TRAINING, DescribedDevice("sm_80"))
    assert "sm80/forward.cu" in text and "sm90" not in text
    assert "not used: Hopper forward: no Hopper GPU" in text
    assert "not used: Hopper gradients of keys: no Hopper GPU" in text


def test_why_kernels_are_not_taken():
    with fresh(hopper=False):
        text = dma.explain("H=8/8 N=512 D=64 float16 backward")
    assert "not used: Hopper forward: Overrides.hopper is False" in text
    assert "not used: Hopper forward: float32 elements" in dma.explain("H=8 N=512 float32")
    assert "not used: few queries: the Hopper kernel is faster" in dma.explain("H=32/8 Lq=8 Lk=65536")
    assert entries(dma.explain("H=8/8 Lq=1 Lk=65536")) == ["flash_decode"]


@pytest.fixture
def memory(monkeypatch):
    """A function that sets ``CUPY_DMA_STORED_MIB``, which a process reads once."""
    def set_to(value: str) -> None:
        monkeypatch.setenv(sm90_stored.VARIABLE, value)
        sm90_stored.max_stored.cache_clear()

    yield set_to
    monkeypatch.undo()
    sm90_stored.max_stored.cache_clear()


def test_the_memory_of_stored_ds(memory):
    """The workspace respects this limit, apart from lists and sums."""
    shape, found = "B=1 H=16/8 N=32768 D=128 w=1024 backward", {}
    for value in ("", "4096", "512", "0"):
        memory(value)
        found[value] = dma.explain(shape)
    assert found[""] == found["4096"] and entries(found["0"]).count("backward_dq_stored") == 0
    assert "not used: stored dS: one super-tile needs more than CUPY_DMA_STORED_MIB=0" in found["0"]
    assert [entries(found[value]).count("backward_dq_stored") for value in ("4096", "512")] == [1, 4]
    bytes_of = {value: int(re.search(r"backward: ([\d,]+) bytes", text)[1].replace(",", ""))
                for value, text in found.items()}
    assert bytes_of["512"] < bytes_of["0"] + (513 << 20) < bytes_of["4096"]


@pytest.mark.parametrize("value", ["4 GiB", "-1", "1.5", "131073", "٣"])
def test_a_memory_that_cannot_be_read(value, memory):
    memory(value)
    with pytest.raises(ValueError, match=f"CUPY_DMA_STORED_MIB must be a whole number of MiB from 0.*got '{value}'"):
        dma.explain(TRAINING)


@pytest.mark.parametrize(("shape", "message"), [
    ("H=16/8 N=64 x=3", "got 'x=3'"), ("H=16/8 N=64 fp8", "got 'fp8'"), ("N=64", "must have heads"),
    ("H=16/8", "a length N="), ("H=3/2 N=64", "a multiple of the kv heads"), ("H=2 N=0", "at least 1"),
    ("H=2 N=64 D=300", "at most 256"), ("H=two N=64", "whole numbers")])
def test_shapes_that_cannot_be_read(shape, message):
    with pytest.raises(ValueError, match=message):
        dma.explain(shape)


def test_the_command(capsys):
    assert main(["info", "--explain", "H=4/2 N=300 D=64 w=20", "--arch", "sm_120"]) == 0
    assert "count_better" in capsys.readouterr().out
    with pytest.raises(ValueError, match="arch must be one of sm_80"):
        DescribedDevice("sm_70")
