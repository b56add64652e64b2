"""A retrofit on gloo ranks with rows of their own against one process with all rows: losses, gradients, training."""
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

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
    """Its gates, and their gradients, are float32."""
    expected, gradients = jobs.step(None, "alone", "gate", torch.bfloat16)
    for losses, found in ranks.run(2, jobs.step, how, "gate", torch.bfloat16):
        torch.testing.assert_close(list(losses), list(expected), rtol=0.02, atol=1e-3)
        assert found.keys() == gradients.keys() and {x.dtype for x in found.values()} == {torch.float32}
        for name, gradient in found.items():
            assert (gradient - gradients[name]).norm() < 0.05 * gradients[name].norm()


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_training(ranks, how):
    """Every rank logs what one process does, and ends with its gates."""
    logs, gates = jobs.trained(None, "alone", 3)
    for found, ours in ranks.run(2, jobs.trained, how, 3):
        assert [log.keys() for log in found] == [log.keys() for log in logs]
        for log, expected in zip(found, logs):
            for name, value in log.items():
                assert value == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
        assert ours.keys() == gates.keys()
        for name, parameter in ours.items():
            torch.testing.assert_close(parameter, gates[name], rtol=0, atol=1e-4)


def test_a_resumed_run_of_ranks(ranks, tmp_path):
    """Noise differs between ranks, and continues."""
    results = ranks.run(2, jobs.resumed, str(tmp_path), 4)
    for whole, half, rest in results:
        assert len(half[0]) == 2 and rest[0] == whole[0]
        assert all(torch.equal(a, b) for a, b in zip(rest[1:], whole[1:]))
    assert all(torch.equal(a, b) for a, b in zip(results[0][0][1:], results[1][0][1:]))
    from cupy_dma import retrofit

    model, _ = jobs.model_of("gate")
    with pytest.raises(ValueError, match="was made with ranks=2, got 1"):
        retrofit.train(model, [], steps=4, ratio=3, checkpoint=tmp_path / "whole", resume=True, progress=False)


def test_a_sharded_model_has_no_checkpoint(ranks, tmp_path):
    for error in ranks.outcomes(2, jobs.sharded_checkpoint, str(tmp_path)):
        assert isinstance(error, NotImplementedError) and "checkpoint must be None for a sharded model" in str(error)
