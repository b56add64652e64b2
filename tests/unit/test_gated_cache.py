"""Histories for ``GatedCache`` with an explicit mask, which test_cache.py and test_slots.py run; rows and errors."""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest

import cupy_dma as dma
from cupy_dma.cache import gated_cache
from cupy_dma.masks.windows import each_head, widest
from tests.oracle.arrays import host
from tests.oracle.cache_cases import History

THRESHOLD = -1.0


@dataclass(frozen=True)
class Gates(History):
    """``recent`` is the delay; about a third of the gates are open."""

    recent: int = 4
    sinks: int = 1
    capacity: Any = None
    add_gates: bool = True
    values: Any = (-np.inf, -3.0, -1.5, -1.0, -0.5, 0.0)
    options: dict[str, Any] = field(default_factory=lambda: {"record_stops": True})

    def __str__(self):
        return f"gates-{super().__str__()}"

    @cached_property
    def data(self):
        found = super().data
        rng = np.random.default_rng(self.seed + 1)
        found["scores"] = rng.choice(np.float32(self.values), found["scores"].shape)
        return found

    @cached_property
    def mask(self):
        """The mask, step by step: the best open keys so far, recent keys and sinks."""
        gate, n = self.data["scores"], self.length
        found = np.zeros((self.batch, self.kv_heads, n, n), bool)
        bounds = each_head(n if self.capacity is None else self.capacity, self.kv_heads)
        for b, h, p in np.ndindex(self.batch, self.kv_heads, n):
            ranked = sorted((np.inf if np.isnan(gate[b, h, j]) else gate[b, h, j], j)
                            for j in range(p + 1) if not gate[b, h, j] < THRESHOLD)
            kept = [j for _, j in ranked[-bounds[h]:]]
            found[b, h, p, kept + [j for j in range(p + 1) if j < self.sinks or p - j < self.recent]] = True
        return found

    def cache(self, convert=np.asarray, **options):
        options = {"like": convert(self.data["query"][:1, :1]), "sinks": self.sinks, "delay": self.recent,
                   "threshold": THRESHOLD, "capacity": self.capacity, **self.options, **options}
        return dma.GatedCache(self.batch, self.kv_heads, self.head_dim, self.value_dim, self.dtype, **options)

    @property
    def call(self):
        return {"add_gates": self.add_gates}

    def oracle(self, **options):
        """Gates have no effect before their delay, and none afterwards on kept keys unless they are added as a bias."""
        plain = replace(History(**{name: getattr(self, name) for name in (
            "length", "batch", "heads", "kv_heads", "head_dim", "value_dim", "dtype", "softcap", "scale")}),
            bias_delay=self.recent)
        scores = self.data["scores"] if self.add_gates else np.zeros_like(self.data["scores"])
        plain.__dict__.update(data={**self.data, "scores": scores}, mask=self.mask)
        return plain.oracle(**options)

    def check_kept(self, cache, last=None):
        last = self.length - 1 if last is None else last
        positions, gates = (host(x) for x in cache.kept())
        for b, g in np.ndindex(self.batch, self.kv_heads):
            wanted = np.flatnonzero(self.mask[b, g, last])
            assert positions[b, g][positions[b, g] >= 0].tolist() == wanted.tolist()
            np.testing.assert_array_equal(gates[b, g, :len(wanted)], self.data["scores"][b, g, wanted])

    @property
    def bias(self):
        return {"bias": self.data["scores"], "bias_delay": self.recent} if self.add_gates else {}


def test_rows_follow_the_open_gates():
    """Without a capacity, each head has at most a quarter more rows than it needs, or 64. With one, exactly that."""
    case = Gates(length=400, batch=2, heads=2, head_dim=4)
    case.data["scores"][:, 1, 40:] = -3
    case.data["scores"][1, 0, 3::2] = -2
    cache = case.cache()
    assert cache.capacity is None and (cache.delay, cache.sinks, cache.threshold) == (4, 1, THRESHOLD)
    assert cache._state.segments.sizes == (64 + 4 + 1,) * 4
    empty = cache.memory_bytes - 69 * 4 * 45
    case.run(cache, [100, *[1] * 300])
    rooms = np.array(cache._state.segments.sizes) - 5
    counts = (case.data["scores"] >= THRESHOLD).sum(-1).ravel()
    assert (counts <= rooms).all() and (rooms <= counts + np.maximum(64, counts // 4) + 16).all()
    assert rooms[1] == rooms[3] == 64 < rooms[2] < rooms[0] == cache._state.window
    assert cache.memory_bytes - cache._record.memory_bytes == empty + sum(cache._state.segments.sizes) * 45
    case.check_kept(cache)
    swapped, turned = cache.select_batch([1, 0, 1]), cache.clone()
    turned.reorder([1, 0])
    for found, rows in ((swapped, [1, 0, 1]), (turned, [1, 0])):
        assert found._state.segments.sizes == tuple((rooms.reshape(2, 2) + 5)[rows].ravel())
    bounded = replace(case, capacity=7).cache()
    assert bounded.capacity == 7
    memory = bounded.memory_bytes
    replace(case, capacity=7).run(bounded, [100, *[1] * 50])
    assert bounded._state.rows == 7 + 4 + 1
    assert bounded.memory_bytes - memory == bounded._record.memory_bytes
    each = replace(case, capacity=(7, 30)).cache()
    assert each._state.segments.sizes == (12, 35) * 2
    other = case.cache()
    other._copy_from(cache)
    case.check_kept(other)
    cache.reset()
    case.check(*case.run(cache, [100]))


def test_the_host_reads_sizes_when_it_must(monkeypatch):
    reads, found = [], gated_cache._open
    monkeypatch.setattr(gated_cache, "_open", lambda *call: reads.append(1) or found(*call))
    case = Gates(length=200, values=(0.0,), options={})
    case.run(case.cache(), [1] * 200)
    assert len(reads) == 3  # at first, and when rows for 64 and 128 are used up
    reads.clear()
    case = replace(case, capacity=9)
    case.run(case.cache(), [1] * 20)
    assert not reads


@pytest.mark.parametrize(("options", "kind", "message"), [
    ({"delay": 0}, ValueError, "delay must be at least 1"), ({"threshold": -np.inf}, ValueError, "threshold must be a"),
    ({"capacity": 0}, ValueError, "capacity must be at least 1"), ({"sinks": -1}, ValueError, "sinks must be at le")])
def test_errors(options, kind, message):
    with pytest.raises(kind, match=message):
        Gates().cache(**options)


def test_errors_of_extend():
    case = Gates(capacity=3)
    cache = case.cache()
    query, key, value, gate = case.tokens(0, 3)
    with pytest.raises(ValueError, match="log_gate must have shape"):
        cache.extend(query, key, value, gate[:, :1])
    with pytest.raises(TypeError, match="add_gates must be True or False"):
        cache.extend(query, key, value, gate, add_gates=1)
    with pytest.raises(ValueError, match="saved must be of a cache with threshold"):
        Gates(capacity=3).cache(threshold=-2.0).load_state_dict(cache.state_dict())
    with pytest.raises(ValueError, match="saved must be of a cache with window=3"):
        cache.load_state_dict(Gates(capacity=4).cache().state_dict())
    assert widest(cache.window) == 3 and repr(cache).startswith("GatedCache(batch=2, ")
