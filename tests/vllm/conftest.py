"""``cupy_dma.vllm`` with vLLM, or with stubs if it is not installed."""
import importlib.util
import warnings
from contextlib import nullcontext

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None


@pytest.fixture(scope="session")
def plugin():
    """``cupy_dma.vllm.attention``."""
    from tests.vllm import stubs  # which needs torch

    with warnings.catch_warnings(), nullcontext() if HAS_VLLM else stubs.installed():
        warnings.simplefilter("ignore")  # warnings of vLLM and its imports
        import cupy_dma.vllm.attention
        import cupy_dma.vllm.models

        return cupy_dma.vllm.attention
