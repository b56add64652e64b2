"""Dynamic mask attention as a layer of flax.nnx that learns its key scores."""
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from cupy_dma import checks
from cupy_dma.arrays import Windows
from cupy_dma.calls.scores import FORMS, check_option, width_of
from cupy_dma.jax.arguments import Array, as_array, rows
from cupy_dma.jax.attention import attention, dynamic_mask_attention
from cupy_dma.jax.masks import IntervalMask, real_keys
from cupy_dma.jax.scores import key_scores, top_w
from cupy_dma.masks.windows import window_of

# Like torch's nn.Linear: uniform up to 1 / sqrt(Hkv * D).
_kernel_init = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class DynamicMaskAttention(nnx.Module):
    """``dynamic_mask_attention`` with the parameters of the key scores, for training.

    Parameters
    ----------
    kv_heads, head_dim : int
        ``Hkv`` and ``D`` of the keys and values; ``D`` is 1 to 256.
    window : int, or one int per kv head
        Keys kept per query, the highest-scored ones.
    sinks, recent : int
        The first ``sinks`` and the last ``recent`` keys are visible too, whatever their scores: up to ``window + sinks
        + recent`` keys per query. For whole sequences only, without padding or documents.
    bias_delay : int
        Distance in positions from which on a key's score is added to the logits; the selection is not delayed.
    scores : ``"value"`` or ``"input"``
        What the scores are computed from: the keys' values, or the layer's input ``x``, as ``score_proj(x)``.
    width : int, optional
        Size of a token of ``x``, with ``scores="input"``.
    dt_bias : bool
        Also learn an offset per kv head.
    A_init : float
        Initial value of all of ``A``.
    form : optional
        As for ``cupy_dma.key_scores``; default ``"exp"``. With ``scores="input"`` only ``"linear"``, the default.
    keys, causal, scale, softcap, deterministic, backend
        As for ``cupy_dma.dynamic_mask_attention``.
    dtype
        Of the parameters, by default float32.
    rngs : nnx.Rngs
        Its stream ``params`` initialises ``dt_proj``.

    Attributes
    ----------
    A : nnx.Param ``(Hkv,)``
        Zeros by default, as in ``cupy_dma.torch.DynamicMaskAttention``: at first all scores are equal, every query sees
        the last ``window`` keys, and only ``A`` gets a gradient until it becomes nonzero. With ``A_init=1.0``
        ``dt_proj`` decides the selection from the first step on.
    dt_proj : nnx.Linear
        ``Hkv * D -> Hkv``; its ``kernel`` is the transpose of torch's ``weight``, with the same initialisation.
    score_proj : nnx.Linear
        With ``scores="input"`` instead of these two: ``width -> Hkv``, zeros, so that every query sees the last
        ``window`` keys at first; it learns from the first step on. A plain ``nnx.Linear`` is computed in float32.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type or value.
    """

    def __init__(self, kv_heads: int, head_dim: int, window: Windows, *, sinks: int = 0, recent: int = 0,
                 bias_delay: int = 0, scores: str = "value", width: int | None = None, dt_bias: bool = False,
                 A_init: float = 0.0, form: str | None = None, keys: str = "prefix", causal: bool = True,
                 scale: float | None = None, softcap: float = 0.0, deterministic: bool = False,
                 backend: str | None = None, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.width = width_of(scores, width)
        form = ("exp" if self.width is None else "linear") if form is None else form
        checks.choice(form, "form", FORMS)
        A_init = checks.real(A_init, "A_init")
        for name, option in (("form", form), ("A_init", A_init)):
            check_option(self.width, name, option)
        checks.choice(keys, "keys", ("prefix", "global"))
        self.kv_heads, self.head_dim = checks.whole(kv_heads, "kv_heads", 1), checks.whole(head_dim, "head_dim", 1)
        if self.head_dim > 256:
            raise ValueError(f"head_dim must be 1 to 256, got {head_dim}")
        self.window = window_of(window, self.kv_heads)
        self.sinks, self.recent = checks.whole(sinks, "sinks", 0), checks.whole(recent, "recent", 0)
        self.bias_delay = checks.delay(bias_delay)
        self.form, self.keys, self.causal = form, keys, checks.flag(causal, "causal")
        self.scale = None if scale is None else checks.real(scale, "scale")
        self.softcap = checks.real(softcap, "softcap", 0.0)
        self.deterministic, self.backend = checks.flag(deterministic, "deterministic"), backend
        if keys == "prefix" and not causal:
            raise ValueError("causal=False needs keys='global', got keys='prefix', which is causal by construction")
        if keys == "global" and (sinks or recent):
            raise ValueError(f"sinks and recent need keys='prefix', got sinks={sinks}, recent={recent} and "
                             "keys='global'")
        if not isinstance(rngs, nnx.Rngs):
            raise TypeError(f"rngs must be flax.nnx.Rngs, got {type(rngs).__name__}")
        made: dict[str, Any] = {"use_bias": checks.flag(dt_bias, "dt_bias"), "param_dtype": dtype, "rngs": rngs}
        if self.width is None:
            self.A = nnx.Param(jnp.full((self.kv_heads,), A_init, dtype))
            self.dt_proj = nnx.Linear(self.kv_heads * self.head_dim, self.kv_heads, kernel_init=_kernel_init, **made)
        else:
            self.score_proj = nnx.Linear(self.width, self.kv_heads, kernel_init=nnx.initializers.zeros, **made)

    def __call__(self, query: Array, key: Array, value: Array, *, x: Array | None = None,
                 padding: Array | None = None, documents: Array | None = None, return_lse: bool = False) -> Any:
        """Attention of whole sequences.

        Parameters
        ----------
        query : float array ``(B, Lq, H, D)``
            ``H`` is a multiple of the layer's ``kv_heads``.
        key, value : float array ``(B, Lk, Hkv, D)``
        x : float array ``(B, Lk, width)``
            What the keys and values were projected from; with ``scores="input"`` only.
        padding, documents
            As for ``cupy_dma.jax.top_w``; None with ``sinks`` or ``recent``.
        return_lse
            Return ``(out, lse)``.

        Returns
        -------
        out : array of query's shape and type
        lse : float32 array ``(B, H, Lq)``, natural log (float64 for float64)

        Raises
        ------
        TypeError, ValueError
            An array does not fit the layer, or as for ``cupy_dma.jax.dynamic_mask_attention``.
        """
        for array, name in ((key, "key"), (value, "value")):
            self._check(array, name)
        source = self._source(key, value, x)
        options: dict[str, Any] = {"bias_delay": self.bias_delay, "scale": self.scale, "softcap": self.softcap,
                                   "deterministic": self.deterministic, "return_lse": return_lse,
                                   "backend": self.backend}
        if self.sinks or self.recent:
            for given, name in ((padding, "padding"), (documents, "documents")):
                if given is not None:
                    raise ValueError(f"{name} must be None in a layer with sinks={self.sinks}, recent={self.recent}: "
                                     "such a layer takes whole sequences only")
            scores = self.scores(source)
            return attention(query, key, value, mask=self._kept(scores), bias=scores, **options)
        return dynamic_mask_attention(
            query, key, value, window=self.window, **self._given(source, padding), keys=self.keys, padding=padding,
            documents=documents, causal=self.causal, **options)

    def scores(self, value: Array) -> jax.Array:
        """Scores ``(B, Hkv, Lk)`` of the keys with these values ``(B, Lk, Hkv, D)`` or, with ``scores="input"``, of the
        tokens ``(B, Lk, width)``; float32 (float64 for float64), differentiable. See ``cupy_dma.key_scores``."""
        if self.width is None:
            self._check(value, "value")
        else:
            value = self._tokens(value)
        given = self._given(value)
        return given["scores"] if "scores" in given else key_scores(value, **given, backend=self.backend)

    def _kept(self, scores: jax.Array) -> IntervalMask:
        """The best keys, the sinks and the recent ones."""
        n = scores.shape[2]
        mask = top_w(jax.lax.stop_gradient(scores), self.window, backend=self.backend)
        if self.recent:
            mask |= IntervalMask.sliding_window(n, self.recent)
        return mask | IntervalMask.sinks(n, self.sinks) if self.sinks else mask

    def _given(self, source: Any, padding: Any = None) -> dict[str, Any]:
        """The arguments of ``dynamic_mask_attention`` for the scores: the parameters of a linear layer, or scores
        computed here, of the input or with whatever has replaced ``dt_proj``, such as an adapter."""
        if self.width is None and type(self.dt_proj) is nnx.Linear:
            bias = self.dt_proj.bias
            return {"dt_proj": self.dt_proj.kernel[...].T, "A": self.A[...], "form": self.form,
                    "dt_bias": None if bias is None else bias[...]}
        source = as_array(source, "value")
        kind = jnp.float64 if source.dtype == jnp.float64 else jnp.float32
        source = _without(source.reshape(*source.shape[:2], -1), padding)
        if self.width is not None:
            return {"scores": self._projected(source, kind).swapaxes(1, 2)}
        dt = self.dt_proj(source).swapaxes(1, 2).astype(kind)
        state = self.A[...].astype(kind)[:, None] * jax.nn.softplus(dt)
        return {"scores": jnp.exp(state) if self.form == "exp" else state}

    def _projected(self, x: jax.Array, kind: Any) -> jax.Array:
        """``score_proj(x)`` in float32 (float64 for float64): 16-bit scores would often be equal."""
        if type(self.score_proj) is not nnx.Linear:
            return self.score_proj(x).astype(kind)
        kernel, bias = self.score_proj.kernel[...].astype(kind), self.score_proj.bias
        found = jnp.matmul(x.astype(kind), kernel, precision=jax.lax.Precision.HIGHEST)
        return found if bias is None else found + bias[...].astype(kind)

    def _source(self, key: Any, value: Any, x: Any) -> Any:
        """What scores are computed from, if it fits the layer."""
        if self.width is not None:
            return self._tokens(x, key.shape[:2])
        if x is not None:
            raise ValueError("x needs scores='input', got x for a layer with scores='value'")
        return value

    def _tokens(self, x: Any, tokens: tuple[int, ...] | None = None) -> jax.Array:
        if x is None:
            raise TypeError("x must be a float array, the layer's input, with scores='input', got None")
        x = as_array(x, "x")
        if x.dtype.name not in checks.FLOATS:
            raise TypeError(f"x must be {' or '.join(checks.FLOATS)}, got {x.dtype}")
        if x.ndim != 3 or x.shape[2] != self.width or tokens not in (None, x.shape[:2]):
            named = "B, Lk" if tokens is None else ", ".join(map(str, tokens))
            raise ValueError(f"x must have shape ({named}, {self.width}), got {x.shape}: the layer was made with "
                             f"width={self.width}")
        return x

    def _check(self, x: Any, name: str) -> None:
        if rows(x, name).shape[2:] != (self.kv_heads, self.head_dim):
            raise ValueError(f"{name} must have shape (B, Lk, {self.kv_heads}, {self.head_dim}), got {x.shape}: the "
                             f"layer was made with kv_heads={self.kv_heads}, head_dim={self.head_dim}")


def _without(x: jax.Array, padding: Any) -> jax.Array:
    """``x (B, Lk, ...)`` with zeros for padding; a padding of the wrong shape is rejected later."""
    if padding is None:
        return x
    real = real_keys(padding)
    return jnp.where(real[..., None], x, 0) if real.shape in (x.shape[:2], (1, x.shape[1])) else x
