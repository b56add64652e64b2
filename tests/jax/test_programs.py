"""Programs built while a function is traced, run on the emulator and through buffers of a fake GPU."""
from types import SimpleNamespace

import numpy as np
import pytest

jax = pytest.importorskip("jax", minversion="0.9")

import jax.numpy as jnp  # noqa: E402

import cupy_dma.jax as dj  # noqa: E402
from cupy_dma.backends import numpy as numpy_backend  # noqa: E402
from cupy_dma.backends.cuda.runtime import program as cuda_program  # noqa: E402
from cupy_dma.jax import programs  # noqa: E402
from cupy_dma.jax.tasks import Task  # noqa: E402
from cupy_dma.masks.selection import selection_hints  # noqa: E402
from tests.emulator import BACKEND, build, hopper_gpu  # noqa: E402
from tests.jax import fake_gpu  # noqa: E402
from tests.jax.draws import HKV, B, N, draw, recipe, same  # noqa: E402

needs_emulator = pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))


@pytest.fixture(autouse=True)
def fresh():
    programs.program_of.cache_clear()
    yield
    programs.program_of.cache_clear()


@pytest.fixture
def made(monkeypatch):
    """The programs that a test makes, in order."""
    found, real = [], programs.Program.__init__

    def init(self, *arguments):
        real(self, *arguments)
        found.append(self)

    monkeypatch.setattr(programs.Program, "__init__", init)
    return found


@pytest.fixture
def direct(monkeypatch):
    """The names of operations that ran without a program."""
    found, real = [], programs.Program._fill_directly
    monkeypatch.setattr(programs.Program, "_fill_directly",
                        lambda self, *x: found.append(self.task.operation) or real(self, *x))
    return found


def close(found, expected):
    """Loss and gradients are equal up to float16."""
    assert np.isclose(found[0], expected[0], rtol=1e-3)
    for x, y in zip(found[1], expected[1]):
        np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32), rtol=0.02, atol=0.02)


# ---- on the emulator ----
@needs_emulator
def test_a_training_step_is_two_programs(made, direct):
    """With the CUDA kernels; the emulator checks that operands are never written, and that results and workspace are
    written before they are read."""
    q, k, v, _ = draw(dtype=jnp.float16)
    parameters = recipe()[:2]

    def loss(q, k, v, dt_proj, A, backend):
        out, lse = dj.dynamic_mask_attention(q, k, v, dt_proj=dt_proj, A=A, window=5, return_lse=True, backend=backend)
        return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(jnp.sin(lse))

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3, 4)), static_argnums=5)
    found = step(q, k, v, *parameters, "emulator")
    assert [(x.task.operation, x.built, x.workspace > 0) for x in made] == [
        ("dynamic", True, True), ("backward", True, True)]
    assert direct == []
    again = step(q, k, v, *parameters, "emulator")
    assert all(map(same, jax.tree.leaves(found), jax.tree.leaves(again))) and len(made) == 2
    close(found, step(q, k, v, *parameters, "numpy"))


@needs_emulator
def test_a_plan_has_the_bits_of_the_backend(made, direct):
    q, k, v, s = draw(dtype=jnp.float16)

    def run(q, k, v, s):
        scores = dj.key_scores(v, *recipe()[:2], backend="emulator")
        mask = dj.top_w(s, 5, backend="emulator", padding=jnp.arange(N)[None] > 2)
        return scores, mask, *dj.attention(q, k, v, mask=mask, bias=s, return_lse=True, backend="emulator")

    found = run(q, k, v, s)
    assert [x.built for x in made] == [True] * 3
    programs.program_of.cache_clear()
    with cuda_program.fresh():
        plain = run(q, k, v, s)
    assert [x.built for x in made[3:]] == [False] * 3 and direct == ["key_scores", "top_w", "attention"]
    assert all(map(same, jax.tree.leaves(found), jax.tree.leaves(plain)))


@needs_emulator
@pytest.mark.slow
def test_hopper_kernels_in_programs(made):
    """With TMA, whose descriptors also hold addresses."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 200, heads, 64)), jnp.float16) for heads in (2, 1, 1))
    s = jnp.asarray(rng.standard_normal((1, 1, 200)), jnp.float32)

    def step(backend):
        def loss(*x):
            return jnp.sum(dj.dynamic_mask_attention(*x, window=40, backend=backend).astype(jnp.float32) ** 2)

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(q, k, v, s)

    with hopper_gpu():
        found = step("emulator")
    assert [x.built for x in made] == [True, True]
    close(found, step("numpy"))


@needs_emulator
def test_documents_and_global_keys_are_in_programs(made, direct):
    q, k, v, s = draw(dtype=jnp.float16)
    ids = jnp.arange(B * N).reshape(B, N) // 9
    for options in ({"documents": [0, 9, N]}, {"keys": "global"}, {"documents": ids, "keys": "global"}):
        out = dj.dynamic_mask_attention(q, k, v, s, window=5, backend="emulator", **options)
        assert made[-1].built and direct == []
        expected = dj.dynamic_mask_attention(q, k, v, s, window=5, backend="numpy", **options)
        np.testing.assert_allclose(out.astype(jnp.float32), expected.astype(jnp.float32), atol=2e-3)
        direct.clear()


# ---- through the buffers of a GPU ----
FORWARD = Task("dynamic", None, options=(False, 0.3, 0.0, False), selection=(5, "prefix"),
               hints=selection_hints(5, N, "prefix", False, False))


def operands(dtype=jnp.float16):
    return dict(zip(("query", "key", "value", "bias"), map(np.asarray, draw(dtype=dtype))))


@needs_emulator
def test_a_plan_through_a_gpus_buffers(monkeypatch, direct):
    fake_gpu.install(monkeypatch, BACKEND)
    streams = []
    real = cuda_program.Program.run_at
    monkeypatch.setattr(cuda_program.Program, "run_at", lambda self, addresses, stream: (
        streams.append((self.device, stream)), real(self, addresses, stream)))
    program, found = fake_gpu.call(FORWARD, operands())
    assert program.built and direct == [] and streams == [(programs.Device("cuda", 0), fake_gpu.STREAM)]
    q, k, v, s = draw(dtype=jnp.float16)
    out, lse = dj.dynamic_mask_attention(q, k, v, s, window=5, scale=0.3, return_lse=True, backend="emulator")
    mask = dj.top_w(s, 5, backend="emulator")
    assert all(same(found[name], x) for name, x in (("out", out), ("lse", lse), ("start", mask.start),
                                                    ("stop", mask.stop)))


@needs_emulator
def test_a_plan_is_made_for_each_gpu(monkeypatch):
    fake_gpu.install(monkeypatch, BACKEND)
    program, found = fake_gpu.call(FORWARD, operands(), device=1)
    assert {device.index for device in program._programs} == {0, 1} and all(program._programs.values())
    assert same(found["out"], fake_gpu.call(FORWARD, operands())[1]["out"])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_without_a_plan_through_a_gpus_buffers(monkeypatch, direct, dtype):
    fake_gpu.install(monkeypatch, numpy_backend)
    program, found = fake_gpu.call(FORWARD, operands(dtype))
    assert not program.built and program.workspace == 0 and direct == ["dynamic"]
    q, k, v, s = draw(dtype=dtype)
    out, lse = dj.dynamic_mask_attention(q, k, v, s, window=5, scale=0.3, return_lse=True, backend="numpy")
    assert same(found["out"], out) and same(found["lse"], lse)


@needs_emulator
def test_odd_addresses_go_past_the_plan(monkeypatch, direct):
    fake_gpu.install(monkeypatch, BACKEND)
    program, found = fake_gpu.call(FORWARD, operands(), offset=8)
    assert program.built and direct == ["dynamic"]
    assert same(found["out"], fake_gpu.call(FORWARD, operands())[1]["out"])
    fake_gpu.install(monkeypatch, BACKEND, capturing=True)
    with pytest.raises(RuntimeError, match="a captured call needs operands at multiples of 16 bytes"):
        fake_gpu.call(FORWARD, operands(), offset=8)


def test_gradients_through_a_gpus_buffers(monkeypatch):
    q, k, v, s = draw()
    out, lse = dj.dynamic_mask_attention(q, k, v, s, window=5, return_lse=True)
    expected = jax.grad(lambda *x: jnp.sum(dj.dynamic_mask_attention(*x, window=5)), (0, 3))(q, k, v, s)
    mask = dj.top_w(s, 5)
    fake_gpu.install(monkeypatch, numpy_backend)
    task = Task("backward", None, options=(False, q.shape[3] ** -0.5, 0.0, False), hints=mask._hints,
                needs=("query", "bias"))
    arrays = {"dout": jnp.ones_like(out), "out": out, "lse": lse, "query": q, "key": k, "value": v, "bias": s,
              "start": mask.start, "stop": mask.stop}
    _, found = fake_gpu.call(task, {name: np.asarray(x) for name, x in arrays.items()})
    assert same(found["query"], expected[0]) and same(found["bias"], expected[1])


# ---- declarations to jax ----
def test_results_are_what_the_tasks_say():
    kinds = {"query": ((B, N, 4, 8), "bfloat16"), "value": ((B, N, HKV, 8), "bfloat16")}
    assert programs.results_of(FORWARD, {**kinds, "bias": ((B, HKV, N), "float32")}) == [
        ("out", kinds["query"]), ("lse", ((B, 4, N), "float32")), ("start", ((1, 1, N), "int32")),
        ("stop", ((B, HKV, N), "int32"))]
    assert programs.results_of(FORWARD._replace(selection=None), kinds)[2:] == [
        ("bias", ((B, HKV, N), "float32"))]


@pytest.mark.parametrize("built", [True, False])
def test_only_programs_may_be_captured(monkeypatch, built):
    told = []

    def buffer_callback(callback, results, *, command_buffer_compatible):
        told.append((len(results), command_buffer_compatible))
        return lambda *operands: [jnp.zeros(x.shape, x.dtype) for x in results]

    monkeypatch.setattr(programs, "buffer_callback", buffer_callback)
    program = SimpleNamespace(workspace=512), None
    monkeypatch.setattr(programs.Program, "_build_all", lambda self, for_gpu: {programs.CPU: program} if built else {})
    dj.dynamic_mask_attention(*draw(), window=5)
    assert told == [(5, True) if built else (4, False)]


def test_eager_calls_are_compiled_once(made, caplog):
    arguments, counts = draw(), []
    jax.clear_caches()
    for _ in range(3):
        caplog.clear()
        with jax.log_compiles():
            dj.dynamic_mask_attention(*arguments, window=5)
        compiled = [record.message for record in caplog.records if "XLA compilation of" in record.message]
        counts.append((len(made), sum("callback" in message for message in compiled), len(compiled)))
    assert counts[0][:2] == (1, 1) and counts[1:] == [(1, 0, 0)] * 2
