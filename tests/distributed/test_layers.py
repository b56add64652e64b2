"""Layers and models over gloo ranks against one process: losses, gradients of parameters, wrappers, decoding."""
import pytest

torch = pytest.importorskip("torch")

from cupy_dma.torch import DynamicMaskSelfAttention  # noqa: E402
from tests.distributed import layer_jobs as jobs  # noqa: E402
from tests.project.pages import run_page  # noqa: E402

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def alone(how, options):
    """Loss and gradients in one process, over whole sequences; documents are packed."""
    model, batch = jobs.made(**options)
    ids, targets, given = jobs.inputs(how, batch)
    if how == "documents":
        bounds = [0, 3, 17, 18, jobs.N]
        given = {"cu_seqlens": bounds + [jobs.N + x for x in bounds[1:]]}
        ids, targets = ids.flatten(), targets.flatten()
    total, count = jobs.losses(model, ids, targets, **given)
    loss = total / count
    loss.backward()
    return loss.detach(), jobs.named_gradients(model)


def same(found, expected):
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], **CLOSE)


@pytest.mark.feature("numpy forward backward", "distributed", "layers")
@pytest.mark.parametrize(("how", "world", "options"), [
    ("plain", 2, {}), ("plain", 3, {"sinks": 2, "recent": 3, "qk_norm": True, "bias": True, "dt_bias": True}),
    ("plain", 2, {"checkpoint": True}), ("plain", 4, {"form": "linear", "softcap": 2.0, "rope": None}),
    ("padding", 3, {"sinks": 2, "recent": 3}), ("documents", 3, {"sinks": 1, "recent": 2}), ("documents", 4, {}),
    ("plain", 3, {"scores": "input", "recent": 2}), ("padding", 2, {"scores": "input"}),
    ("padding", 3, {"bias_delay": 6, "window": (3, 7)}), ("documents", 2, {"bias_delay": 4}),
    ("padding", 3, {"slope": (0.3, -0.1)}), ("documents", 2, {"slope": 0.2, "recent": 2})],
    ids=str)
def test_training(ranks, how, world, options):
    loss, gradients = alone(how, options)
    for found in ranks.run(world, jobs.trained, how, options):
        torch.testing.assert_close(found[0], loss, **CLOSE)
        same(found[1], gradients)


@pytest.mark.feature("numpy forward backward", "distributed", "layers")
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_on_a_mesh_of_data_and_sequences(ranks, wrapper):
    _, gradients = alone("plain", {})
    for found in ranks.run(4, jobs.on_a_mesh, wrapper):
        same(found, gradients)


def test_torch_compile_breaks_the_graph_at_collectives_only(ranks):
    loss, gradients = alone("plain", {})
    found = ranks.run(2, jobs.compiled)
    for value, _, breaks in found:
        torch.testing.assert_close(value, loss, **CLOSE)
        assert breaks and all("disable" in reason for reason in breaks), breaks
    same({name: (x + found[1][1][name]) / 2 for name, x in found[0][1].items()}, gradients)


@pytest.mark.feature("numpy forward", "distributed", "fill_cache, prefill")
@pytest.mark.parametrize("how", ["plain", "padding", "input", "slope"])
@pytest.mark.parametrize("world", [2, 3])
def test_decoding_after_a_sharded_prompt(ranks, how, world):
    steps = 8
    layer, x, more, given = jobs.prompt(how)
    with torch.no_grad():
        cache = layer.make_cache(jobs.BATCH)
        expected = [layer(x, cache=cache, **given), *[layer(more[:, i:i + 1], cache=cache) for i in range(steps)]]
    found = ranks.run(world, jobs.generated, how, steps)
    torch.testing.assert_close(torch.cat([outs[0] for outs in found], 1), expected[0], **CLOSE)
    for outs in found:
        for a, b in zip(outs[1:], expected[1:]):
            torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize(("what", "message"), [("cu_seqlens", "cu_seqlens must be None with a process_group"),
                                               ("keys", "a process_group needs keys='prefix', got keys='global'")])
def test_what_a_group_excludes(ranks, what, message):
    for found in ranks.outcomes(2, jobs.refused, what):
        assert isinstance(found, ValueError) and message in str(found)


def test_what_needs_a_group():
    layer = DynamicMaskSelfAttention(16, 4, 2, 5)
    x = torch.randn(1, 6, 16)
    with pytest.raises(ValueError, match="documents need a process_group"):
        layer(x, documents=torch.zeros(1, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match="prefill needs a process_group"):
        layer.prefill(x, layer.make_cache(1))


@pytest.mark.parametrize("more", [[], pytest.param(["--compile"], marks=pytest.mark.slow)], ids=str)
def test_the_training_example(ranks, more):
    """examples/train.py --context-parallel has the losses of one process."""
    short = ["--device", "cpu", "--layers", "1", "--width", "32", "--batch", "2", "--length", "63", "--window", "16",
             "--steps", "6", "--pieces", "2", *more]
    losses, validation, _ = jobs.example(None, short)
    for rank, found in enumerate(ranks.run(2, jobs.example, short)):
        assert found[0] == pytest.approx(losses, rel=1e-4) and found[2] == (rank == 0)
        assert [x for _, x in found[1]] == pytest.approx([x for _, x in validation], rel=1e-4)


def test_the_training_example_needs_torchrun(capsys, monkeypatch):
    from examples import train

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        train.main(["--context-parallel"])
    assert "--context-parallel needs torchrun" in capsys.readouterr().err


def test_the_documentation_runs():
    """Every Python block of docs/distributed.md, in a process group of one."""
    if torch.distributed.is_initialized():
        pytest.skip("this process is in a process group already")
    found = run_page("distributed.md", gpu=False)
    assert found["out"].shape == (1, 80, 64) and found["cache"].length.tolist() == [81]
