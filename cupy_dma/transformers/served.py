"""Which models ``attn_implementation="cupy_dma"`` and ``convert`` support.

Both checks run before anything changes, and name the reason. ``docs/transformers.md`` lists the answer for every causal
model of transformers; ``tests/transformers/test_every_model.py`` verifies the list.
"""
from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from cupy_dma.transformers.layers import NAME

MAX_HEAD_DIM = 256
_NO_INTERFACE = "it does not call the attention interface of transformers"
_TOWERS = ("vision_config", "audio_config")
# By configuration type: what the classes do not show.
_OTHER_MASKS = {"git": "its masks let text see images by a rule of their own",
                "gemma4_assistant": "it reads the keys of another model in reverse order",
                "gemma4_unified_assistant": "it reads the keys of another model in reverse order"}
_OTHER_CACHES = {"jetmoe": "its experts repeat the keys", "minimax": "it takes no cache but its own",
                 "mllama_text_model": "its cross-attention keeps keys in the same cache"}


def check_served(model: PreTrainedModel) -> None:
    """Raise ValueError if a model cannot run with ``attn_implementation="cupy_dma"``."""
    check_class(model)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if model.config.base_config_key not in _TOWERS and not any(part._can_set_attn_implementation() for part in parts):
        raise _unsupported(model, _NO_INTERFACE)
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind.endswith(("Indexer", "Compressor")):
            raise _unsupported(model, f"it selects keys for every query ({name}), which is not an interval mask")
        if "Attention" in kind and (getattr(module, "head_dim", None) or 0) > MAX_HEAD_DIM:
            raise _unsupported(model, f"it has a head dim above {MAX_HEAD_DIM} ({name}: {module.head_dim})")


def check_class(model: PreTrainedModel) -> None:
    """Raise ValueError if the model's class shows that it cannot; it may have no modules yet."""
    config = model.config
    is_whole = config.base_config_key not in _TOWERS and config.get_text_config(decoder=True) is config
    if is_whole and not config.is_encoder_decoder and not model._can_set_attn_implementation():
        raise _unsupported(model, _NO_INTERFACE)
    if config.model_type in _OTHER_MASKS:
        raise _unsupported(model, _OTHER_MASKS[config.model_type])


def _unsupported(model: PreTrainedModel, reason: str) -> ValueError:
    return ValueError(f"attn_implementation={NAME!r} does not support {type(model).__name__}: {reason}; use 'eager' or "
                      f"'sdpa'")


def self_attention(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The self-attention of each layer, by index, of a model that can have dynamic masks.

    Raises
    ------
    ValueError
        The model is not causal, has none, or has an attention that a dynamic mask does not fit.
    """
    check_served(model)
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)

    def refused(reason: str) -> ValueError:
        return ValueError(f"dynamic masks do not fit {name}: {reason}")

    if model.config.is_encoder_decoder:
        raise refused("it is an encoder and a decoder, and dynamic masks are for decoders alone")
    if config.model_type in _OTHER_CACHES:
        raise refused(_OTHER_CACHES[config.model_type])
    found: dict[int, nn.Module] = {}
    kinds = getattr(config, "layer_types", None) or []
    for path, module in _attention(model):
        kind: Any = type(module)
        index, given = module.layer_idx, inspect.signature(kind.forward).parameters
        if not getattr(module, "is_causal", True) and not getattr(config, "is_decoder", False) or \
                getattr(config, "is_causal", True) is False:
            raise refused(f"it is not causal ({path})")
        if index in found or index < 0 or any(each == "layer_idx" or each.endswith("_offset") for each in given):
            raise refused(f"one attention serves several layers, which would need scores of their own ({path})")
        if "position_bias=" in _source(kind):
            raise refused(f"it has a bias of every query and key ({path})")
        if kinds[index:] and "hybrid" in kinds[index]:
            raise refused(f"its layers keep a state beside their keys ({path})")
        found[index] = module
    if not found:
        raise ValueError(f"model must have attention modules with a layer_idx, got {name} without any")
    return found


def _attention(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The attention modules with a layer index that attend to their own input, through transformers' interface."""
    for path, module in model.named_modules():
        kind: Any = type(module)
        if type(getattr(module, "layer_idx", None)) is not int:
            continue
        crosses = "Cross" in kind.__name__ or getattr(module, "is_cross_attention", False) or any(
            word in path.rpartition(".")[2] for word in ("encoder", "encdec", "cross"))
        if not crosses and "ALL_ATTENTION_FUNCTIONS" in _source(kind):
            yield path, module


@functools.cache
def _source(kind: Any) -> str:
    """Of the classes that define the module, up to torch's."""
    found = []
    for each in kind.__mro__:
        if each is nn.Module:
            break
        try:
            found.append(inspect.getsource(each))
        except (OSError, TypeError):  # made at run time: a converted module's own class
            continue
    return "".join(found)
