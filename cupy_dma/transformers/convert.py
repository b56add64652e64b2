"""Dynamic masks for any causal model of transformers.

All scores are equal while ``A = 0``, so with a window of at least the length the model is the function it was
(specification, section 15).
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from cupy_dma import checks
from cupy_dma.calls.scores import FORMS
from cupy_dma.masks.windows import window_of
from cupy_dma.transformers.converted import convert_modules
from cupy_dma.transformers.layers import KEY, dynamic_layers
from cupy_dma.transformers.registration import register
from cupy_dma.transformers.served import self_attention


def convert(model: PreTrainedModel, window: int | Sequence[int], *, layers: Iterable[int] | None = None,
            sinks: int = 0, recent: int = 0, form: str = "exp") -> PreTrainedModel:
    """Give a model dynamic masks, in place.

    Parameters
    ----------
    model
        A causal model of transformers, e.g. of ``AutoModelForCausalLM``. Its attention implementation becomes
        ``"cupy_dma"``.
    window : int, or one int per kv head
        Keys kept per query and kv head, the highest-scored ones.
    layers : ints, optional
        Which layers to convert; by default all but those with a sliding window or chunks of their own.
    sinks, recent : int
        How many first and last tokens of each sequence are kept as well.
    form
        Of the scores; see ``cupy_dma.key_scores``. With ``"linear"`` scores are 0 at first, with ``"exp"`` 1.

    Returns
    -------
    The model. Each converted attention module has new parameters ``A (Hkv,)``, zeros, and ``dt_proj.weight
    (Hkv, Hkv * D)``, drawn as the model draws its own; ``config.dynamic_mask`` says which they are.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or value, or the model cannot have dynamic masks: it is converted already, is
        not causal, or has an attention that they do not fit. Nothing has been changed then.

    Notes
    -----
    ``save_pretrained`` and ``from_pretrained`` keep the masks, provided ``cupy_dma.transformers.register()`` has been
    called before ``from_pretrained``. While ``A = 0``, only ``A`` gets a gradient, not ``dt_proj``, and of the equal
    scores the newest win: the model sees the last ``window`` keys. One step of training ends that, and which keys are
    kept then has little to do with what the model needs, so give it ``recent`` keys, too, unless the window is long.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a PreTrainedModel of transformers, got {type(model).__name__}")
    config = model.config.get_text_config(decoder=True)
    if dynamic_layers(config) or getattr(config, "model_type", None) == "doge":
        raise ValueError(f"model has dynamic masks already: {type(model).__name__}")
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    how = {"window": window_of(window, heads), "sinks": checks.whole(sinks, "sinks", 0),
           "recent": checks.whole(recent, "recent", 0), "form": form}
    checks.choice(form, "form", FORMS)
    found = self_attention(model)
    noted = {"layers": _chosen(layers, found, config), **how}
    register()
    setattr(config, KEY, noted)
    convert_modules(model)
    return model


def _chosen(layers: Iterable[int] | None, found: dict[int, nn.Module], config: Any) -> list[int]:
    """The layers to convert."""
    local = [index for index in sorted(found) if _is_local(config, index)]
    if layers is None:
        chosen = [index for index in sorted(found) if index not in local]
        if not chosen:
            raise ValueError("every layer of the model has a sliding window or chunks of its own, and the best keys of "
                             "such a mask are not an interval mask: set config.sliding_window to None to give it up")
        return chosen
    chosen = sorted({checks.whole(index, "layers", 0) for index in layers})
    unknown, wrong = [i for i in chosen if i not in found], [i for i in chosen if i in local]
    if not chosen or unknown:
        raise ValueError(f"layers must name some of the model's {sorted(found)}, got {chosen}")
    if wrong:
        raise ValueError(f"layers must not name those with a sliding window or chunks of their own, {local}, got "
                         f"{chosen}")
    return chosen


def _is_local(config: Any, index: int) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(word in kinds[index] for word in ("sliding", "chunked"))
    return any(getattr(config, name, None) is not None for name in ("sliding_window", "attention_chunk_size"))
