"""Which layers of a model have dynamic masks, as its configuration says.

All layers of Doge have one (``keep_window_size``). A converted model notes its layers under ``dynamic_mask``, which is
saved with its configuration, by policy::

    {"layers": [0, 1, ...], "window": 2048, "sinks": 0, "recent": 0, "form": "exp"}         or "scores": "input"
    {"layers": [0, 1, ...], "policy": "window", "window": 2048, "sinks": 4}
    {"layers": [0, 1, ...], "policy": "gate", "delay": 256, "threshold": -12.0, "sinks": 4, ...}
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupy_dma.masks.windows import Window

NAME = "cupy_dma"  # of the attention implementation
KEY = "dynamic_mask"  # of a converted model's note in its configuration
GATE = "retention_gate"  # of the gate in a converted attention module
SCORES = "score_proj"  # of the projection of its input to scores


@dataclass(frozen=True)
class DynamicMask:
    """How a layer selects by scores; see ``cupy_dma.torch.DynamicMaskAttention``. The form ``"none"`` keeps the last
    ``window`` keys, without scores; ``"input"`` stands for scores of the layer's input."""

    window: Window
    sinks: int = 0
    recent: int = 0
    form: str = "exp"


@dataclass(frozen=True)
class GateMask:
    """The options of a layer's ``cupy_dma.torch.RetentionGate``."""

    delay: int
    threshold: float
    sinks: int
    temperature: float
    hidden: int | None = None


def dynamic_layers(config: Any) -> dict[int, DynamicMask | GateMask]:
    """The layers with dynamic masks of a model with this configuration. Doge layers that are also sliding windows are
    left out: what they keep is not an interval mask."""
    how: DynamicMask | GateMask
    if getattr(config, "model_type", None) == "doge":
        if config.sliding_window is not None:
            return {}
        how = DynamicMask(config.keep_window_size)
        return dict.fromkeys(range(config.num_hidden_layers), how)
    noted = getattr(config, KEY, None)
    if noted is None:
        return {}
    policy = noted.get("policy")
    options: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value  # JSON has no tuples
                               for name, value in noted.items() if name not in ("layers", "policy")}
    if policy == "gate":
        how = GateMask(**options)
    elif policy == "window":
        how = DynamicMask(**options, form="none")
    elif "scores" in options:
        how = DynamicMask(**{name: x for name, x in options.items() if name != "scores"}, form="input")
    else:
        how = DynamicMask(**options)
    return dict.fromkeys(noted["layers"], how)


def gated_layers(config: Any) -> list[int]:
    """The gated ones among them: all or none."""
    return [index for index, how in dynamic_layers(config).items() if isinstance(how, GateMask)]
