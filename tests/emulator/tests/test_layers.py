"""``DynamicMaskAttention`` on the CUDA kernels, on the CPU emulator: its masks with sinks and recent keys, padded and
packed, and decoding."""
import pytest

torch = pytest.importorskip("torch")
from cupy_dma.torch import DynamicMaskAttention  # noqa: E402
from tests.oracle import layer_cases  # noqa: E402

pytestmark = pytest.mark.usefixtures("same_numbers")


@pytest.mark.feature("cuda forward backward", "torch", "DynamicMaskAttention:")
@pytest.mark.feature("cuda forward", "torch", "DynamicMaskAttention.extend")
@pytest.mark.parametrize("how", layer_cases.INPUTS)
@pytest.mark.parametrize("besides", layer_cases.BESIDES, ids=str)
def test_the_core(how, besides):
    sinks, recent = besides
    layer_cases.check_layer(DynamicMaskAttention(1, 16, 6, sinks=sinks, recent=recent, form="linear", softcap=5.0,
                                                 backend="emulator", dtype=torch.bfloat16), how)
