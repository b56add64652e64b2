from collections import Counter

import pytest


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """A stand-in for NVRTC with a disk cache of its own; counts how often each configuration was compiled."""
    from cupy_dma.backends.cuda.runtime import jit

    counts = Counter()

    def run_nvrtc(text, config, arch):
        counts[config] += 1
        return b"\x7fELF and so on", "Used 17 registers\n8 bytes stack frame, 3 bytes spill stores, 4 bytes spill loads"

    monkeypatch.setenv("CUPY_DMA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "nvrtc_version", lambda: (12, 9))
    monkeypatch.setattr(jit, "headers_digest", lambda: "headers")
    monkeypatch.setattr(jit, "_run_nvrtc", run_nvrtc)
    jit.compile.cache_clear()
    yield counts
    jit.compile.cache_clear()
