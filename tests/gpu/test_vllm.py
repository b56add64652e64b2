"""The attention layer of the vLLM plugin on CUDA tensors; vLLM itself has not been run on a GPU."""
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.vllm.conftest import plugin  # noqa: E402, F401
from tests.vllm.test_attention import in_turn  # noqa: E402
from tests.vllm.test_storage import HOW  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", HOW)
def test_requests_in_turn(plugin, name):  # noqa: F811
    """float16 rounds weights and results by 2**-11 each, of values below 8."""
    in_turn(plugin, HOW[name], torch.float16, "cuda", 2 * 8 * 2**-11)
