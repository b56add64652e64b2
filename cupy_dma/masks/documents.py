"""Documents: several sequences packed in one row, each of which sees only its own keys.

The caller passes cumulative lengths ``(n + 1,)`` or an id per key ``(B, Lk)``; masks need, for each key, the run of
keys of its document.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Device, Library, Operand
from cupy_dma.masks.runs import EVER, NEVER, Hints, Runs


@dataclass(frozen=True, slots=True, eq=False)
class DocumentRuns:
    """First key and end (one past the last key) of every key's document, int32 ``(1|B, Lk)``."""

    library: Library
    device: Device
    key_length: int
    keys: Any  # int32 (Lk,): 0, 1, ...
    first: Any
    end: Any

    def open_first(self) -> Any:
        """``first``, with the first document visible to all earlier positions too."""
        with self.library.on(self.device):
            ever = self.library.full((1, 1), EVER, "int32", self.device)
            return self.library.xp.where(self.first > 0, self.first, ever)

    def open_end(self) -> Any:
        """``end``, with the last document visible to all later positions too."""
        with self.library.on(self.device):
            never = self.library.full((1, 1), NEVER, "int32", self.device)
            return self.library.xp.where(self.end < self.key_length, self.end, never)


def check_documents(documents: Operand, key_length: int | None) -> int:
    """The key length of documents, which are cumulative lengths ``(n + 1,)`` or ids ``(B, Lk)``; see
    ``IntervalMask.documents``."""
    checks.one_of_types(documents, checks.INTEGERS)
    if documents.ndim not in (1, 2) or documents.shape == (0,):
        raise ValueError(f"documents must be cumulative lengths (documents + 1,) or ids (B, Lk), "
                         f"got shape {documents.shape}")
    if key_length is not None:
        key_length = checks.whole(key_length, "key_length", 0)
    if documents.ndim == 2:
        rows, length = documents.shape
        if key_length not in (None, length):
            raise ValueError(f"key_length must be the length of documents' rows, {length}, got {key_length}")
        if rows * length > NEVER:
            raise ValueError(f"documents may have at most 2**31 - 1 ids, got shape {documents.shape}")
        return length
    if key_length is None:
        with documents.library.on(documents.device):
            key_length = checks.whole(int(documents.array[-1]), "key_length", 0)
    if checks.values_known(documents):
        values, count = documents.library.to_numpy(documents.array), documents.shape[0]
        if values[0] != 0 or (values[1:] < values[:-1]).any() or values[-1] != key_length:
            raise ValueError(f"documents must be cumulative lengths that start at 0, never decrease and end at the "
                             f"key length {key_length}, got {values.tolist()[:16]}{' ...' if count > 16 else ''}")
    return key_length


def document_runs(documents: Operand, key_length: int) -> DocumentRuns:
    """The runs of checked documents."""
    library, device = documents.library, documents.device
    with library.on(device):
        if documents.ndim == 2:
            return _runs_of_ids(documents)
        return runs_between(library, device, library.astype(documents.array, "int32"), key_length)


def runs_between(library: Library, device: Device, bounds: Any, key_length: int) -> DocumentRuns:
    """The runs between int32 ``bounds (n + 1,)``; keys past the last bound belong to an empty run."""
    count = bounds.shape[0]
    keys = library.arange(0, key_length, device)
    after = library.search_right(bounds, keys)  # index of the bound that ends the key's document
    inside = library.xp.where(after < count, after, after * 0 + (count - 1))
    return DocumentRuns(library, device, key_length, keys, bounds[after - 1][None], bounds[inside][None])


def _runs_of_ids(documents: Operand) -> DocumentRuns:
    library, device = documents.library, documents.device
    rows, key_length = documents.shape
    ids, keys = documents.array, library.arange(0, key_length, device)
    changes = library.full((rows, key_length), 0, "int32", device)
    if key_length > 1:
        changes[:, 1:] = library.astype(ids[:, 1:] != ids[:, :-1], "int32")
    # Numbered across all rows, the documents form one sorted list; a search in it gives both ends of every run.
    row = library.arange(0, rows, device)[:, None] * key_length
    number = (library.cumsum(changes) + row).reshape(-1)
    first = library.search_right(number, number - 1).reshape(rows, key_length) - row
    end = library.search_right(number, number).reshape(rows, key_length) - row
    return DocumentRuns(library, device, key_length, keys, first, end)


def documents_mask(runs: DocumentRuns, causal: bool) -> Runs:
    """Every position sees the keys of its own document; with ``causal``, only those up to itself."""
    if causal:
        return Runs(runs.keys, runs.open_end()[:, None], Hints("key"))
    return Runs(runs.open_first()[:, None], runs.open_end()[:, None])
