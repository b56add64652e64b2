"""The grid of packed sequences: like ``tests/oracle/cases.py``, for ``varlen_attention`` and its gradients.

The oracle for single sequences is called for each sequence with a dense mask; it never reads an IntervalMask, lengths
or page tables.
"""
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

import cupy_dma as dma
from cupy_dma.arrays import numpy_dtype
from tests.oracle import reference
from tests.oracle.arrays import host
from tests.oracle.cases import delay_of

LENGTHS = ((20, 20), (0, 9), (70, 70), (33, 0), (1, 90), (90, 31), (0, 0), (5, 140))  # (Lq, Lk) of each sequence
EVER, NEVER = -(2**31), 2**31 - 1


@dataclass(frozen=True)
class Case:
    name: str
    dtype: str = "bfloat16"
    lengths: tuple[tuple[int, int], ...] = LENGTHS
    used: tuple[int, ...] | None = None  # seqused_k
    tail: tuple[int, int] = (0, 0)  # rows of query and key behind the last sequence
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mask: str = "none"  # none causal window padding open top_w global per_head
    window: int = 17
    bias: str = "none"  # none key key_per_head key_shared
    causal: bool = False
    softcap: float = 0.0
    page_size: int = 0
    layout: str = "plain"  # plain wide; pages also transposed split
    bias_delay: int = field(default=0, repr=False)  # not in the repr, which seeds the inputs

    def __str__(self) -> str:
        return self.name

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def keys(self) -> tuple[int, ...]:
        """Number of used keys per sequence."""
        return self.used or tuple(k for _, k in self.lengths)

    @property
    def capacity(self) -> int:
        """Keys that the pages of a sequence can hold."""
        return self.page_size * (-(-max(k for _, k in self.lengths) // self.page_size) + 1)


def _grid() -> list[Case]:
    cases = [Case(f"{dtype}-{mask}", dtype, mask=mask, bias="key" if mask in ("top_w", "global") else "none",
                  causal=mask == "causal")
             for dtype in ("float16", "bfloat16", "float32", "float64") for mask in ("none", "causal", "top_w")]
    cases += [Case(f"mask-{mask}", mask=mask, bias=bias) for mask in ("window", "padding", "open", "global", "per_head")
              for bias in ("key",)]
    cases += [Case(f"causal-and-{mask}", mask=mask, causal=True) for mask in ("none", "window", "open", "per_head")]
    cases += [Case(f"bias-{bias}-{mask}", bias=bias, mask=mask) for bias in ("key", "key_per_head", "key_shared")
              for mask in ("none", "top_w")]
    cases += [Case(f"used-{mask}", mask=mask, used=(20, 3, 40, 0, 77, 12, 0, 140), bias="key", causal=mask == "none")
              for mask in ("none", "top_w", "global", "per_head")]
    cases += [Case(f"tail-{mask}", mask=mask, tail=(70, 11), bias="key") for mask in ("none", "window", "per_head")]
    cases += [Case(f"heads-{h}/{g}-{mask}", heads=h, kv_heads=g, mask=mask, causal=mask == "none")
              for h, g in ((1, 1), (6, 2), (3, 1)) for mask in ("none", "top_w")]
    cases += [Case(f"D{size}", head_dim=size, mask="top_w", dtype="float16") for size in (3, 40, 128)]
    cases += [Case(f"short-{mask}", lengths=tuple((n, n) for n in (1, 2, 1, 3, 0, 1, 70)), mask=mask, window=2,
                   bias="key") for mask in ("none", "top_w", "global")]
    cases += [Case(f"decode-{mask}", lengths=tuple((1, n) for n in (100, 1, 0, 64, 65)), mask=mask, window=30,
                   bias="key", causal=mask == "none") for mask in ("none", "top_w", "window")]
    cases += [Case("one", lengths=((80, 80),), causal=True), Case("empty", lengths=()),
              Case("softcap", softcap=2.0, mask="top_w", bias="key"), Case("wide", layout="wide", mask="top_w")]
    cases += [Case(f"sixty-{mask}", lengths=tuple((3 + i % 7, 3 + i % 7) for i in range(60)), mask=mask, window=3,
                   bias="key", causal=mask == "none") for mask in ("none", "top_w")]
    return cases


def _pages() -> list[Case]:
    cases = [Case(f"pages-{size}-{mask}", page_size=size, mask=mask, causal=mask == "none", bias="key")
             for size in (1, 16, 7, 64, 200) for mask in ("none", "top_w")]
    cases += [Case(f"pages-{mask}", page_size=16, mask=mask, bias="key" if mask == "global" else "key_per_head")
              for mask in ("window", "open", "global", "per_head")]
    cases += [Case(f"pages-{layout}", page_size=16, layout=layout, causal=True, dtype="float16")
              for layout in ("wide", "transposed", "split")]
    cases += [Case(f"pages-decode-{mask}", page_size=16, lengths=tuple((1, n) for n in (100, 1, 0, 64, 65)), mask=mask,
                   window=30, bias="key", causal=mask == "none") for mask in ("none", "top_w")]
    cases += [Case("pages-empty", page_size=16, lengths=((3, 0), (0, 0))), Case("pages-D3", page_size=5, head_dim=3),
              Case("pages-float32", page_size=16, dtype="float32", causal=True)]
    return cases


CASES, PAGES = _grid(), _pages()
# Several super-tiles of 256 queries in some sequences, one in others, none in those without queries or keys.
SUPERS = [Case("supers", "float16", ((530, 530), (30, 30), (256, 300), (0, 90), (257, 100), (20, 0), (64, 400)),
               mask="top_w", window=40, heads=2, kv_heads=1, head_dim=16, bias="key"),
          Case("supers-D136", "float16", ((300, 300), (7, 7), (40, 100)), mask="top_w", window=20, heads=2, kv_heads=2,
               head_dim=136, bias="key"),
          Case("supers-window", "bfloat16", ((300, 300), (7, 7), (40, 100)), tail=(30, 9), mask="window", window=33,
               used=(290, 0, 70), bias="key_shared", head_dim=16),
          Case("supers-float32", "float32", ((300, 300), (7, 7), (40, 100)), mask="top_w", window=20, head_dim=128)]
# More than two chunks of 2048 keys; a tile must read only its own.
LONG = [Case(f"long-{mask}", "float16", ((10, 2300), (33, 900), (20, 2100), (0, 500), (70, 70)), mask=mask, window=100,
             heads=2, kv_heads=1, head_dim=16, bias="key") for mask in ("padding", "per_head", "top_w", "global")]


def _sums(lengths: Any) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


@lru_cache(maxsize=1)
def _drawn(case: Case) -> dict[str, np.ndarray]:
    """Contiguous NumPy arrays; keys are packed, even if they will be paged."""
    rng = np.random.default_rng(zlib.crc32(repr(replace(case, name="")).encode()))
    kind, h, g, d = numpy_dtype(case.dtype), case.heads, case.kv_heads, case.head_dim
    cu_q, cu_k = (_sums([pair[side] for pair in case.lengths]) for side in (0, 1))
    rows, n = int(cu_q[-1]) + case.tail[0], int(cu_k[-1]) + case.tail[1]

    def normal(*shape):
        return rng.standard_normal(shape).astype(kind)

    data = {"cu_q": cu_q, "cu_k": cu_k, "query": normal(rows, h, d), "key": normal(n, g, d), "value": normal(n, g, d),
            "dout": normal(rows, h, d), "dlse": rng.standard_normal((h, rows)).astype(np.float32),
            "scores": (rng.integers(-8, 8, (g, n)) / 4).astype(np.float32), "padding": rng.random(n) < 0.7}
    if case.bias != "none":
        count = {"key": g, "key_per_head": h, "key_shared": 1}[case.bias]
        data["bias"] = rng.standard_normal((count, n)).astype(kind if case.bias == "key_per_head" else np.float32)
    # Positions within each sequence: starts are open or random, ends may lie after the last position.
    data["start"] = np.where(rng.random((h, n)) < 0.3, EVER, rng.integers(-60, 120, (h, n)))
    data["stop"] = np.where(rng.random((h, n)) < 0.3, NEVER, rng.integers(-40, 150, (h, n)))
    for name in ("key", "value"):  # invisible rows must not matter
        for b, used in enumerate(case.keys):
            data[name][cu_k[b] + used:cu_k[b + 1]] = np.nan
        data[name][cu_k[-1]:] = np.nan
    return data


def _dense(case: Case, b: int) -> np.ndarray | None:
    """The mask of sequence ``b`` by its definition, ``(1, 1|Hkv|H, Lq, Lk)``."""
    data, w, n = _drawn(case), case.window, case.keys[b]
    keys = slice(data["cu_k"][b], data["cu_k"][b] + n)
    p, j = np.arange(case.lengths[b][0])[:, None] + n - case.lengths[b][0], np.arange(n)
    if case.mask in ("top_w", "global"):
        return reference.top_w_dense(data["scores"][None, :, keys], w, {"top_w": "prefix"}.get(case.mask, "global"),
                                     query_length=len(p))
    start, stop = data["start"][None, :, None, keys], data["stop"][None, :, None, keys]
    return {"none": lambda: None, "causal": lambda: (j <= p)[None, None],
            "window": lambda: ((j <= p) & (j > p - w))[None, None],
            "padding": lambda: np.broadcast_to(data["padding"][keys], (1, 1, len(p), n)),
            "open": lambda: p[None, None] < stop[:, :1], "per_head": lambda: (start <= p) & (p < stop)}[case.mask]()


def _packed_runs(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """``start`` and ``stop`` in packed positions."""
    data = _drawn(case)
    first = np.concatenate((np.repeat(data["cu_k"][:-1], np.diff(data["cu_k"])), np.zeros(case.tail[1], int)))
    return tuple(np.where(np.isin(data[name], (EVER, NEVER)), data[name], data[name] + first).astype(np.int32)[None]
                 for name in ("start", "stop"))


def _spread(case: Case, packed: np.ndarray, fill: Any) -> np.ndarray:
    """``(heads, total_k)`` as ``(B, heads, capacity)``."""
    cu_k = _drawn(case)["cu_k"]
    found = np.full((case.batch, packed.shape[0], case.capacity), fill, packed.dtype)
    for b in range(case.batch):
        found[b, :, :cu_k[b + 1] - cu_k[b]] = packed[:, cu_k[b]:cu_k[b + 1]]
    return found


def _mask(case: Case, convert: Callable[[np.ndarray], Any], like: Any) -> Any:
    data, M, paged = _drawn(case), dma.IntervalMask, case.page_size > 0
    n = case.capacity if paged else data["key"].shape[0]
    if case.mask in ("open", "per_head"):
        if paged:
            start, stop = (_spread(case, data[name].astype(np.int32), 0) for name in ("start", "stop"))
        else:
            start, stop = _packed_runs(case)
        if case.mask == "open":
            return M(convert(np.full((1, 1, n), EVER, np.int32)), convert(np.ascontiguousarray(stop[:, :1])))
        return M(convert(start), convert(stop))
    padding = _spread(case, data["padding"][None], False)[:, 0] if paged else data["padding"][None]
    return {"none": lambda: None, "causal": lambda: M.causal(n, like=like),
            "window": lambda: M.sliding_window(n, case.window, like=like),
            "padding": lambda: M.padding(convert(padding))}[case.mask]()


def _wide(array: np.ndarray, convert: Callable[[np.ndarray], Any]) -> Any:
    base = np.full((*array.shape[:-1], array.shape[-1] + 8), np.nan, array.dtype)
    base[..., :array.shape[-1]] = array
    return convert(base)[..., :array.shape[-1]]


def _in_pages(case: Case, name: str, table: np.ndarray, convert: Callable[[np.ndarray], Any]) -> Any:
    """The packed rows in their pages, NaN where there are none, with the strides of the layout."""
    data = _drawn(case)
    g, d = data[name].shape[1:]
    pages = np.full((table.size + 3, case.page_size, g, d), np.nan, data[name].dtype)
    for b, used in enumerate(case.keys):
        for j in range(used):
            pages[table[b, j // case.page_size], j % case.page_size] = data[name][data["cu_k"][b] + j]
    if case.layout == "transposed":
        return convert(np.ascontiguousarray(pages.swapaxes(1, 2))).swapaxes(1, 2)
    if case.layout == "split":  # key and value pages alternate
        base = np.full((len(pages), 2, *pages.shape[1:]), np.nan, pages.dtype)
        base[:, int(name == "value")] = pages
        return convert(base)[:, int(name == "value")]
    return _wide(pages, convert) if case.layout == "wide" else convert(pages)


def arguments(case: Case, convert: Callable[[np.ndarray], Any] = np.asarray) -> tuple[list[Any], dict[str, Any]]:
    """Positional and named arguments, without mask and bias."""
    data = _drawn(case)
    laid_out = convert if case.layout != "wide" else lambda x: _wide(x, convert)
    named: dict[str, Any] = {"scale": None, "softcap": case.softcap, "causal": case.causal,
                             **delay_of(case)}
    if case.page_size:
        rng = np.random.default_rng(0)
        max_pages = case.capacity // case.page_size
        table = rng.permutation(case.batch * max_pages + 3)[:case.batch * max_pages].reshape(case.batch, -1)
        k, v = (_in_pages(case, name, table, convert) for name in ("key", "value"))
        for b, used in enumerate(case.keys):
            table[b, -(-used // case.page_size):] = -1  # never read
        named.update(block_table=convert(table.astype(np.int32)), seqused_k=convert(np.array(case.keys, np.int32)))
        return [laid_out(data["query"]), k, v, convert(data["cu_q"]), None], named
    if case.used:
        named["seqused_k"] = convert(np.array(case.used, np.int32))
    return [*(laid_out(data[name]) for name in ("query", "key", "value")), convert(data["cu_q"]),
            convert(data["cu_k"])], named


def _per_key(case: Case, name: str, convert: Callable[[np.ndarray], Any]) -> Any:
    data = _drawn(case)
    if name not in data:
        return None
    return convert(_spread(case, data[name], np.nan) if case.page_size else data[name])


def _effective(case: Case) -> Case:
    """The bias of a case; selections use the scores."""
    return replace(case, bias="scores") if case.mask in ("top_w", "global") and case.bias in ("none", "key") else case


def with_mask_and_bias(case: Case, convert: Callable[[np.ndarray], Any], **options: Any) -> dict[str, Any]:
    """The mask and bias of a case; a selection by the public ``top_w`` (packed keys without a tail only), a global one
    by the oracle, because ``top_w`` does not know of ``seqused_k``."""
    data = _drawn(case)
    positional, _ = arguments(case, convert)
    bias = _per_key(case, "scores" if _effective(case).bias == "scores" else "bias", convert)
    if case.mask == "top_w":
        return {"mask": dma.IntervalMask.top_w(convert(data["scores"][None]), case.window,
                                               documents=convert(data["cu_k"]), **options), "bias": bias}
    if case.mask == "global":
        stop = np.full((1, *data["scores"].shape), EVER, np.int32)
        for b, used in enumerate(case.keys):
            keys = slice(data["cu_k"][b], data["cu_k"][b] + used)
            kept = reference.top_w_dense(data["scores"][None, :, keys], case.window, "global", query_length=1)
            stop[0, :, keys][kept[0, :, 0]] = NEVER
        return {"mask": dma.IntervalMask(convert(np.full((1, 1, stop.shape[2]), EVER, np.int32)), convert(stop)),
                "bias": bias}
    return {"mask": _mask(case, convert, positional[0]), "bias": bias}


def run(case: Case, convert: Callable[[np.ndarray], Any] = np.asarray, **options: Any) -> tuple[Any, Any]:
    """``(out, lse)`` on arrays made by ``convert``: selections by ``varlen_dynamic_mask_attention``."""
    positional, named = arguments(case, convert)
    if _effective(case).bias == "scores":
        named["causal"] = case.mask == "top_w"
        return dma.varlen_dynamic_mask_attention(
            *positional, _per_key(case, "scores", convert), window=case.window,
            keys={"top_w": "prefix"}.get(case.mask, "global"), **named, tail_padding=case.tail != (0, 0),
            return_lse=True, **options)
    return dma.varlen_attention(*positional, **named, **with_mask_and_bias(case, convert, **options),
                                tail_padding=case.tail != (0, 0), return_lse=True, **options)


def run_backward(case: Case, convert: Callable[[np.ndarray], Any] = np.asarray, **options: Any) -> Any:
    positional, named = arguments(case, convert)
    backend = {"backend": options["backend"]} if "backend" in options else {}
    named.update(with_mask_and_bias(case, convert, **backend))
    out, lse = dma.varlen_attention(*positional, **named, tail_padding=case.tail != (0, 0), return_lse=True, **options)
    data = _drawn(case)
    return dma.backward.varlen_attention_backward(convert(data["dout"]), *positional[:3], out, lse, *positional[3:],
                                                  **named, dlse=convert(data["dlse"]), **options)


def _parts(case: Case) -> Iterator[tuple[slice, slice, tuple[Any, ...]]]:
    """Rows, keys and the oracle's arguments of each sequence."""
    data, name = _drawn(case), "scores" if _effective(case).bias == "scores" else "bias"
    for b, used in enumerate(case.keys):
        rows = slice(data["cu_q"][b], data["cu_q"][b + 1])
        keys = slice(data["cu_k"][b], data["cu_k"][b] + used)
        bias = data[name][None, :, keys] if name in data else None
        yield rows, keys, (data["query"][None, rows], data["key"][None, keys], data["value"][None, keys],
                           _dense(case, b), bias, case.causal, None, case.softcap)


def check(case: Case, out: np.ndarray, lse: np.ndarray, *, tf32: bool = False) -> None:
    """Section 12 over all sequences together; rows of no sequence are 0 and -inf. ``tf32``: as in cases.py."""
    data = _drawn(case)
    shape, kind, out, lse = data["query"].shape, numpy_dtype(case.dtype), host(out), host(lse)
    assert out.dtype == kind and out.shape == shape and lse.shape == (case.heads, shape[0])
    assert lse.dtype == (np.float64 if case.dtype == "float64" else np.float32)
    ref, plain = np.zeros(shape), np.zeros(shape, kind)
    ref_lse = np.full(lse.shape, -np.inf)
    plain_lse = ref_lse.astype(lse.dtype)
    for rows, _, given in _parts(case):
        (ref[rows],), (ref_lse[:, rows],) = reference.attention(*given, bias_delay=case.bias_delay)
        (plain[rows],), (plain_lse[:, rows],) = reference.same_precision_attention(*given, bias_delay=case.bias_delay,
                                                                                   tf32=tf32)
    reference.assert_matches_reference(out, ref, plain, out.dtype)
    reference.assert_matches_reference(lse, ref_lse, plain_lse, lse.dtype)


def check_backward(case: Case, gradients: Any, *, tf32: bool = False) -> None:
    data = _drawn(case)
    names = {"query": "query", "key": "key", "value": "value",
             "bias": "scores" if _effective(case).bias == "scores" else "bias"}
    names = {name: source for name, source in names.items() if source in data}
    ref = {name: np.zeros(data[source].shape) for name, source in names.items()}
    plain = {name: np.zeros(data[source].shape, data[source].dtype) for name, source in names.items()}
    terms = dict.fromkeys(names, 0.0)
    for rows, keys, given in _parts(case):
        given = (data["dout"][None, rows], *given, data["dlse"][None, :, rows], None, case.bias_delay)
        found = zip(reference.attention_gradients(*given),
                    reference.same_precision_attention_gradients(*given, tf32=tf32),
                    reference.attention_gradient_terms(*given))
        for name, (exact, near, size) in zip(("query", "key", "value", "bias"), found):
            if exact is None:
                continue
            where = np.s_[rows] if name == "query" else np.s_[:, keys] if name == "bias" else np.s_[keys]
            ref[name][where], plain[name][where], terms[name] = exact[0], near[0], max(terms[name], size)
    for name, gradient in zip(("query", "key", "value", "bias"), map(host, gradients)):
        assert (gradient is None) == (name not in names)
        if gradient is not None:
            print(f"d{name}: ", end="")
            assert gradient.dtype == data[names[name]].dtype and gradient.shape == data[names[name]].shape
            reference.assert_matches_reference(gradient, ref[name], plain[name], gradient.dtype, factor=3,
                                               terms=terms[name])
