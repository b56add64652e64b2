"""Which parts of jax ``cupy_dma.jax`` needs, and the jax version that introduced each."""
from __future__ import annotations

from importlib import import_module
from typing import Any

OLDEST = "0.9"  # the first release with all of NEEDED
NEEDED = (  # module, name, since
    ("jax", "typeof", "0.6.0"),
    ("jax.tree_util", "register_static", "0.5.0"),
    ("jax.experimental.buffer_callback", "buffer_callback", "0.6.1"),
    ("jax.lax", "pcast", "0.9"),
)


def require_jax() -> None:
    """ImportError if jax is missing or too old; the message says what is missing and which version has it."""
    jax = _imported("jax")
    if jax is None:
        raise ImportError("cupy_dma.jax needs jax, which is not installed: pip install 'cupy_dma[jax]'")
    missing = [f"{module}.{name} (since jax {since})" for module, name, since in NEEDED
               if not hasattr(_imported(module), name)]
    if missing:
        raise ImportError(f"cupy_dma.jax needs jax {OLDEST} or later, but jax {jax.__version__} is installed, which "
                          f"lacks {', '.join(missing)}")


def require_flax() -> None:
    """ImportError where flax is not installed, or has no ``flax.nnx``."""
    if _imported("flax.nnx") is None:
        raise ImportError("cupy_dma.jax.DynamicMaskAttention needs flax.nnx, which is not installed: "
                          "pip install 'flax>=0.12'")


def _imported(module: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError:
        return None
