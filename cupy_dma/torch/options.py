"""Options of layers: they may be changed later and are checked whenever they are set."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from cupy_dma import checks
from cupy_dma.masks.windows import window_of

Check = Callable[[Any, str], Any]


def at_least(minimum: int) -> Check:
    return lambda value, name: checks.whole(value, name, minimum)


def one_of(allowed: tuple[str, ...]) -> Check:
    def check(value: Any, name: str) -> Any:
        checks.choice(value, name, allowed)
        return value

    return check


def optional(check: Check) -> Check:
    return lambda value, name: None if value is None else check(value, name)


def backend_name(value: Any, name: str) -> Any:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} must be a str or None, got {type(value).__name__} {value!r}")
    return value


class Layer(nn.Module):
    """A module with checked options and a ``window``. Sizes of its parameters (``FIXED``) cannot be changed."""

    CHECKS: ClassVar[dict[str, Check]] = {}
    FIXED: ClassVar[tuple[str, ...]] = ()
    window: Any  # one int for all kv heads, or a tuple of one each

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "window":
            value = window_of(value, self.kv_heads)
        elif name in self.CHECKS:
            value = self.CHECKS[name](value, name)
            self.check_together(name, value)
        elif name in self.FIXED:
            raise AttributeError(f"{name} cannot be changed, because the layer's parameters depend on it: make another "
                                 f"layer")
        super().__setattr__(name, value)

    def check_together(self, name: str, value: Any) -> None:
        """ValueError if an option does not fit the others."""

    def _fix(self, **sizes: Any) -> None:
        """Set attributes that are ``FIXED``."""
        self.__dict__.update(sizes)


def of_core(name: str) -> Any:
    """The option ``name`` of ``self.attention``."""
    def change(self: Any, value: Any) -> None:
        setattr(self.attention, name, value)

    return property(lambda self: getattr(self.attention, name), change, doc="Of the core.")


def check_inputs(layer: Any, query: Any, key: Any, value: Any, packed: bool) -> None:
    """TypeError or ValueError for inputs whose shapes do not fit the layer; ``packed`` ones have no batch axis."""
    for tensor, name in ((key, "key"), (value, "value")):
        check_rows(layer, tensor, name, packed)
    if not isinstance(query, Tensor):
        raise TypeError(f"query must be a torch tensor, got {type(query).__name__}")
    heads = query.shape[-2] if query.ndim == 4 - packed else 0
    if not heads or heads % layer.kv_heads or query.shape[-1] != layer.head_dim:
        raise ValueError(f"query must have shape ({'total' if packed else 'B, Lq'}, H, {layer.head_dim}) with H a "
                         f"multiple of {layer.kv_heads}, got {tuple(query.shape)}: {_made(layer)}")


def check_x(layer: Any, x: Any, packed: bool, tokens: tuple[int, ...] | None = None) -> Tensor:
    """The input that scores are computed from. TypeError or ValueError if the layer takes none, or this does not fit;
    ``tokens``: its shape without ``width``."""
    if layer.width is None:
        raise ValueError("x needs scores='input', got x for a layer with scores='value'")
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a floating torch tensor, the layer's input, with scores='input', got "
                        f"{getattr(x, 'dtype', type(x).__name__)}")
    if x.ndim != 3 - packed or x.shape[-1] != layer.width or tokens is not None and tuple(x.shape[:-1]) != tokens:
        named = ", ".join(map(str, tokens)) if tokens is not None else "total" if packed else "B, Lk"
        raise ValueError(f"x must have shape ({named}, {layer.width}), got {tuple(x.shape)}: {_made(layer)}")
    return x


def check_rows(layer: Any, tensor: Any, name: str, packed: bool) -> None:
    """Likewise for key or value."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch tensor, got {type(tensor).__name__}")
    if tensor.ndim != 4 - packed or tensor.shape[-2:] != (layer.kv_heads, layer.head_dim):
        raise ValueError(f"{name} must have shape ({'total' if packed else 'B, Lk'}, {layer.kv_heads}, "
                         f"{layer.head_dim}), got {tuple(tensor.shape)}: {_made(layer)}")


def _made(layer: Any) -> str:
    width = "" if layer.width is None else f", width={layer.width}"
    return f"the layer was made with kv_heads={layer.kv_heads}, head_dim={layer.head_dim}{width}"
