"""Training on a GPU: whole steps in CUDA graphs, compiled ones too, checkpoints, and docs/training.md."""
import copy

import pytest

import cupy_dma as dma

torch = pytest.importorskip("torch")

from cupy_dma.torch import DynamicMaskSelfAttention  # noqa: E402
from tests.oracle.torch_inputs import same  # noqa: E402
from tests.project.pages import run_page  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("uncollected")]
BATCH, N, WIDTH = 2, 300, 256


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layers(count=2, **options):
    made = [DynamicMaskSelfAttention(WIDTH, 4, 2, 50, qk_norm=True, device="cuda", **options) for _ in range(count)]
    for layer in made:
        torch.nn.init.normal_(layer.attention.A, std=0.3)
    return torch.nn.Sequential(*made)


def loss_of(model, x):
    return model(x).float().square().mean()


def gradients(model, x):
    return torch.autograd.grad(loss_of(model, x), list(model.parameters()))


def close(found, expected):
    """Equal within the roundings of different kernels around the same attention."""
    for a, b in zip(found, expected):
        assert (a - b).norm() <= 0.05 * b.norm() + 1e-6


def test_reduce_overhead():
    """torch.compile's CUDA graphs around the operators give the bits of the eager call in every replay."""
    shapes = (BATCH, N, 4, 64), (BATCH, N, 2, 64), (BATCH, N, 2, 64)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    inputs.append(torch.randn(BATCH, 2, N, device="cuda").requires_grad_())
    dout = torch.randn_like(inputs[0])

    def call(q, k, v, s):
        return dma.dynamic_mask_attention(q, k, v, s, window=50, deterministic=True)

    compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        expected = torch.autograd.grad(call(*inputs), inputs, dout)
        torch.compiler.cudagraph_mark_step_begin()
        found = [x.clone() for x in torch.autograd.grad(compiled(*inputs), inputs, dout)]
        assert same(expected, found)
        with torch.no_grad():
            for x in inputs:  # the next replay has other numbers, at the same addresses
                x.copy_(x.roll(1, 1))


def test_reduce_overhead_of_layers():
    """Three training steps; the window keeps every key, because rounded scores may rank keys differently."""
    model, x = layers(), torch.randn(BATCH, 40, WIDTH, device="cuda")
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        close([y.clone() for y in gradients(compiled, x)], gradients(model, x))
        x = torch.randn_like(x)


def test_graphed_callables_of_a_block():
    model, x = layers(1), torch.randn(BATCH, N, WIDTH, device="cuda", requires_grad=True)
    expected = torch.autograd.grad(model(x).square().mean(), (x, *model.parameters()))
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(model), (x.detach().clone().requires_grad_(),))
    for _ in range(3):
        found = torch.autograd.grad(graphed(x).square().mean(), (x, *graphed.parameters()))
        close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_whole_step_in_one_graph(dtype):
    """Forward, backward and AdamW in one graph give the losses of eager steps on the same batches."""
    batches = torch.randn(8, BATCH, N, WIDTH, device="cuda", dtype=dtype)
    eager = layers(dtype=dtype)
    graphed = copy.deepcopy(eager)

    def stepping(model, x):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)

        def step():
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model, x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def losses(step, x, of):
        for batch in of:
            x.copy_(batch)
            yield step().item()

    x = batches[0].clone()
    expected = list(losses(stepping(eager, x), x, batches))
    static = batches[0].clone()
    step, side = stepping(graphed, static), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = list(losses(step, static, batches[:3]))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    found += losses(lambda: graph.replay() or loss, static, batches[3:])
    assert expected[-1] < expected[0]
    assert found == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("how", ["attention", "block"])
def test_checkpoints(how):
    """Recomputation selects the same keys, so bits are equal except for sums of matrix products."""
    from torch.utils.checkpoint import checkpoint

    model, x = layers(), torch.randn(BATCH, N, WIDTH, device="cuda")
    expected = gradients(model, x)
    if how == "attention":
        for layer in model:
            layer.checkpoint = True
        close(gradients(model, x), expected)
    else:
        run = torch.nn.Module()
        run.model, run.forward = model, lambda x: checkpoint(model, x, use_reentrant=False)
        close(gradients(run, x), expected)


@pytest.mark.filterwarnings("ignore::UserWarning")  # NCCL warns about its devices
def test_the_documentation_runs():
    """Every Python block of docs/training.md: a captured step, and FSDP2 on one GPU."""
    names = run_page("training.md", gpu=True)
    assert names["static_loss"].isfinite()
    assert all(x.grad is not None for x in names["sharded"].parameters())
