"""Groups of arguments, as the caller passes them to the public functions, and their checks."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Operand
from cupy_dma.calls.sinks import check_sinks
from cupy_dma.masks.windows import Window, window_of


@dataclass(slots=True)
class Options:
    """Options of the attention, whatever the mask."""

    causal: bool = False
    scale: float | None = None  # None: D^-0.5
    softcap: float = 0.0
    deterministic: bool = False
    bias_delay: int = 0
    sink_logits: Any = None

    def checked(self, query: Operand) -> tuple[bool, float, float, bool, int, Operand | None]:
        """The checked options, in the order of the fields."""
        scale = query.shape[3] ** -0.5 if self.scale is None else checks.factor(self.scale, "scale", query.dtype)
        usual = self.softcap == 0.0 and type(self.softcap) is float
        softcap = 0.0 if usual else checks.softcap_of(self.softcap, query.dtype)
        return (checks.flag(self.causal, "causal"), scale, softcap, checks.flag(self.deterministic, "deterministic"),
                checks.delay(self.bias_delay), check_sinks(self.sink_logits, query))


@dataclass(slots=True)
class Selection:
    """Which keys a query sees: those with the best ``scores``. If None, scores are computed from the values with
    ``dt_proj``, ``A`` and ``dt_bias``."""

    scores: Any
    window: Any
    dt_proj: Any = None
    A: Any = None
    dt_bias: Any = None
    form: str = "exp"
    keys: str = "prefix"
    padding: Any = None
    documents: Any = None

    def checked(self, causal: bool) -> tuple[Window, bool]:
        """The window, not yet checked against the number of heads, and whether the attention itself must be causal:
        prefix masks already are. ValueError for arguments that contradict each other."""
        window = window_of(self.window)
        checks.choice(self.keys, "keys", ("prefix", "global"))
        causal = checks.flag(causal, "causal")
        if self.keys == "prefix" and not causal:
            raise ValueError("causal=False needs keys='global', got keys='prefix', which is causal by construction")
        if (self.scores is None) == (self.dt_proj is None):
            raise ValueError(f"give either scores or dt_proj and A, got {'neither' if self.scores is None else 'both'}")
        if self.scores is None and self.A is None:
            raise ValueError("A must be given with dt_proj, got None")
        extra = [name for name in ("A", "dt_bias") if getattr(self, name) is not None]
        if self.scores is not None and extra:
            raise ValueError(f"{' and '.join(extra)} must come with dt_proj, got scores")
        return window, causal and self.keys == "global"


@dataclass(slots=True)
class Packing:
    """Where the sequences of a packed batch begin and end."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any = None
    seqused_k: Any = None
    block_table: Any = None  # of a paged KV cache
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    tail_padding: bool = True  # whether rows may follow the last sequence; the public functions' default is False
