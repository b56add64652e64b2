"""jax on a GPU: correct results from the CUDA kernels, eager, jitted and in command buffers; streams and memory.
Everything here is marked ``gpu``, and skipped where jax sees no GPU."""
import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cupy_dma as dma

jax = pytest.importorskip("jax", minversion="0.9")

import jax.numpy as jnp  # noqa: E402

import cupy_dma.jax as dj  # noqa: E402
from cupy_dma.jax import programs  # noqa: E402
from tests.jax.draws import check_case, same  # noqa: E402
from tests.oracle import reference  # noqa: E402
from tests.oracle.cases import CASES  # noqa: E402

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
CHOSEN = ("float16-D64", "bfloat16-D128", "float32-D64", "heads-6/2-top_w", "lengths-0x5-top_w", "lengths-5x0-none",
          "lengths-33x129-top_w", "lengths-300x300-causal", "mask-none", "mask-global_documents", "mask-union",
          "mask-per_batch", "mask-dense_2d", "bias-full-top_w", "bias-key_per_head-top_w", "softcap-key",
          "dense-both-per_batch+dense=1gqk-bgqk")


@pytest.fixture(autouse=True)
def needs_a_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip(f"jax sees no GPU: its default backend is {jax.default_backend()}")


def draw(n=1000, heads=4, kv_heads=2, size=64, dtype=jnp.bfloat16, seed=0):
    """query, key, value, scores."""
    rng = np.random.default_rng(seed)
    rows = [jnp.asarray(rng.standard_normal((2, n, h, size)), dtype) for h in (heads, kv_heads, kv_heads)]
    return [*rows, jnp.asarray(rng.standard_normal((2, kv_heads, n)), jnp.float32)]


def parameters(kv_heads=2, size=64):
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.standard_normal((kv_heads, kv_heads * size)) / 11, jnp.float32), jnp.ones(kv_heads)]


def dynamic(q, k, v, s, **options):
    return dj.dynamic_mask_attention(q, k, v, s, window=50, softcap=5.0, **options)


def from_values(q, k, v, dt_proj, A, **options):
    return dj.dynamic_mask_attention(q, k, v, dt_proj=dt_proj, A=A, window=50, **options)


def loss(function):
    return lambda *x: jnp.sum(function(*x).astype(jnp.float32) ** 2)


def to_cupy(x):
    """A copy, bfloat16 included."""
    import cupy

    return cupy.asarray(np.asarray(x))


def uses_programs(function, *arguments):
    """Whether every task that a function needs has programs."""
    programs.program_of.cache_clear()
    made, real = [], programs.Program.__init__

    def init(self, *x):
        real(self, *x)
        made.append(self)

    programs.Program.__init__ = init
    try:
        jax.block_until_ready(jax.jit(lambda *x: function(*x))(*arguments))  # trace again
    finally:
        programs.Program.__init__ = real
    assert made
    return all(program.built for program in made)


@pytest.mark.feature("cuda forward backward", "jax", "attention")
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES if case.name in CHOSEN])
def test_grid(case):
    check_case(case, tf32=case.dtype == "float32")


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32], ids=["float16", "bfloat16", "float32"])
def test_cupy_has_the_same_bits(dtype):
    q, k, v, s = draw(dtype=dtype)
    out, lse = jax.jit(lambda *x: dj.dynamic_mask_attention(*x, window=50, return_lse=True))(q, k, v, s)
    expected = dma.dynamic_mask_attention(*map(to_cupy, (q, k, v, s)), window=50, return_lse=True)
    assert same(out, expected[0].get()) and same(lse, expected[1].get())
    mask, twin = jax.jit(lambda s: dj.top_w(s, 50))(s), dma.IntervalMask.top_w(to_cupy(s), 50)
    assert np.array_equal(mask.stop, twin.stop.get()) and np.array_equal(mask.start, twin.start.get())


@pytest.mark.feature("cuda forward backward", "jax", "dynamic_mask_attention", "checkpoint", "key_scores")
@pytest.mark.parametrize("function", [dynamic, from_values], ids=["scores", "values"])
def test_jit_is_eager_and_checkpoint(function):
    arguments = draw() if function is dynamic else [*draw()[:3], *parameters()]
    wanted = tuple(range(len(arguments)))
    function = functools.partial(function, deterministic=True)
    gradient = jax.grad(loss(function), wanted)
    assert same(function(*arguments), jax.jit(function)(*arguments))
    eager = gradient(*arguments)
    for _ in range(3):  # the third time with a command buffer, where XLA makes one
        assert all(map(same, eager, jax.jit(gradient)(*arguments)))
    assert all(map(same, eager, jax.jit(jax.grad(loss(jax.checkpoint(function)), wanted))(*arguments)))
    assert uses_programs(gradient, *arguments)


@pytest.mark.feature("cuda forward", "jax", "top_w, padding, documents")
def test_selection_is_the_definition():
    s = jnp.round(draw(n=300)[3] * 2) / 2
    padding = np.arange(300)[None] % 5 > 0
    for options in ({}, {"padding": padding}, {"keys": "global"}, {"documents": np.array([0, 100, 300], np.int32)}):
        seen = np.asarray(jax.jit(lambda s, o=options: dj.top_w(s, 20, **o).to_dense(300))(s))
        expected = reference.top_w_dense(np.asarray(s), 20, **options)
        causal = np.arange(300)[:, None] >= np.arange(300)
        assert np.array_equal(seen & causal, np.broadcast_to(expected & causal, seen.shape))


@pytest.mark.feature("cuda forward backward", "jax", "vmap")
def test_vmap_scan_and_donation():
    q, k, v, s = draw(n=300)
    stacked = [jnp.stack([x, x[::-1]]) for x in (q, k, v, s)]
    out = jax.jit(jax.vmap(dynamic))(*stacked)
    assert same(out[0], dynamic(q, k, v, s)) and same(out[1], dynamic(*(x[1] for x in stacked)))

    def layers(q, k, v, s):
        return jax.lax.scan(lambda x, _: (dynamic(x, k, v, s), None), q, None, length=3)[0]

    assert same(jax.jit(layers)(q, k, v, s), dynamic(dynamic(dynamic(q, k, v, s), k, v, s), k, v, s))
    expected = dynamic(q, k, v, s)
    for _ in range(5):
        copies = [jnp.array(x) for x in (q, k, v, s)]
        assert same(jax.jit(dynamic, donate_argnums=0)(*copies), expected)


def test_operands_that_are_slices():
    """XLA may pass a slice of an array without copying it, at any multiple of its rows."""
    q, k, v, s = draw(n=301, size=3, dtype=jnp.float16)

    @jax.jit
    def run(q, k, v, s):
        return [dj.dynamic_mask_attention(q[i:i + 1], k[i:i + 1], v[i:i + 1], s[i:i + 1], window=50) for i in (0, 1)]

    whole = dj.dynamic_mask_attention(q, k, v, s, window=50)
    np.testing.assert_allclose(np.concatenate(run(q, k, v, s)), whole, atol=2e-3)


def test_work_is_in_the_order_of_the_stream():
    """Inputs that are still being computed, results used immediately, and successive calls."""
    q, k, v, s = draw(n=4000)

    @jax.jit
    def chain(q, k, v, s):
        for _ in range(6):
            busy = jnp.tanh(q.astype(jnp.float32))
            for _ in range(20):
                busy = jnp.sin(busy) + 0.1 * busy
            q = dynamic(busy.astype(q.dtype), k, v, s) * 2
        return q

    first = chain(q, k, v, s)
    assert all(same(first, chain(q, k, v, s)) for _ in range(5))
    assert np.isfinite(np.asarray(first, np.float32)).all()


def test_without_plans_the_same(monkeypatch):
    arguments = draw()
    gradient = jax.grad(loss(functools.partial(dynamic, deterministic=True)), (0, 1, 2, 3))
    expected = jax.jit(gradient)(*arguments)
    monkeypatch.setenv("CUPY_DMA_CHECK", "1")
    programs.program_of.cache_clear()
    assert not uses_programs(gradient, *arguments)
    found = gradient(*arguments)
    monkeypatch.undo()
    programs.program_of.cache_clear()
    assert all(map(same, found, expected))


def test_documents_and_the_host_backend():
    q, k, v, s = draw(n=300, dtype=jnp.float16)
    for options in ({"documents": [0, 100, 300]}, {"keys": "global"}):
        out = jax.jit(lambda *x, o=options: dj.dynamic_mask_attention(*x, window=50, **o))(q, k, v, s)
        host = jax.jit(lambda *x, o=options: dj.dynamic_mask_attention(*x, window=50, backend="numpy", **o))(q, k, v, s)
        np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(host, np.float32), atol=4e-3)


def test_arrays_of_the_cpu_on_a_machine_with_a_gpu():
    q, k, v, s = draw(n=200, dtype=jnp.float32)
    with jax.default_device(jax.devices("cpu")[0]):
        ours = [jnp.asarray(np.asarray(x)) for x in (q, k, v, s)]
        out = jax.jit(dynamic)(*ours)
        assert out.device.platform == "cpu"
    committed = [jax.device_put(np.asarray(x), jax.devices("cpu")[0]) for x in (q, k, v, s)]
    assert same(out, jax.jit(dynamic)(*committed))  # trace for a GPU, run on the CPU
    np.testing.assert_allclose(np.asarray(out), np.asarray(dynamic(q, k, v, s)), atol=2e-2)


def test_errors():
    q, k, v, s = draw(n=64)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        jax.grad(lambda q: jnp.sum(jax.grad(loss(dynamic))(q, k, v, s).astype(jnp.float32)))(q)
    with jax.enable_x64(True), pytest.raises((TypeError, jax.errors.JaxRuntimeError), match="float64"):
        jax.block_until_ready(dynamic(*(x.astype(jnp.float64) for x in (q, k, v, s))))
    program = programs.program_of

    class Broken(programs.Program):
        def fill(self, *_):
            raise RuntimeError("the disk is full of keys")

    programs.program_of = lambda *x: Broken(*x)
    try:
        with pytest.raises(jax.errors.JaxRuntimeError, match="the disk is full of keys"):
            np.asarray(jax.jit(lambda *x: dynamic(*x))(q, k, v, s))  # trace again, for this call alone
    finally:
        programs.program_of = program
    assert np.isfinite(np.asarray(jax.jit(dynamic)(q, k, v, s), np.float32)).all()


@pytest.mark.feature("cuda", "jax", "command buffers")
@pytest.mark.parametrize("flags", ["--xla_gpu_enable_command_buffer=",
                                   "--xla_gpu_enable_command_buffer=+CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"],
                         ids=["without", "with"])
def test_command_buffers(flags):
    """In a process of its own: gradients of two layers, repeatedly with one input and then with another. XLA records a
    command buffer again if addresses change, and otherwise replays it without callbacks."""
    code = """
import jax, jax.numpy as jnp, numpy as np, cupy_dma.jax as dj
from cupy_dma.jax import programs
from tests.gpu.test_jax import draw, dynamic, loss
calls, real = [], programs.Program._fill
programs.Program._fill = lambda self, *x: calls.append(1) or real(self, *x)
gradient = jax.grad(loss(lambda q, k, v, s: dynamic(dynamic(q, k, v, s), k, v, s)), (0, 1, 2, 3))
step, inputs = jax.jit(gradient), [draw(seed=0), draw(seed=1)]
expected = [[np.asarray(x, np.float32) for x in gradient(*x)] for x in inputs]
calls.clear()
for i in range(16):
    found = [np.asarray(x, np.float32) for x in step(*inputs[i // 8])]
    for a, b in zip(found, expected[i // 8]):
        assert np.isfinite(a).all() and np.abs(a - b).max() <= 0.02 * np.abs(b).max(), (i, np.abs(a - b).max())
print("callbacks", len(calls))
"""
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    callbacks = int(done.stdout.split()[-1])
    print(f"{callbacks} callbacks for 16 steps of 4 ({flags})")
    if flags.endswith("="):
        assert callbacks == 64
    else:
        assert callbacks < 64


@pytest.mark.feature("cuda forward backward", "jax", "DynamicMaskAttention")
def test_the_layer_trains():
    nnx = pytest.importorskip("flax.nnx")
    import optax

    q, k, v, _ = draw(n=300)
    layer = dj.DynamicMaskAttention(2, 64, 50, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(layer, optax.adam(0.05), wrt=nnx.Param)
    target = from_values(q, k, v, *parameters())

    @nnx.jit
    def step(layer, optimizer):
        value, gradients = nnx.value_and_grad(lambda m: jnp.mean((m(q, k, v) - target).astype(jnp.float32) ** 2))(layer)
        optimizer.update(layer, gradients)
        return value

    losses = [float(step(layer, optimizer)) for _ in range(20)]
    assert losses[-1] < losses[0]


def test_scores_of_the_input_are_float32():
    """XLA's default on GPUs, TF32, would be off by 1e-2."""
    nnx = pytest.importorskip("flax.nnx")

    layer = dj.DynamicMaskAttention(2, 64, 50, scores="input", width=512, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    x, kernel = (rng.standard_normal(shape, np.float32) for shape in ((2, 300, 512), (512, 2)))
    layer.score_proj.kernel[...] = jnp.asarray(kernel)
    expected = (x.astype(float) @ kernel).swapaxes(1, 2)
    np.testing.assert_allclose(jax.jit(layer.scores)(jnp.asarray(x)), expected, rtol=0, atol=2e-4)
    q, k, v, _ = draw(n=300)
    gradients = nnx.grad(lambda m: jnp.sum(m(q, k, v, x=jnp.asarray(x)).astype(jnp.float32) ** 2))(layer)
    assert jnp.any(gradients["score_proj"]["kernel"][...])


@pytest.mark.feature("cuda forward backward", "jax", "shard_map")
def test_shard_map_over_all_gpus():
    from jax.sharding import PartitionSpec as P

    count = len(jax.devices())
    attend = functools.partial(from_values, deterministic=True)
    mesh = jax.make_mesh((count,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    q, k, v = (jnp.concatenate([x] * count) for x in draw()[:3])
    sharded = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(P("data"),) * 3 + (P(), P()),
                                    out_specs=P("data")))
    arguments = q, k, v, *parameters()
    assert same(sharded(*arguments), attend(*arguments))
    found = jax.jit(jax.grad(loss(sharded), (0, 3)))(*arguments)
    expected = jax.grad(loss(attend), (0, 3))(*arguments)
    assert same(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=2e-3, atol=2e-3 * float(jnp.abs(expected[1]).max()))
