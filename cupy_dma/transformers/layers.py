"""Which layers of a model have dynamic masks, as its configuration says.

All layers of Doge have one (``keep_window_size``). A converted model notes its layers under ``dynamic_mask``, which is
saved with its configuration, by policy::

    {"layers": [0, 1, ...], "window": 2048, "sinks": 0, "recent": 0, "form": "exp"}         or "scores": "input"
    {"layers": [0, 1, ...], "policy": "window", "window": 2048, "sinks": 4}
    {"layers": [0, 1, ...], "policy": "gate", "delay": 256, "threshold": -12.0, "sinks": 4, ...}     or a "capacity"

Budgets, ``window`` and ``capacity``, are kept in the form that ``budgets.py`` describes.
"""
from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cupy_dma.masks.windows import Window
from cupy_dma.transformers.budgets import budgets

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
    """The options of a layer's ``cupy_dma.torch.RetentionGate``, and how many open keys it keeps in evaluation."""

    delay: int
    threshold: float
    sinks: int
    temperature: float
    hidden: int | None = None
    capacity: Window | None = None

    @property
    def gate(self) -> dict[str, Any]:
        """The options of the gate."""
        return {name: value for name, value in asdict(self).items() if name != "capacity"}


def dynamic_layers(config: Any) -> dict[int, DynamicMask | GateMask]:
    """The layers with dynamic masks of a model with this configuration. Doge layers that are also sliding windows are
    left out: what they keep is not an interval mask."""
    if getattr(config, "model_type", None) == "doge":
        if config.sliding_window is not None:
            return {}
        return dict.fromkeys(range(config.num_hidden_layers), DynamicMask(config.keep_window_size))
    noted = getattr(config, KEY, None)
    if noted is None:
        return {}
    options: dict[str, Any] = {name: value for name, value in noted.items()
                               if name not in ("layers", "policy", "scores", "window", "capacity")}
    policy, layers = noted.get("policy"), noted["layers"]
    kind: Any = GateMask if policy == "gate" else DynamicMask
    if policy == "window" or "scores" in noted:
        options["form"] = "none" if policy == "window" else "input"
    name = "capacity" if policy == "gate" else "window"
    if name not in noted:
        return dict.fromkeys(layers, kind(**options))
    each = budgets(noted[name], f"config.{KEY}[{name!r}]", layers, [None] * len(layers))
    return {index: kind(**options, **{name: budget}) for index, budget in zip(layers, each)}


def gated_layers(config: Any) -> dict[int, GateMask]:
    """The gated ones among them: all or none."""
    return {index: how for index, how in dynamic_layers(config).items() if isinstance(how, GateMask)}
