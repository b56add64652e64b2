"""A retrofit on gloo ranks, each with its own rows, against one process with all rows: losses, gradients, training."""
import shutil

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from cupy_dma import retrofit  # noqa: E402
from tests.distributed import retrofit_jobs as jobs  # noqa: E402

CLOSE = {"rtol": 2e-4, "atol": 2e-6}  # float32


@pytest.mark.feature("numpy forward backward", "distributed", "retrofit, DDP and FSDP2")
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("trainable", ["gate", "all"])
def test_a_step(ranks, how, trainable):
    expected, gradients = jobs.step(None, "alone", trainable)
    assert expected.budget > 0.01 and 0.05 < expected.dropped < 0.95 and all(g.any() for g in gradients.values())
    for losses, found in ranks.run(2, jobs.step, how, trainable):
        torch.testing.assert_close(list(losses), list(expected), **CLOSE)
        assert found.keys() == gradients.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, gradients[name], **CLOSE, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_step_of_16_bits(ranks, how):
    """The gates of a 16-bit model, and their gradients, are float32."""
    expected, gradients = jobs.step(None, "alone", "gate", torch.bfloat16)
    for losses, found in ranks.run(2, jobs.step, how, "gate", torch.bfloat16):
        torch.testing.assert_close(list(losses), list(expected), rtol=0.02, atol=1e-3)
        assert found.keys() == gradients.keys() and {x.dtype for x in found.values()} == {torch.float32}
        for name, gradient in found.items():
            assert (gradient - gradients[name]).norm() < 0.05 * gradients[name].norm()


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_training(ranks, how):
    """Every rank has the logs and the final gates of one process."""
    logs, gates = jobs.trained(None, "alone", 3)
    for found, ours in ranks.run(2, jobs.trained, how, 3):
        assert [log.keys() for log in found] == [log.keys() for log in logs]
        for log, expected in zip(found, logs):
            for name, value in log.items():
                assert value == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
        assert ours.keys() == gates.keys()
        for name, parameter in ours.items():
            torch.testing.assert_close(parameter, gates[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("trainable", ["gate", "all"])
def test_a_resumed_run_of_ranks(ranks, tmp_path, how, trainable):
    """A resumed run equals the uninterrupted one. Each rank's own noise continues. The file has whole tensors, so a run
    may resume under the other wrapper. FSDP runs on three ranks, with unequal shards; DDP does not, because it changes
    its buckets after the first step, and a sum over three ranks would then round differently."""
    world = 3 if how == "fsdp" else 2
    expected = ranks.run(world, jobs.with_noise, str(tmp_path / "whole"), how, trainable, 4, 4)
    half = ranks.run(world, jobs.with_noise, str(tmp_path / "half"), how, trainable, 2, 4)
    shutil.copy(tmp_path / "half", tmp_path / "other")
    rest = ranks.run(world, jobs.with_noise, str(tmp_path / "half"), how, trainable, 4, 4, 2)
    assert [log["loss"] for log in expected[0][0]] == [log["loss"] for log in expected[-1][0]]
    for (logs, model), (begun, _), (found, ours) in zip(expected, half, rest):
        assert begun == logs[:2] and found == logs
        assert ours.keys() == model.keys() and all(torch.equal(x, model[name]) for name, x in ours.items())
        assert all(torch.equal(x, expected[0][1][name]) for name, x in model.items())
    saved = torch.load(tmp_path / "half", weights_only=True)
    assert all(torch.equal(x, model[name]) for name, x in saved["parameters"].items())
    before = dict(jobs.model_of(trainable)[0].named_parameters())
    changed = {name for name, x in model.items() if not torch.equal(x, before[name])}
    trained = {name for name in before if trainable == "all" or ".retention_gate." in name}
    assert changed == set(saved["parameters"]) == trained
    assert not list(tmp_path.glob("*.new"))

    other = {"ddp": "fsdp", "fsdp": "ddp"}[how]
    for logs, ours in ranks.run(world, jobs.with_noise, str(tmp_path / "other"), other, trainable, 4, 4, 2):
        assert [log["loss"] for log in logs] == pytest.approx([log["loss"] for log in expected[0][0]], rel=1e-5)
        for name, x in ours.items():
            torch.testing.assert_close(x, model[name], rtol=0, atol=1e-5, msg=lambda text, name=name: name + text)


def test_a_checkpoint_that_cannot_be_written(ranks, tmp_path):
    """All ranks stop and report the reason."""
    (tmp_path / "state.new").mkdir()
    first, second = ranks.outcomes(2, jobs.with_noise, str(tmp_path / "state"), "ddp", "gate", 1, 1)
    assert isinstance(first, (OSError, RuntimeError)) and "Is a directory" in str(first)
    assert isinstance(second, RuntimeError) and str(first) in str(second)
    assert "the first rank could not write the checkpoint" in str(second)


def test_a_checkpoint_is_of_all_ranks(ranks, tmp_path):
    ranks.run(2, jobs.with_noise, str(tmp_path / "0"), "ddp", "gate", 1, 1)
    for error in ranks.outcomes(2, jobs.checkpoint_of_one, str(tmp_path)):
        assert isinstance(error, FileNotFoundError) and "but ranks [1] do not find it" in str(error)
    for error in ranks.outcomes(2, jobs.checkpoint_of_one, ""):
        assert isinstance(error, ValueError) and "of a sharded model needs a process_group, got None" in str(error)
    model, _ = jobs.model_of("gate")
    with pytest.raises(ValueError, match="was made with ranks=2, got 1"):
        retrofit.train(model, [], steps=1, ratio=3, checkpoint=tmp_path / "0", resume=True, progress=False)
