"""Calls with a delayed key bias (section 16), for any backend: ``CASES``, ``LONG`` and ``FEW_QUERIES`` by ``run``,
``check``, ``run_backward`` and ``check_backward`` of ``tests/oracle/cases.py``, ``PACKED`` and ``PAGES`` by those of
``varlen_cases.py``.

Delays end before, in and after a block of 64 keys, with the window, and around the length. In ``extremes`` some keys
have a bias of -inf or 30, which must not apply to near queries, and keys whose bias applies to no query have a NaN.
"""
from typing import Any

from tests.oracle import varlen_cases
from tests.oracle.cases import Case

N, WINDOW, LARGEST = 150, 17, 2**30
DELAYS = (1, WINDOW, 63, 64, 65, N - 1, N, LARGEST)
LENGTHS = ((70, 150), (150, 70), (1, 150), (130, 300))


def _case(name: str, delay: int, mask: str = "causal", **changed: Any) -> Case:
    usual: dict[str, Any] = {"query_length": N, "key_length": N, "heads": 4, "kv_heads": 2, "window": WINDOW,
                             "bias": "key", "extremes": True}
    return Case(f"delay-{delay}-{name}", mask=mask, bias_delay=delay, **(usual | changed))


CASES = [
    *(_case(f"{mask}-{dtype}", delay, mask, dtype=dtype)
      for dtype, mask in (("float16", "causal"), ("bfloat16", "top_w")) for delay in DELAYS),
    *(_case("soft", delay, "survivors", extremes=False) for delay in (20, 64)),
    *(_case(mask, delay, mask)
      for mask in ("none", "window", "survivors", "global", "dense", "per_batch", "documents", "survivors+dense=1gqk")
      for delay in (WINDOW, 65)),
    *(_case(f"{lq}x{lk}-{mask}", delay, mask, query_length=lq, key_length=lk, causal=mask == "dense")
      for lq, lk in LENGTHS for mask in ("none", "causal", "survivors", "dense") for delay in (1, 64)),
    *(_case(f"{bias}-{h}/{g}", 20, "survivors", bias=bias, heads=h, kv_heads=g)
      for bias in ("key", "key_per_head", "key_shared") for h, g in ((2, 2), (6, 2), (3, 1))),
    *(_case(f"softcap-{mask}", delay, mask, softcap=3.0, scale=1.0)
      for mask in ("causal", "survivors", "dense") for delay in (1, 64)),
    *(_case(f"scale{scale}", 40, "survivors", scale=scale) for scale in (-0.3, 0.0)),
    _case("scale-0.3-softcap", 40, "survivors", scale=-0.3, softcap=2.0),
    *(_case(f"D{size}", 40, "survivors", head_dim=size) for size in (16, 64)),
    *(_case(f"float32-{mask}", 40, mask, dtype="float32") for mask in ("causal", "survivors", "dense")),
    _case("float64", 40, "survivors", dtype="float64", extremes=False),
    _case("sinks", 40, sinks="float32"), _case("value-dim", 40, value_dim=24),
    _case("every key alike", 40, bias="full=b111", extremes=False),
]
# names of a few cases, for slow tests
FEW = ("delay-1-causal-float16", "delay-65-top_w-bfloat16", "delay-150-causal-float16",
       "delay-65-survivors+dense=1gqk", "delay-64-130x300-none", "delay-64-150x70-survivors",
       "delay-20-key_per_head-6/2", "delay-1-softcap-survivors", "delay-40-scale-0.3",
       "delay-40-float32-causal", "delay-40-every key alike")
LONG = [
    *(_case(f"long-{mask}-D{size}-{i}", 100, mask, query_length=520, key_length=520, heads=2, kv_heads=1,
            head_dim=size, window=70, **({"extremes": False} | changed))
      for i, (size, changed) in enumerate((
          (64, {"extremes": True}), (128, {}), (256, {}), (128, {"softcap": 2.0, "scale": 0.3}),
          (64, {"softcap": 2.0})))
      for mask in ("none", "causal", "window", "top_w", "survivors")),
    _case("long-fewer-queries", 100, "survivors", query_length=260, key_length=520, heads=2, kv_heads=1, head_dim=64),
]
FEW_QUERIES = [
    _case(f"few-{lq}x700-{mask}", delay, mask, query_length=lq, key_length=700, heads=h, kv_heads=1, **changed)
    for delay in (1, 60) for lq, h in ((1, 4), (5, 2))
    for mask, changed in (("causal", {}), ("survivors", {}), ("none", {"head_dim": 64}),
                          ("top_w", {"softcap": 2.0, "extremes": False}))]
_USED = (20, 3, 40, 0, 77, 12, 0, 140)
PACKED = [varlen_cases.Case(f"delay-{delay}-{mask}", mask=mask, bias_delay=delay, **({"bias": "key"} | changed))
          for delay in (1, 30, LARGEST)
          for mask, changed in (("causal", {}), ("none", {"softcap": 2.0}), ("window", {"bias": "key_per_head"}),
                                ("per_head", {"tail": (70, 11)}), ("top_w", {}),
                                ("open", {"causal": True, "used": _USED}))]
PAGES = [varlen_cases.Case(f"delay-{delay}-pages-{mask}", mask=mask, bias="key", causal=mask == "none", page_size=16,
                           bias_delay=delay) for delay in (1, 30) for mask in ("none", "per_head", "top_w")]
