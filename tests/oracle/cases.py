"""The grid of cases, forward and backward: shapes, types, strides, masks and biases.

One list for all backends and libraries: ``run(case, convert)`` builds the inputs from the case's seed, hands each
contiguous NumPy array to ``convert`` (for example ``cupy.asarray``) and makes the strided views afterwards, so that
every library sees the same layout. ``expected(case)`` is the oracle's answer; it never reads an IntervalMask.
"""
import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from tests.oracle import reference
from tests.oracle.arrays import host


@dataclass(frozen=True)
class Case:
    name: str
    dtype: str = "bfloat16"
    batch: int = 2
    query_length: int = 70
    key_length: int = 70
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    # none causal window sinks padding documents prefix_lm top_w global top_w_padding top_w_documents global_documents
    # union per_head per_batch survivors; and dense masks: dense dense_per_head dense_2d dense_rows, dense_columns: and
    # 1, g or h (few keys, others for later queries), dense= and the axes, a letter of AXES each; several joined by +
    mask: str = "top_w"
    window: int = 17
    bias: str = "key"  # none key key_per_head key_shared full full_per_head row, full= and the axes
    causal: bool = False
    softcap: float = 0.0
    scale: float | None = None
    layout: str = "bshd"  # bshd bhsd head_slice length_slice wide every_other
    # not in the repr, which seeds the inputs
    value_dim: int | None = field(default=None, repr=False)
    sinks: str | None = field(default=None, repr=False)  # their type
    bias_delay: int = field(default=0, repr=False)
    extremes: bool = field(default=False, repr=False)  # -inf and 30 in the bias, NaN where no query adds it

    @property
    def is_dense(self) -> bool:
        """Whether the case has a dense mask or a bias with a query axis, which not every backend supports."""
        return "dense" in self.mask or self.bias.startswith(("full", "row"))

    def axes(self, letters: str) -> tuple[int, ...]:
        """The sizes of "bhqk" and the like."""
        sizes = {"1": 1, "b": self.batch, "g": self.kv_heads, "h": self.heads, "q": self.query_length,
                 "k": self.key_length}
        return tuple(sizes[letter] for letter in letters)

    def __str__(self) -> str:
        return self.name


AXES = ["".join(letters) for letters in itertools.product("1b", "1gh", "1q", "1k")]  # every broadcast shape


def _grid() -> list[Case]:
    cases = [Case(f"{dtype}-D{size}", dtype=dtype, head_dim=size)
             for dtype in ("float16", "bfloat16", "float32", "float64") for size in (1, 3, 16, 40, 64, 128, 256)]
    cases += [Case(f"heads-{h}/{g}-{mask}", heads=h, kv_heads=g, mask=mask)
              for h, g in ((1, 1), (2, 2), (4, 2), (6, 2), (3, 1)) for mask in ("top_w", "causal")]
    cases += [Case(f"lengths-{lq}x{lk}-{mask}", query_length=lq, key_length=lk, mask=mask, dtype="float16")
              for lq, lk in ((0, 0), (0, 5), (5, 0), (1, 1), (1, 70), (70, 1), (33, 129), (129, 33), (300, 300))
              for mask in ("none", "causal", "top_w", "global")]
    # On Hopper neither the first query that sees the second tile of keys nor the rest after it is a multiple of 64.
    cases += [Case(f"lengths-130x180-causal-D{size}", query_length=130, key_length=180, mask="causal", head_dim=size)
              for size in (64, 128)]
    cases += [Case(f"mask-{mask}", mask=mask, heads=4, kv_heads=2)
              for mask in ("none", "causal", "window", "sinks", "padding", "documents", "prefix_lm", "global",
                           "top_w_padding", "top_w_documents", "global_documents", "union", "per_head", "per_batch",
                           "dense", "dense_per_head", "dense_2d", "dense_rows")]
    cases += [Case(f"causal-and-{mask}", mask=mask, heads=4, kv_heads=2, causal=True, key_length=90)
              for mask in ("none", "window", "padding", "global", "per_head", "dense")]
    cases += [Case(f"bias-{bias}-{mask}", mask=mask, bias=bias, heads=4, kv_heads=2)
              for bias in ("none", "key", "key_per_head", "key_shared", "full", "full_per_head", "row")
              for mask in ("none", "top_w")]
    cases += [Case(f"softcap-{bias}", softcap=3.0, bias=bias, scale=1.0) for bias in ("none", "key", "full")]
    # On Hopper logits below half of the cap use a polynomial: above in few blocks, here in some and in all.
    cases += [Case(f"softcap-{cap}-{bias}", softcap=cap, bias=bias, scale=1.0, dtype="float16")
              for cap in (40.0, 60.0) for bias in ("none", "key")]
    cases += [Case("scale", scale=0.7), Case("scale-zero", scale=0.0), Case("scale-negative", scale=-0.3),
              Case("scale-1e-40", scale=1e-40), Case("scale-zero-softcap", scale=0.0, softcap=3.0),
              Case("scale-negative-softcap", scale=-0.3, softcap=2.0), Case("softcap-1e-06", softcap=1e-6)]
    cases += [Case(f"layout-{layout}", layout=layout, heads=4, kv_heads=2, dtype="float16")
              for layout in ("bhsd", "head_slice", "length_slice", "wide", "every_other")]
    cases += [Case(f"window-{w}", window=w) for w in (1, 2, 69, 70, 1000)]
    # More queries than keys: some rows see only the sink.
    cases += [Case(f"sinks-{mask}-{dtype}", mask=mask, dtype=dtype, query_length=75, heads=4, kv_heads=2, sinks=sinks,
                   softcap=softcap, bias=bias)
              for mask, dtype, sinks, softcap, bias in (
                  ("causal", "bfloat16", "bfloat16", 0.0, "none"), ("top_w", "float16", "float32", 0.0, "key"),
                  ("window", "float32", "float32", 3.0, "none"), ("dense", "bfloat16", "float32", 0.0, "full"),
                  ("none", "float64", "float64", 0.0, "key"))]
    cases += [Case(f"value-dim-{dtype}-{d}/{v}-{mask}", mask=mask, dtype=dtype, head_dim=d, value_dim=v, heads=4,
                   kv_heads=2, sinks=sinks)
              for dtype, d, v, mask, sinks in (
                  ("bfloat16", 32, 24, "causal", None), ("float16", 16, 32, "top_w", None),
                  ("float32", 16, 1, "none", "float32"), ("float64", 3, 7, "window", None),
                  ("bfloat16", 32, 16, "dense", "bfloat16"))]
    cases += [Case("batch-0", batch=0, mask="none"), Case("batch-3", batch=3, mask="per_batch")]
    odd: dict[str, Any] = {"query_length": 37, "key_length": 75, "heads": 4, "kv_heads": 2}
    cases += [Case(f"dense-mask-{axes}", mask=f"dense={axes}", dtype=("float16", "bfloat16")[i % 2], **odd)
              for i, axes in enumerate(AXES)]
    masks = ("none", "dense=bgqk", "causal", "top_w")
    cases += [Case(f"dense-bias-{axes}", mask=masks[(i + i // 4) % 4], bias=f"full={axes}",
                   dtype=("float16", "bfloat16")[i // 2 % 2], **odd) for i, axes in enumerate(AXES)]
    cases += [Case(f"dense-both-{mask}-{bias}", mask=mask, bias=f"full={bias}", causal=causal, softcap=softcap,
                   dtype=dtype, **odd)
              for mask, bias, causal, softcap, dtype in (
                  ("dense=1hqk", "bhqk", True, 0.0, "bfloat16"), ("dense=11qk", "1gqk", False, 2.0, "float16"),
                  ("top_w+dense=1hqk", "11qk", False, 0.0, "bfloat16"), ("dense=b1q1", "b1q1", True, 0.0, "float16"),
                  ("per_batch+dense=1gqk", "bgqk", False, 0.0, "float16"),
                  ("per_head+padding+dense=b1qk+dense=1hq1", "1hqk", True, 1.5, "bfloat16"))]
    cases += [Case(f"dense-sizes-{h}/{g}-{lq}x{lk}-D{d}", mask="dense=b1qk", bias=f"full=b{'gh'[i % 2]}qk",
                   query_length=lq, key_length=lk, heads=h, kv_heads=g, head_dim=d,
                   dtype=("float16", "bfloat16")[i % 2])
              for i, (h, g, lq, lk, d) in enumerate((
                  (3, 1, 70, 64, 64), (8, 2, 130, 96, 8), (6, 2, 20, 200, 33), (2, 1, 3, 70, 128), (2, 2, 1, 70, 16),
                  (1, 1, 70, 1, 256), (4, 1, 104, 136, 192), (4, 2, 130, 304, 64), (2, 1, 140, 300, 128),
                  (2, 1, 5, 0, 16), (2, 1, 0, 5, 16)))]
    # More queries than the smallest super-tile of the key gradients has, and few enough keys to gather.
    few: dict[str, Any] = {"query_length": 530, "key_length": 150, "heads": 4, "kv_heads": 2}
    cases += [Case("dense-columns-key", mask="dense_columns:g", **few),
              Case("dense-columns-shared", mask="dense_columns:1", bias="none", causal=True, dtype="float16", **few),
              Case("dense-columns-full", mask="dense_columns:h", bias="full=1hqk", softcap=2.0, batch=1, **few),
              Case("dense-columns-top_w", mask="top_w+dense_columns:g", bias="full=b1qk", batch=1, **few)]
    # float32, which tensor cores read as TF32, through all code that depends on the element type.
    cases += [replace(case, name=f"float32-{case.name}", dtype="float32") for case in cases if case.name in (
        "heads-6/2-top_w", "heads-4/2-causal", "lengths-1x70-top_w", "lengths-33x129-causal", "lengths-129x33-top_w",
        "lengths-300x300-causal", "lengths-300x300-top_w", "mask-none", "mask-window", "mask-documents", "mask-global",
        "mask-per_head", "mask-dense_per_head", "causal-and-padding", "bias-none-top_w", "bias-key_per_head-none",
        "bias-full-top_w", "softcap-key", "scale", "dense-mask-1gq1", "dense-mask-bhqk", "dense-bias-1hqk",
        "dense-bias-bhqk", "dense-bias-bgq1", "dense-columns-key", "dense-both-dense=11qk-1gqk",
        "dense-sizes-8/2-130x96-D8", "dense-sizes-6/2-20x200-D33", "dense-sizes-2/1-3x70-D128",
        "dense-sizes-4/1-104x136-D192",
        "layout-bhsd", "layout-head_slice", "layout-wide", "layout-every_other", "window-1")]
    cases += [Case(f"float32-D{size}-causal", dtype="float32", head_dim=size, mask="causal", bias="none")
              for size in (4, 100, 192)]
    return cases


CASES = _grid()
# A mask of kv heads and one of query heads: each kv head's applies to the consecutive query heads of its group.
OF_HEADS = [Case(f"heads-{mask}", mask=mask, heads=4, kv_heads=2, batch=1, query_length=20, key_length=40)
            for mask in ("dense=1gqk+dense=1hqk", "dense=1hqk+dense=1gqk", "top_w+per_head", "per_head+top_w")]


@lru_cache(maxsize=1)
def _drawn(case: Case) -> dict[str, np.ndarray]:
    """Contiguous NumPy arrays in BSHD."""
    rng = np.random.default_rng(zlib.crc32(repr(replace(case, name="")).encode()))
    kind, n, lq = numpy_dtype(case.dtype), case.key_length, case.query_length
    b, h, g, d = case.batch, case.heads, case.kv_heads, case.head_dim

    def normal(*shape):
        return rng.standard_normal(shape).astype(kind)

    dv = d if case.value_dim is None else case.value_dim
    data = {"query": normal(b, lq, h, d), "key": normal(b, n, g, d), "value": normal(b, n, g, dv)}
    # Few distinct values, so every case has ties.
    data["scores"] = (rng.integers(-8, 8, (b, g, n)) / 4).astype(np.float32)
    bias_shape = {"key": (b, g, n), "key_per_head": (b, h, n), "key_shared": (1, 1, n), "full": (b, g, lq, n),
                  "full_per_head": (b, h, lq, n), "row": (1, h, lq, 1)}.get(case.bias)
    if case.bias.startswith("full="):
        bias_shape = case.axes(case.bias[5:])
    if case.bias == "key":
        data["bias"] = data["scores"]
    elif bias_shape:
        data["bias"] = rng.standard_normal(bias_shape).astype(kind if case.bias.endswith("per_head") or
                                                                    "h" in case.bias[5:] else np.float32)
    data["padding"] = rng.random((b, n)) < 0.7
    data["documents"] = np.sort(rng.integers(0, 4, (b, n)), axis=1).astype(np.int32)
    data["prefix"] = rng.integers(0, n + 1, b).astype(np.int32)
    data["start"] = rng.integers(-5, n + 5, (1, h, n)).astype(np.int32)
    data["stop"] = data["start"] + rng.integers(-3, n + 1, (b, 1, n)).astype(np.int32)
    mask_shape = {"dense": (b, g, lq, n), "dense_per_head": (1, h, lq, n), "dense_2d": (lq, n),
                  "dense_rows": (b, 1, lq, 1)}.get(case.mask)
    if mask_shape:
        data["mask"] = rng.random(mask_shape) < 0.4
    for part in case.mask.split("+"):
        if part.startswith("dense_columns:"):
            shape = (1, {"1": 1, "g": g, "h": h}[part[-1]])
            early = np.arange(n) < n // 2
            columns = (rng.random((*shape, 1, n)) < 0.25) & (early | (np.arange(lq)[:, None] >= 512))
            data[part] = columns & (rng.random((*shape, lq, n)) < 0.7)
    data["dout"], data["dlse"] = normal(b, lq, h, dv), rng.standard_normal((b, h, lq)).astype(np.float32)
    for part in case.mask.split("+"):
        if part.startswith("dense="):
            data[part] = rng.random(case.axes(part[6:])) < 0.5
    if case.sinks:
        data["sink_logits"] = (2 * rng.standard_normal(h)).astype(numpy_dtype(case.sinks))
    data["survivors"] = (np.arange(n) + np.where(rng.random((b, g, n)) < 1 / 8, n, 20)).astype(np.int32)
    if case.extremes:
        data["bias"] = data["bias"].copy()  # may be the scores
        data["bias"][..., ::5], data["bias"][..., 3::9] = -np.inf, 30
        data["bias"][..., max(n - case.bias_delay, 0)::2] = np.nan
    return data


def make_mask(case: Case, array: Callable[[str], Any], like: Any) -> Any:
    """The case's mask, built by the constructors from ``array(name)``."""
    M, n, w = dma.IntervalMask, case.key_length, case.window
    makers = {
        "none": lambda: None,
        "causal": lambda: M.causal(n, like=like),
        "window": lambda: M.sliding_window(n, w, like=like),
        "sinks": lambda: M.sinks(n, w, like=like),
        "padding": lambda: M.padding(array("padding")),
        "documents": lambda: M.documents(array("documents")),
        "prefix_lm": lambda: M.prefix_lm(n, array("prefix")),
        "top_w": lambda: M.top_w(array("scores"), w),
        "global": lambda: M.top_w(array("scores"), w, keys="global"),
        "top_w_padding": lambda: M.top_w(array("scores"), w, padding=array("padding")),
        "top_w_documents": lambda: M.top_w(array("scores"), w, documents=array("documents")),
        "global_documents": lambda: M.top_w(array("scores"), w, keys="global", documents=array("documents"),
                                            padding=array("padding")),
        "union": lambda: M.top_w(array("scores"), w) | M.sliding_window(n, 5, like=like) | M.sinks(n, 2, like=like),
        "survivors": lambda: M.from_stop(array("survivors")),
        "per_head": lambda: M(array("start")[:1], array("stop")[:1]),
        "per_batch": lambda: M(array("start"), array("stop")),
    }
    def part(name: str) -> Any:
        if name.startswith("dense"):
            return array(name if "=" in name or ":" in name else "mask")
        return makers[name]()

    names = case.mask.split("+")
    return part(names[0]) if len(names) == 1 else tuple(part(name) for name in names)


def dense_mask(case: Case) -> np.ndarray | None:
    """The same mask by its definition, ``(1|B, 1|Hkv|H, Lq, Lk)``."""
    if "+" in case.mask:
        shape = case.batch, case.heads, case.query_length, case.key_length
        parts = [_dense_part(case, name) for name in case.mask.split("+")]
        return np.logical_and.reduce([reference.per_head(part, shape) for part in parts if part is not None])
    return _dense_part(case, case.mask)


def _dense_part(case: Case, name: str) -> np.ndarray | None:
    data, n, w = _drawn(case), case.key_length, case.window
    p = np.arange(case.query_length)[:, None] + n - case.query_length
    j = np.arange(n)

    def top_w(keys="prefix", padding=None, documents=None):
        return reference.top_w_dense(data["scores"], w, keys, padding, documents, case.query_length)

    def own_document():
        number = reference.document_numbers(data["documents"], n)
        if n == 0:
            return np.zeros((case.batch, 1, case.query_length, 0), bool)
        return number[:, None, None, :] == number[:, np.maximum(p[:, 0], 0)][:, None, :, None]

    if name == "none":
        return None
    if name == "dense_2d":
        return data["mask"][None, None]
    if name.startswith("dense"):
        return data[name if "=" in name or ":" in name else "mask"]
    makers = {
        "causal": lambda: (j <= p)[None, None],
        "window": lambda: ((j <= p) & (j > p - w))[None, None],
        "sinks": lambda: ((j <= p) & (j < w))[None, None],
        "padding": lambda: np.broadcast_to(data["padding"][:, None, None], (case.batch, 1, len(p), n)),
        "documents": lambda: own_document() & (j <= p),
        "prefix_lm": lambda: (j < data["prefix"][:, None, None, None]) | (j <= p),
        "top_w": top_w,
        "global": lambda: top_w("global"),
        "top_w_padding": lambda: top_w(padding=data["padding"]),
        "top_w_documents": lambda: top_w(documents=data["documents"]),
        "global_documents": lambda: top_w("global", data["padding"], data["documents"]),
        "union": lambda: top_w() | ((j <= p) & ((j > p - 5) | (j < 2))),
        "survivors": lambda: (j <= p) & (p < data["survivors"][:, :, None]),
        "per_head": lambda: (data["start"][:1, :, None] <= p) & (p < data["stop"][:1, :, None]),
        "per_batch": lambda: (data["start"][:, :, None] <= p) & (p < data["stop"][:, :, None]),
    }
    return makers[name]()


def _laid_out(x: np.ndarray, layout: str, convert: Callable[[np.ndarray], Any]) -> Any:
    """An array of ``convert``'s library with x's values (B, L, heads, D) and the strides of ``layout``."""
    b, n, h, d = x.shape
    if layout == "bhsd":
        return convert(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2)
    shape, view = {
        "bshd": (x.shape, (slice(None),) * 4),
        "head_slice": ((b, n, 2 * h + 1, d), (slice(None), slice(None), slice(1, None, 2))),
        "length_slice": ((b, n + 3, h, d), (slice(None), slice(3, None))),
        "wide": ((b, n, h, d + 8), (slice(None),) * 3 + (slice(0, d),)),
        "every_other": ((b, 2 * n, h, d), (slice(None), slice(0, 2 * n, 2))),
    }[layout]
    base = np.full(shape, np.nan, x.dtype)  # gaps between rows must not matter
    base[view] = x
    return convert(base)[view]


def arguments(case: Case, convert: Callable[[np.ndarray], Any]) -> tuple[list[Any], dict[str, Any]]:
    data = _drawn(case)
    q, k, v = (_laid_out(data[name], case.layout, convert) for name in ("query", "key", "value"))
    sinks = {"sink_logits": convert(data["sink_logits"])} if case.sinks else {}
    return [q, k, v], {"mask": make_mask(case, lambda name: convert(data[name]), q),
                       "bias": convert(data["bias"]) if "bias" in data else None, "causal": case.causal,
                       "scale": case.scale, "softcap": case.softcap, **sinks, **delay_of(case)}


def delay_of(case: Any) -> dict[str, int]:
    """The delay of the bias as a keyword argument, if there is one."""
    return {"bias_delay": case.bias_delay} if case.bias_delay else {}


def run(case: Case, convert: Callable[[np.ndarray], Any] = np.asarray, **options: Any) -> tuple[Any, Any]:
    """``(out, lse)`` of ``cupy_dma.attention`` on arrays made by ``convert``."""
    positional, named = arguments(case, convert)
    return dma.attention(*positional, **named, return_lse=True, **options)


def run_backward(case: Case, convert: Callable[[np.ndarray], Any] = np.asarray, *, with_dlse: bool = False,
                 **options: Any) -> Any:
    """The ``AttentionGradients`` of the case, from the out and lse that the same backend computes."""
    positional, named = arguments(case, convert)
    backend = {"backend": options["backend"]} if "backend" in options else {}
    out, lse = dma.attention(*positional, **named, return_lse=True, **backend)
    dout = _laid_out(_drawn(case)["dout"], case.layout, convert)
    dlse = convert(_drawn(case)["dlse"]) if with_dlse else None
    return dma.backward.attention_backward(dout, *positional, out, lse, **named, dlse=dlse, **options)


def _oracle_arguments(case: Case) -> tuple[Any, ...]:
    data = _drawn(case)
    return (data["query"], data["key"], data["value"], dense_mask(case), data.get("bias"), case.causal, case.scale,
            case.softcap)


def check(case: Case, out: np.ndarray, lse: np.ndarray, *, tf32: bool = False) -> None:
    """Check section 12 for ``out``; every backend keeps ``lse`` in float32, so a few float32 roundings are allowed for
    it.

    ``tf32``: the backend multiplies float32 on tensor cores.
    """
    kinds = numpy_dtype(case.dtype), np.float64 if case.dtype == "float64" else np.float32
    for found, kind, (ref, plain, _) in zip((host(out), host(lse)), kinds, expected(case, tf32=tf32).values()):
        assert found.dtype == kind and found.shape == ref.shape
        reference.assert_matches_reference(found, ref, plain, kind)


@cache
def expected_gradients(case: Case, *, with_dlse: bool = False,
                       tf32: bool = False) -> dict[str, tuple[np.ndarray, np.ndarray, float]]:
    """The oracle's gradients, the plain same-precision computation and the size of the terms, by name; "bias" only with
    a bias. Cached, because several files check the same cases: do not modify them."""
    data = _drawn(case)
    arguments = (data["dout"], *_oracle_arguments(case), data["dlse"] if with_dlse else None, data.get("sink_logits"),
                 case.bias_delay)
    refs = reference.attention_gradients(*arguments)
    plains = reference.same_precision_attention_gradients(*arguments, tf32=tf32)
    terms = reference.attention_gradient_terms(*arguments)
    names = "query", "key", "value", "bias", "sink_logits"
    return {name: (ref, plain, size) for name, ref, plain, size in zip(names, refs, plains, terms) if ref is not None}


def check_backward(case: Case, gradients: Any, *, with_dlse: bool = False, tf32: bool = False) -> None:
    """Check section 12 for arrays ``(dquery, dkey, dvalue, dbias)``; ``sink_logits`` is an item or attribute. A
    gradient of None is not checked, but without a bias its gradient must be None. ``tf32``: as for ``check``."""
    data = _drawn(case)
    assert "bias" in data or gradients[3] is None
    given = dict(zip(("query", "key", "value", "bias", "sink_logits"), gradients))
    given.setdefault("sink_logits", getattr(gradients, "sink_logits", None))
    rounded = tf32 and case.dtype == "float32"
    for name, (ref, plain, size) in expected_gradients(case, with_dlse=with_dlse, tf32=rounded).items():
        found = host(given[name])
        if found is None:
            continue
        print(f"d{name}: ", end="")
        assert found.dtype == data[name].dtype and found.shape == data[name].shape
        reference.assert_matches_reference(found, ref, plain, found.dtype, factor=3, terms=size)


def expected(case: Case, **options: Any) -> dict[str, tuple[np.ndarray, np.ndarray, float]]:
    """The oracle's ``out`` and ``lse`` and the plain same-precision computation, in the form of ``expected_gradients``.
    ``options`` go to the plain computation."""
    arguments = _oracle_arguments(case)
    sinks = _drawn(case).get("sink_logits")
    pairs = zip(reference.attention(*arguments, sinks, case.bias_delay),
                reference.same_precision_attention(*arguments, sinks, case.bias_delay, **options))
    return {name: (ref, plain, 0.0) for name, (ref, plain) in zip(("out", "lse"), pairs)}
