"""The page for users of the original, and memory."""
import pytest

torch = pytest.importorskip("torch")

from cupy_dma.flash_dmattn import CUDA_AVAILABLE, flash_dmattn_func_auto  # noqa: E402
from tests.project.pages import run_page  # noqa: E402


def test_the_documentation_runs():
    names = run_page("coming_from_flash_dmattn.md", gpu=False)
    torch.testing.assert_close(names["out"], names["same"])


@pytest.mark.gpu
def test_memory():
    """The peak of a call under an interval mask grows with the length, not with its square."""
    if not CUDA_AVAILABLE:
        pytest.skip("needs the cuda backend")
    import cupy_dma as dma

    def peak(length):
        q = torch.randn(1, length, 2, 64, dtype=torch.bfloat16, device="cuda")
        scores = torch.randn(1, 2, length, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        flash_dmattn_func_auto()(q, q, q, attn_mask=dma.IntervalMask.top_w(scores, 256), attn_bias=scores)
        return torch.cuda.max_memory_allocated() - before

    assert peak(32768) < 6 * peak(8192)
