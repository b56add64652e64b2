"""Tests of cupy_dma.retrofit, skipped without transformers."""
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
