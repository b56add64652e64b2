"""Tests of cupy_dma.retrofit, skipped without torch."""
import pytest

pytest.importorskip("torch")
