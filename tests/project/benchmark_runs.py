"""What the tests of several benchmarks share: small tensors, a run of a smoke set, and what its tables must have."""
from __future__ import annotations

import json
import warnings
from typing import Any

import cupy_dma as dma
from cupy_dma.masks.interval import IntervalMask


def small(torch, heads=4, kv_heads=2, n=256, dtype=None, window=40):
    """dout, query, key, value, scores, mask."""
    generator = torch.Generator().manual_seed(1)
    do, q, k, v = (torch.randn(1, n, h, 16, generator=generator, dtype=dtype) for h in
                   (heads, heads, kv_heads, kv_heads))
    scores = torch.randn(1, kv_heads, n, generator=generator)
    return do, q, k, v, scores, IntervalMask.top_w(scores, window=window)


def gradients_of(do, q, k, v, scores, mask):
    out, lse = dma.attention(q, k, v, mask=mask, bias=scores, return_lse=True)
    return out, lse, dma.backward.attention_backward(do, q, k, v, out, lse, mask=mask, bias=scores)


def smoke_run(benchmark: Any, name: str, tmp_path_factory: Any, *arguments: str) -> dict[str, Any]:
    """What a run of the smoke set records."""
    folder = tmp_path_factory.mktemp("results")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"flex_attention called without torch.compile")  # given once a process
        assert benchmark.main(["--set", "smoke", "--out", str(folder), *arguments]) == 0
    result = json.loads((folder / f"{name}.json").read_text())
    assert {"method", "device", "versions", "commit", "date", "cases"} <= set(result)
    assert all(case["check"]["ok"] for case in result["cases"])
    return result


def check_tables(renderer: Any, result: dict[str, Any], folder: Any, row: str, words: str) -> None:
    """The table has the row, and stands between its marks in a page; the text has the words; the chart is drawn."""
    table = renderer.table(result)
    assert row in table
    for part in table.split("\n\n"):
        assert len({line.count("|") for line in part.splitlines() if line.startswith("|")}) <= 1
    assert words in renderer.text(result)
    page = folder / "page.md"
    page.write_text(f"before\n{renderer.begin}\nold\n{renderer.end}\nafter\n")
    renderer.update(page, result)
    assert page.read_text() == f"before\n{renderer.begin}\n{table}\n{renderer.end}\nafter\n"


def check_nothing_recorded(benchmark: Any, name: str, folder: Any) -> dict[str, Any]:
    """A run that fails exits with 1 and leaves the results alone; what it found stands beside them."""
    assert benchmark.main(["--set", "smoke", "--seconds", "0", "--out", str(folder)]) == 1
    assert not (folder / f"{name}.json").exists()
    return json.loads((folder / f"{name}.failed.json").read_text())


def check_names(cases: list[Any]) -> None:
    assert len({case.name for case in cases}) == len(cases) > 0
