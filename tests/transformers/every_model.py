"""Runs every causal language model of transformers with ``attn_implementation="cupy_dma"`` and with ``convert``.

``python -m tests.transformers.every_model`` runs them and writes the table of docs/transformers.md, or only the rows of
given types; ``test_every_model.py`` compares. A model with wrong results raises AssertionError.
"""
import copy
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

import cupy_dma.transformers as dmt
from cupy_dma.torch import RetentionGate
from cupy_dma.transformers.layers import dynamic_layers
from tests.transformers.causal_models import tiny_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transformers.md"
BEGIN, END = "<!-- table:every-model -->", "<!-- /table:every-model -->"
NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
WORKS = "works"
VERSION = ".".join(transformers.__version__.split(".")[:2])
LENGTH, SMALL = 14, 3
# In a row without visible keys, eager attention gives the mean of all values, and BLT's patches mix it with real
# tokens.
PADDED_RIGHT = {"blt"}
WITHOUT_WINDOW = {"mistral"}  # all layers have a sliding window, if the configuration sets one


def outcome(name: str) -> tuple[str, str]:
    """The outcome of a type with the implementation and with ``convert``: ``WORKS``, or the reason for refusal."""
    dmt.register()
    try:
        model = tiny_model(name)
    except ImportError as error:
        needed = re.search(r"requires the (\w+) library", str(error))
        if needed is None:
            raise
        return f"not tested: needs {needed[1]}", "–"
    ids = torch.randint(3, 60, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    eager, before = copy.deepcopy(model), _state(model)
    try:
        model.set_attn_implementation("cupy_dma")
    except ValueError as error:
        for change in (lambda: model.set_attn_implementation("cupy_dma"), lambda: dmt.convert(model, LENGTH),
                       lambda: type(model)._from_config(copy.deepcopy(model.config), attn_implementation="cupy_dma")):
            with pytest.raises(ValueError) as caught:
                change()
            assert _reason(caught.value) == _reason(error)
        assert _same(_state(model), before)
        return _reason(error), "–"
    assert model.config.get_text_config(decoder=True)._attn_implementation == "cupy_dma"
    _check_implementation(model, eager, name, ids)
    if not any(hasattr(module, "num_key_value_groups") or "Attention" in type(module).__name__
               for module in model.modules()):
        return "works: no attention", "–"
    gated = copy.deepcopy(eager)
    found = _conversion(eager, name, ids)
    if name in WITHOUT_WINDOW:
        gated = tiny_model(name, sliding_window=None)
        without = _conversion(copy.deepcopy(gated), name, ids)
        found = "works with `sliding_window=None`" if without == WORKS else found
    _check_gates(gated, name, ids, found)
    return WORKS, found


def _check_implementation(model: Any, eager: Any, name: str, ids: Tensor) -> None:
    expected = _logits(eager, ids, use_cache=False)
    found = _logits(model, ids, use_cache=False)
    _close(found, expected, "logits")
    real = torch.ones_like(ids)
    real[0, LENGTH - 3:] = 0
    real = real if name in PADDED_RIGHT else real.flip(1)
    padded = [_logits(each, ids, use_cache=False, attention_mask=real)[real.bool()] for each in (model, eager)]
    _close(*padded, "logits with padding")
    _close(_logits(model, _other_last(ids), use_cache=False)[:, :-1], found[:, :-1], "logits before the last token")
    steps = _steps(eager, ids)
    if steps is not None:
        _close(_cached(model, ids, steps), _cached(eager, ids, steps), "logits with a cache")


def _conversion(model: Any, name: str, ids: Tensor) -> str:
    """Convert ``model``, which has eager attention, and check it."""
    expected, steps, before = _logits(model, ids, use_cache=False), _steps(model, ids), _state(model)
    try:
        dmt.convert(model, LENGTH)
    except ValueError as error:
        assert _same(_state(model), before)
        return _reason(error)
    _close(_logits(model, ids, use_cache=False), expected, "logits of the converted model")
    config = model.config.get_text_config(decoder=True)
    if steps is not None:
        cached = _cached(model, ids, steps, dmt.DynamicMaskCache(config))
        _close(cached, expected, "logits of the converted model with its cache")
    layers = config.dynamic_mask["layers"]
    config.dynamic_mask = {**config.dynamic_mask, "window": SMALL}
    for module in model.modules():
        if hasattr(module, "dynamic_mask"):
            module.dynamic_mask = dynamic_layers(config)[module.layer_idx]
    model.zero_grad()
    found = model(input_ids=ids, use_cache=False).logits
    found.square().sum().backward()
    gradients = [p.grad for key, p in model.named_parameters() if key.endswith(".A")]
    assert len(gradients) == len(layers) > 0
    assert all(g is not None and g.abs().max() > 0 for g in gradients), f"{name}: a dynamic mask without effect"
    assert (found - expected)[:, SMALL + 1:].abs().max() > 1e-3, f"{name}: a window without effect"
    other = _logits(model, _other_last(ids), use_cache=False)
    _close(other[:, :-1], found.detach()[:, :-1], "logits before the last token of the converted model")
    return WORKS


def _check_gates(model: Any, name: str, ids: Tensor, outcome: str) -> None:
    """``model``, which has eager attention, is converted with ``policy="gate"``: it is refused for the same reason, or
    works."""
    expected, steps, before = _logits(model, ids, use_cache=False), _steps(model, ids), _state(model)
    try:
        dmt.convert(model, policy="gate", delay=SMALL, sinks=1)
    except ValueError as error:
        assert _same(_state(model), before) and _reason(error) == outcome
        return
    assert outcome.startswith(WORKS)
    _close(_logits(model, ids, use_cache=False), expected, "logits with open gates")
    gates = [module for module in model.modules() if isinstance(module, RetentionGate)]
    config = model.config.get_text_config(decoder=True)
    assert len(gates) == len(config.dynamic_mask["layers"]) > 0
    torch.manual_seed(1)
    for gate in gates:
        torch.nn.init.normal_(gate.proj.weight, std=0.01)
        gate.offset = 0.1
    found = _logits(model, ids, use_cache=False)
    assert (found - expected)[:, SMALL + 1:].abs().max() > 1e-3, f"{name}: gates without effect"
    _close(_logits(model, _other_last(ids), use_cache=False)[:, :-1], found[:, :-1],
           "logits before the last token of the model with gates")
    if steps is not None:
        for cache in (dmt.FullGatedCache(config), dmt.GatedCache(config)):
            _close(_cached(model, ids, steps, cache), found, f"logits with gates and a {type(cache).__name__}")
    for gate in gates:
        gate.train()
    model(input_ids=ids, use_cache=False).logits.square().sum().backward()
    assert all(gate.proj.weight.grad.abs().max() > 0 for gate in gates), f"{name}: a gate without effect"


# ---- the parts ----
def _logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **options).logits


def _other_last(ids: Tensor) -> Tensor:
    return torch.cat([ids[:, :-1], (ids[:, -1:] + 7) % 57 + 3], 1)


def _close(found: Tensor, expected: Tensor, what: str) -> None:
    """Compare float32 results whose rounding depends on the shapes of a call."""
    off, size = (found - expected).abs().max().item(), max(expected.abs().max().item(), 1)
    assert off <= 5e-5 * size, f"{what} are off by {off:.3g}, the largest is {size:.3g}"


def _cached(model: Any, ids: Tensor, steps: Iterable[int], cache: Any = None) -> Tensor:
    """Logits token by token: ``steps`` tokens at a time."""
    found, begin = [], 0
    for count in steps:
        named = {} if cache is None else {dmt.cache_argument(model): cache}
        with torch.no_grad():
            out = model(input_ids=ids[:, begin:begin + count], use_cache=True, **named)
        cache = out.cache if "cache" in out else out.past_key_values
        found.append(out.logits)
        begin += count
    return torch.cat(found, 1)


def _steps(eager: Any, ids: Tensor) -> tuple[int, ...] | None:
    """Numbers of tokens per step for which transformers' own attention gives right results with this model's cache."""
    expected = _logits(eager, ids, use_cache=False)
    for steps in ((8, 5, 1), (11, 1, 1, 1)):
        try:
            _close(_cached(eager, ids, steps), expected, "")
            return steps
        except (AssertionError, AttributeError, RuntimeError, ValueError):  # a limit of transformers
            continue
    return None


def _state(model: Any) -> dict[str, Any]:
    weights = {key: x.clone() for key, x in model.state_dict().items()}
    return {"config": model.config.to_dict(), "implementation": model.config._attn_implementation,
            "classes": [type(module) for module in model.modules()], **weights}


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(x, b[key]) if isinstance(x, Tensor) else x == b[key] for key, x in a.items())


def _reason(error: ValueError) -> str:
    """An error's reason without the names of models and modules."""
    text = str(error)
    found = re.search(r"(?:does not support \w+|do not fit \w+): (.*?)(?:; use 'eager' or 'sdpa')?$", text)
    text = found[1] if found else re.split("[,:]", text)[0]
    return re.sub(r" \([^)]*\)", "", text)


def sources() -> Iterator[Path]:
    """The files of transformers that define the models."""
    folder = Path(transformers.__file__).parent / "models"
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        yield from (folder / kind.__module__.split(".")[2]).glob("modeling_*.py")


# ---- the table ----
def table(outcomes: dict[str, tuple[str, str]]) -> str:
    """The page's text between its markers."""
    types = defaultdict(list)
    for name, found in outcomes.items():
        types[found].append(name)
    rows = [f"| {', '.join(f'`{name}`' for name in names)} | {implementation} | {converted} |"
            for (implementation, converted), names in sorted(types.items(), key=lambda item: -len(item[1]))]
    return "\n".join([f"All {len(outcomes)} types of transformers {VERSION}, by `config.model_type`:", "",
                      '| type | `attn_implementation="cupy_dma"` | `convert` |', "|---|---|---|", *rows])


def recorded() -> tuple[str, dict[str, tuple[str, str]]]:
    """The version of transformers, and the outcome of each type, that the page shows."""
    shown = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    version = re.search(r"of transformers (\d+\.\d+)", shown)
    assert version is not None
    found = {}
    for row in shown.splitlines():
        if row.startswith("| `") and "`config" not in row and not row.startswith("| type"):
            names, implementation, converted = (cell.strip() for cell in row.strip("|").split(" | "))
            found.update((name, (implementation, converted)) for name in re.findall(r"`([^`]+)`", names))
    return version[1], found


def main(names: list[str]) -> None:
    torch.set_num_threads(1)  # the models are too small for more threads
    version, outcomes = recorded() if names else (VERSION, {})
    if version != VERSION:
        sys.exit(f"the table is of transformers {version}, not {VERSION}: find out about all types")
    for name in names or NAMES:
        outcomes[name] = outcome(name)
        print(name, *outcomes[name], sep=" | ", flush=True)
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(dict(sorted(outcomes.items())))}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main(sys.argv[1:])
