"""transformers' own tests of Doge, Llama and Qwen3, unmodified, with ``cupy_dma`` in place of its sdpa.

    python -m tests.transformers.upstream                    # lists passes, failures and reasons python -m
    tests.transformers.upstream --select batching  # more arguments go to pytest

The source distribution of the installed version holds the tests that all models share (``test_modeling_common.py``),
which this downloads and runs on small random models; they need the package ``parameterized``. Those of single models,
of generation and of export are not in it. "sdpa", and no choice at all, become ``cupy_dma``: so ``eager_matches_sdpa``
compares eager attention with ours. Exits with 1 if anything fails but what ``EXPECTED`` names.
"""
import argparse
import subprocess
import sys
import tarfile
import tempfile
import types
import unittest
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import cupy_dma.transformers as dmt
from tests.transformers import small_models as small

# Expected failures, by substring of the test name, with the reason.
EXPECTED = {
    "test_can_set_attention_dynamically": "asserts that the implementation asked for is called sdpa",
    "test_sdpa_can_dispatch_non_composite_models": "asserts that the implementation by default is called sdpa",
    "DogeTest.test_output_router_logits_from_config": "asks a mixture of experts, which this small model has not",
    "DogeTest.test_tp_plan_matches_params": "Doge's plan names its mixture of experts, which this small model has not",
}
MODELS = {"Doge": "doge", "Llama": "llama", "Qwen3": "qwen3"}


def source_distribution(folder: Path) -> Path:
    """Its unpacked tests."""
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:",
                    "--no-build-isolation", "--dest", folder, f"transformers=={transformers.__version__}"], check=True)
    archive, = folder.glob("transformers-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz") / "tests"


def load_common(tests: Path) -> None:
    """Imports ``test_modeling_common`` of the source distribution, which imports two modules that are not in it."""
    def module(name: str, **contents: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        made.__dict__.update(contents)
        sys.modules[name] = made
        return made

    module("upstream_tests", __path__=[str(tests)])
    for name, mixin in (("exporters.test_export", "ExportTesterMixin"), ("generation.test_utils",
                                                                         "GenerationTesterMixin")):
        module(f"upstream_tests.{name.partition('.')[0]}", __path__=[])
        module(f"upstream_tests.{name}", **{mixin: type(mixin, (), {})})
    import_module("upstream_tests.test_modeling_common")


def choose_ours() -> None:
    """Wherever a model would use sdpa, it uses ``cupy_dma``."""
    dmt.register()
    original = PreTrainedModel.get_correct_attn_implementation

    def chosen(self: Any, requested: str | None, *args: Any, **kwargs: Any) -> str:
        return original(self, small_name if requested in (None, "sdpa") else requested, *args, **kwargs)

    small_name = "cupy_dma"
    PreTrainedModel.get_correct_attn_implementation = chosen


class Tester:
    """The interface that the shared tests expect of a model's tester: a small configuration, and inputs."""

    is_training, batch_size, seq_length = True, 5, 13
    num_hidden_layers, num_attention_heads, hidden_size = 2, 4, 64

    def __init__(self, parent: unittest.TestCase, name: str):
        self.parent, self.name = parent, name

    def get_config(self) -> Any:
        return small.config_of(self.name, keep_window_size=6) if self.name == "doge" else small.config_of(self.name)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        ids = torch.randint(3, small.VOCABULARY, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def model_classes(common: Any) -> dict[str, type]:
    def setup(name: str) -> Any:
        def setUp(self: Any) -> None:
            self.model_tester = Tester(self, name)
            self.config_tester = None
        return setUp

    found = {}
    for title, name in MODELS.items():
        kinds = tuple(getattr(transformers, f"{title}{part}") for part in ("Model", "ForCausalLM"))
        found[f"{title}Test"] = type(f"{title}Test", (common.ModelTesterMixin, unittest.TestCase), {
            "setUp": setup(name), "all_model_classes": kinds, "all_generative_model_classes": (),
            "pipeline_model_mapping": {}, "__module__": __name__})
    return found


class Record:
    """A pytest plugin that records the outcome of each test. A test fails if one of its subtests does; these are
    reported before the test itself."""

    def __init__(self) -> None:
        self.outcomes: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.partition("::")[2].replace("::", ".")
        failed = self.outcomes.get(name, ("", ""))[0] == "failed"
        if not failed and (report.when == "call" or report.outcome != "passed"):
            why = report.longrepr[2] if report.skipped else report.longreprtext.strip().splitlines()[-1:]
            self.outcomes[name] = report.outcome, (why if isinstance(why, str) else "".join(why))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--select", default="", help="pytest's -k")
    options, others = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        load_common(source_distribution(Path(folder)))
        choose_ours()
        record = Record()
        pytest.main([__file__, "-q", "-p", "no:cacheprovider", "--override-ini", "python_files=upstream.py",
                     "-W", "default", "-k", options.select, *others], plugins=[record])
    failed = 0
    for name, (outcome, why) in sorted(record.outcomes.items()):
        reason = next((reason for part, reason in EXPECTED.items() if part in name), None)
        if outcome == "failed":
            failed += reason is None
            print(f"{'expected' if reason else 'FAILED'}: {name}: {reason or why}")
        elif outcome == "skipped":
            print(f"not run: {name}: {why}")
        else:
            print(f"passed: {name}")
    print(Counter(outcome for outcome, _ in record.outcomes.values()))
    return 1 if failed or not record.outcomes else 0


if "upstream_tests.test_modeling_common" in sys.modules:  # imported by pytest, which main has called
    globals().update(model_classes(sys.modules["upstream_tests.test_modeling_common"]))

if __name__ == "__main__":
    sys.exit(main())
