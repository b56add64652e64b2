"""Training with the layers: checkpoints that keep the selection, several processes, docs/training.md."""
import copy
import gc
import sys
from functools import partial
from types import ModuleType

import pytest
import torch

import cupy_dma as dma
from cupy_dma.backends import numpy as numpy_backend
from cupy_dma.torch import DynamicMaskAttention, DynamicMaskSelfAttention
from cupy_dma.torch.capture import uncollected
from tests.oracle.torch_inputs import same
from tests.project.pages import run_page

pytestmark = pytest.mark.usefixtures("same_numbers")
WIDTH, N = 24, 18
needs_distributed = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no torch.distributed")


def layers(count=2, **options):
    made = [DynamicMaskSelfAttention(WIDTH, 4, 2, 5, qk_norm=True, **options) for _ in range(count)]
    for layer in made:
        torch.nn.init.normal_(layer.attention.A)
    return torch.nn.Sequential(*made)


def gradients(model, x):
    """Gradients of the mean of squares, gathered if they are sharded."""
    model.zero_grad()
    model(x).square().mean().backward()
    found = [y.grad for y in model.parameters()]
    assert all(y is not None for y in found)
    return [y.full_tensor() if hasattr(y, "full_tensor") else y.clone() for y in found]


# ---- checkpoints ----
@pytest.fixture
def computed(monkeypatch):
    """The names of the backend functions, in the order of their calls."""
    names = []

    def watched(name, real):
        return lambda *arguments: names.append(name) or real(*arguments)

    for name in ("key_scores", "prefix_stop", "attention"):
        monkeypatch.setattr(numpy_backend, name, watched(name, getattr(numpy_backend, name)))
    return names


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_during_a_capture(enabled):
    """The collector's state is restored afterwards, also after an error."""
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ZeroDivisionError), uncollected():
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_checkpointing_computes_everything_twice(computed):
    model, x = layers(1), torch.randn(2, N, WIDTH)
    plain = gradients(model, x)
    assert computed == ["key_scores", "prefix_stop", "attention"]
    model[0].checkpoint = True
    computed.clear()
    assert same(plain, gradients(model, x))
    assert computed == 2 * ["key_scores", "prefix_stop", "attention"]


# ---- several processes ----
@pytest.fixture
def group():
    """A process group of this process alone."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed
    torch.compiler.reset()
    gc.collect()  # a DistributedDataParallel that is freed after its gloo group can deadlock
    distributed.destroy_process_group()


@needs_distributed
@pytest.mark.parametrize("how", ["plain", "checkpoint", "compile", "A = 0"])
def test_distributed_data_parallel(group, how):
    """The same gradients, and every parameter has one, even dt_proj with A = 0."""
    from torch.nn.parallel import DistributedDataParallel

    model, x = layers(checkpoint=how == "checkpoint"), torch.randn(2, N, WIDTH)
    if how == "A = 0":
        for layer in model:
            torch.nn.init.zeros_(layer.attention.A)
    plain, parallel = gradients(model, x), DistributedDataParallel(copy.deepcopy(model))
    run = torch.compile(parallel, backend="aot_eager") if how == "compile" else parallel
    for _ in range(2):  # the second step sees the state that the first left in the reducer
        torch.testing.assert_close(plain, gradients(run, x), rtol=0, atol=1e-6 if how == "compile" else 0)


@needs_distributed
@pytest.mark.parametrize("how", ["plain", "checkpoint", "compile", "bfloat16"])
@pytest.mark.parametrize("backend", [None, "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_fully_sharded(group, how, backend):
    """FSDP2, layer by layer: the same gradients, and a step of the optimizer on sharded parameters."""
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("fully_shard needs torch 2.6")
    model, x = layers(checkpoint=how == "checkpoint", backend=backend), torch.randn(2, N, WIDTH)
    plain, sharded = gradients(model, x), copy.deepcopy(model)
    options = {"mesh": torch.distributed.init_device_mesh("cpu", (1,))}
    if how == "bfloat16":  # parameters are gathered in it, the gradients are float32
        plain = [y.float() for y in gradients(copy.deepcopy(model).bfloat16(), x.bfloat16())]
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in sharded:
        if how == "compile":
            layer.compile(fullgraph=True, backend="aot_eager")
        fsdp.fully_shard(layer, **options)
    fsdp.fully_shard(sharded, **options)
    found = gradients(sharded, x)
    for a, b in zip(plain, found):
        assert b.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    before = sharded[0].attention.A.full_tensor().clone()
    torch.optim.AdamW(sharded.parameters(), lr=0.1).step()
    assert not torch.equal(before, sharded[0].attention.A.full_tensor())


# ---- docs/training.md ----
@pytest.fixture
def page():
    if not torch.distributed.is_available():
        pytest.skip("torch has no torch.distributed")
    return run_page("training.md", gpu=False)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_documentation_runs(page, computed, monkeypatch, compiled):
    """Every Python block runs, and the page's checkpoint keeps the selection: the same gradients, without a second
    selection and a second attention."""
    module = ModuleType("training")  # the compiler looks the page's names up in their module
    module.__dict__.update(page)
    monkeypatch.setitem(sys.modules, "training", module)
    for block in page["model"].blocks:
        block.attention.checkpoint = False
    block, x = page["model"].blocks[0], torch.randn(2, 40, 64)
    plain, run = gradients(block, x), partial(page["selective"], block)
    run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    computed.clear()
    block.zero_grad()
    run(x).square().mean().backward()
    torch.testing.assert_close([y.grad for y in block.parameters()], plain, rtol=0, atol=1e-6)
    assert computed.count("prefix_stop") == computed.count("attention") == 1
    assert computed.count("key_scores") <= 2  # cheap, so it may be recomputed


def test_parameter_groups_of_the_page(page):
    model = page["Model"]()
    groups = page["groups"](model, 1e-3, 1e-2)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert [len(group["params"]) for group in groups][2] == 4 and groups[2]["lr"] == 1e-2
    assert [group["weight_decay"] for group in groups] == [0.1, 0, 0]


def test_counts_on_the_training_page(page):
    """The page's counts equal those from the dense mask; a sliding window keeps no older key."""
    model, ids = page["Model"](), torch.randint(256, (2, 60))
    for counted in page["kept_keys"](model, ids):
        assert counted["A"] == counted["old"] == 0 and counted["life"] == counted["longest"] == 16
    core = DynamicMaskAttention(1, 8, 6, form="linear")
    torch.nn.init.constant_(core.A, 3.0)

    class OneLayer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.core = core

        def forward(self, x):
            return self.core(x, x, x)

    x = torch.randn(1, 50, 1, 8)
    (counted,) = page["kept_keys"](OneLayer(), x)
    seen = dma.IntervalMask.top_w(core.scores(x).detach(), 6).to_dense(50)[0, 0]
    distance = torch.arange(50)[:, None] - torch.arange(50)
    assert counted["old"] == pytest.approx(float((seen & (distance >= 6)).sum() / seen.sum())) and counted["old"] > 0.2
    assert counted["longest"] == seen.sum(0).max() and counted["life"] == seen.sum(0).median()
