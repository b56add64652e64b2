"""Which layers of a model have dynamic masks, as its configuration says.

Doge's have them all (``keep_window_size``). A converted model notes them under ``dynamic_mask``, which is saved with
its configuration::

    {"layers": [0, 1, ...], "window": 2048, "sinks": 0, "recent": 0, "form": "exp"}
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupy_dma.masks.windows import Window

NAME = "cupy_dma"  # of the attention implementation
KEY = "dynamic_mask"  # of a converted model's note in its configuration


@dataclass(frozen=True)
class DynamicMask:
    """How a layer selects; see ``cupy_dma.torch.DynamicMaskAttention``."""

    window: Window
    sinks: int = 0
    recent: int = 0
    form: str = "exp"


def dynamic_layers(config: Any) -> dict[int, DynamicMask]:
    """The layers with dynamic masks of a model with this configuration. Doge's that are sliding windows, too, are left
    out: what they keep is not an interval mask."""
    if getattr(config, "model_type", None) == "doge":
        if config.sliding_window is not None:
            return {}
        return dict.fromkeys(range(config.num_hidden_layers), DynamicMask(config.keep_window_size))
    noted = getattr(config, KEY, None)
    if noted is None:
        return {}
    how: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value  # JSON has lists
                           for name, value in noted.items() if name != "layers"}
    return dict.fromkeys(noted["layers"], DynamicMask(**how))
