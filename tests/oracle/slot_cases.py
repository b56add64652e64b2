"""A cache whose sequences come and go in slots, compared with a separate cache per sequence. Shared by NumPy, torch,
CuPy and the emulator."""
import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.oracle import reference
from tests.oracle.arrays import host
from tests.oracle.cache_cases import History, packed

OPERATIONS = ("extend", "extend", "extend", "update", "speculate", "speculate", "reset", "all")
COPIES = ("select", "reorder", "save", "pickle")


@dataclass
class Text:
    """The tokens of one sequence, from its reset to the next."""

    case: History  # of batch 1
    done: int = 0
    outs: list[Any] = field(default_factory=list)  # (begin, out (L, H, Dv), lse (H, L)) of its tokens

    def alone(self, convert: Callable, **options: Any) -> Any:
        """A separate cache that got the text's tokens in one call."""
        cache = self.case.cache(convert, **options)
        if self.done:
            cache.update(*self.case.tokens(0, self.done, convert)[1:])
        return cache

    def check(self, tf32: bool) -> None:
        """Check all results, also those of rejected tokens, against attention over the text."""
        if not any(len(out) for _, out, _ in self.outs):
            return
        begins, outs, lses = zip(*self.outs)
        tokens = np.concatenate([np.arange(begin, begin + len(out)) for begin, out in zip(begins, outs)])
        (ref, plain), (ref_lse, plain_lse) = self.case.oracle(tf32=tf32)
        out, lse = np.concatenate(outs), np.concatenate(lses, 1)
        reference.assert_matches_reference(out, ref[0, tokens], plain[0, tokens], out.dtype)
        reference.assert_matches_reference(lse, ref_lse[0][:, tokens], plain_lse[0][:, tokens], lse.dtype)


@dataclass
class Slots:
    """``case.batch`` slots; ``case.length`` is the maximum length of a text."""

    case: History
    rng: np.random.Generator
    convert: Callable = np.asarray
    tf32: bool = False
    most: int = 6  # maximum tokens of a call
    named: bool = True  # whether some calls name slots
    options: dict[str, Any] = field(default_factory=dict)  # of the cache

    def __post_init__(self) -> None:
        self.cache = self.case.cache(self.convert, **self.options)
        self.texts = [self._text(slot) for slot in range(self.case.batch)]

    def _text(self, seed: int) -> Text:
        return Text(replace(self.case, batch=1, seed=seed))

    def arrays(self, slot: int) -> list[bytes]:
        """The stored arrays of a sequence; for a growing cache, only the kept rows."""
        one = self.cache.select_batch([slot])
        if getattr(one, "capacity", 0) is None:
            return [x.tobytes() for x in _ordered(one)]
        return [np.array(host(getattr(one._state, name).array)).tobytes() for name in one._state.arrays]

    def run(self, operations: int, what: tuple[str, ...] = OPERATIONS) -> None:
        for _ in range(operations):
            self.step(str(self.rng.choice(what)))
        for text in self.texts:
            text.check(self.tf32)

    def step(self, what: str) -> None:
        """Make one call, and check that other sequences keep all their bits."""
        if what in COPIES:
            return self._copy(what)
        rng, batch = self.rng, self.case.batch
        before = [self.arrays(slot) for slot in range(batch)]
        slots = rng.permutation(batch)[:0 if rng.random() < 0.05 else rng.integers(1, batch + 1)]
        slots = np.where(rng.random(len(slots)) < 0.25, -1, slots).astype(rng.choice(["int32", "int64"]))
        if what == "all":
            slots = np.arange(batch)
        named = slots[slots >= 0].tolist()
        full = [slot for slot in named if self.texts[slot].done + self.most > self.case.length]
        if what == "reset":
            self._reset(slots)
        else:
            self._reset(np.array(full, np.int64))
            self._tokens(what, slots)
        assert all(self.arrays(slot) == before[slot] for slot in set(range(batch)) - set(named))
        lengths = host(self.cache.length).tolist()
        assert lengths == [text.done for text in self.texts]
        for slot in named:
            if self.texts[slot].done:
                self._check_kept(slot)

    def _copy(self, what: str) -> None:
        """Go on with a copy of some or all sequences; the cache it was copied from changes."""
        before, rows = self.cache, list(range(self.case.batch))
        if what in ("select", "reorder"):
            rows = self.rng.integers(0, len(rows), self.rng.integers(1, 5) if what == "select" else len(rows)).tolist()
            self.texts = [replace(self.texts[row], outs=[*self.texts[row].outs]) for row in rows]
            self.case = replace(self.case, batch=len(rows))
            rows = self.convert(np.array(rows, np.int32)) if self.rng.random() < 0.5 else rows
        if what == "select":
            self.cache = before.select_batch(rows)
        elif what == "reorder":
            self.cache = before.clone()
            self.cache.reorder(rows)
        elif what == "save":
            self.cache = self.case.cache(self.convert, **self.options)
            self.cache.load_state_dict(before.state_dict())
        else:
            self.cache = pickle.loads(pickle.dumps(copy.deepcopy(before)))
        before.reset()
        for slot, text in enumerate(self.texts):
            if text.done:
                self._check_kept(slot)

    def _reset(self, slots: np.ndarray) -> None:
        self.cache.reset(self.convert(slots) if self.rng.random() < 0.5 else slots.tolist())
        for slot in slots[slots >= 0].tolist():
            self.texts[slot].check(self.tf32)
            self.texts[slot] = self._text(int(self.rng.integers(1000)))

    def _check_kept(self, slot: int) -> None:
        """Check that the slot holds what the sequence's own cache would hold."""
        text = self.texts[slot]
        one, alone = self.cache.select_batch([slot]), text.alone(self.convert, **self.options)
        text.case.check_kept(one, text.done - 1)
        for mine, theirs in zip(_ordered(one), _ordered(alone)):
            np.testing.assert_array_equal(mine, theirs)
        if self.cache._record is not None:
            stops, expected = host(self.cache.stops())[slot], host(alone.stops())[0]
            for found in (stops[:, :text.done], host(one.stops())[0]):
                np.testing.assert_array_equal(found, expected)
            assert (stops[:, text.done:] == np.arange(text.done, stops.shape[1])).all()

    def _tokens(self, what: str, slots: np.ndarray) -> None:
        """``extend``, ``update``, or ``attend`` and ``commit`` of some tokens for these slots."""
        rng, n = self.rng, len(slots)
        speculates = what == "speculate"
        most = int(rng.choice([1, 1, 2, self.most]))
        added = rng.integers(0, most + 1, n) if rng.random() < 0.5 else np.full(n, most)
        added = added.astype(np.int32 if most == 1 else np.int64)
        tokens = [np.stack(x) for x in zip(*map(self._of, slots, [most] * n, added))] if n else [
            x[None][:0] for x in self._of(-1, most, 0)]
        how: dict[str, Any] = {"slots": slots} if what != "all" or self.named and rng.random() < 0.5 else {}
        if n and rng.random() < 0.4:
            tokens, how["cu_seqlens"] = packed(tokens, added, behind := int(rng.integers(0, 3)))
            how["tail_padding"] = behind > 0
        elif (added < most).any():
            how["lengths"] = added
        arrays = [self.convert(x) for x in tokens]
        how = {name: x if not isinstance(x, np.ndarray) else x.tolist() if most == 2 and n else self.convert(x)
               for name, x in how.items()}
        if what == "update":
            assert self.cache.update(*arrays[1:], **how) is None
            kept = added
        else:
            call = self.cache.attend if speculates else self.cache.extend
            out, lse = (host(x) for x in call(*arrays, **how, **self.case.call, scale=self.case.scale,
                                              softcap=self.case.softcap, return_lse=True))
            self._note(out, lse, slots, added, how.get("cu_seqlens") is not None)
            kept = added
        if speculates:
            kept = np.minimum(self._commit(n, min(most, arrays[1].shape[-3])), added)
        for slot, count in zip(slots, kept):
            if slot >= 0:
                self.texts[slot].done += int(count)

    def _commit(self, n: int, most: int) -> np.ndarray:
        """Commit some of the tokens that were attended to, the same number for all sequences or one number each."""
        if self.rng.random() < 0.3:
            count = int(self.rng.integers(0, most + 1))
            self.cache.commit(count)
            return np.full(n, count)
        counts = self.rng.integers(0, most + 1, n)
        self.cache.commit(self.convert(counts))
        return counts

    def _of(self, slot: int, most: int, n: int) -> list[np.ndarray]:
        """The next ``n`` tokens of a sequence, none for an empty slot, and NaN up to ``most``."""
        text = self.texts[max(slot, 0)]
        begin = text.done if slot >= 0 else 0
        found = [x[0].copy() for x in text.case.tokens(begin, begin + most)]
        for x, axis in zip(found, (0, 0, 0, 1)):
            np.moveaxis(x, axis, 0)[n if slot >= 0 else 0:] = np.nan
        return found

    def _note(self, out: np.ndarray, lse: np.ndarray, slots: np.ndarray, added: np.ndarray, is_packed: bool) -> None:
        """Record the results of real tokens, and check that those of padding are 0."""
        ends = np.cumsum(added)
        if is_packed:
            assert not out[ends[-1] if len(ends) else 0:].any()
        for i, (slot, n) in enumerate(zip(slots, added)):
            own = slice(ends[i] - n, ends[i])
            mine, its = (out[own], lse[:, own]) if is_packed else (out[i], lse[i])
            real = n if slot >= 0 else 0
            assert not mine[real:].any() and (its[:, real:] == -np.inf).all()
            if slot >= 0:
                text = self.texts[slot]
                text.outs.append((text.done, mine[:n].copy(), its[:, :n].copy()))


def _ordered(cache: Any) -> list[np.ndarray]:
    """Keys, values, scores and positions of what a cache of one sequence keeps, oldest first."""
    key, value, scores, _ = (np.array(host(x)) for x in cache._slots())
    where = np.array(host(cache.positions))
    found = []
    for head in range(where.shape[1]):
        order = [i for i in np.argsort(where[0, head], kind="stable") if where[0, head, i] >= 0]
        found += [x[0, head, order] for x in (key, value, scores, where)]
    return found
