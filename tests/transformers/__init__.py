"""Tests of models of transformers, skipped without it."""
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
