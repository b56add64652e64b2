"""Tests of cupy_dma.torch, skipped without torch."""
import pytest

pytest.importorskip("torch")
