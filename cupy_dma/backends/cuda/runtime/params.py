"""The parameter struct of a kernel, read from its source, and the arguments packed from it."""
from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from cupy_dma.arrays import ALIGNMENT


class Ref(NamedTuple):
    """An address in a program: ``offset`` bytes into the buffer with this number, wherever it will be allocated."""

    buffer: int
    offset: int = 0

    def __add__(self, offset: int) -> Ref:  # type: ignore[override]
        return Ref(self.buffer, self.offset + offset)

    def __mod__(self, size: int) -> int:
        assert ALIGNMENT % size == 0, size
        return self.offset % size


class Packed(NamedTuple):
    """Bytes of a kernel's argument, with holes of 8 bytes where addresses belong."""

    data: bytes
    refs: tuple[tuple[int, Ref], ...] = ()  # at which byte

    def __add__(self, other: Packed | bytes) -> Packed:  # type: ignore[override]
        """Followed by ``other``."""
        more = Packed(other) if isinstance(other, bytes) else other
        at = len(self.data)
        return Packed(self.data + more.data, self.refs + tuple((at + i, ref) for i, ref in more.refs))

    def padded(self, multiple: int) -> Packed:
        """Zero-padded to a multiple of this many bytes."""
        return self._replace(data=self.data + bytes(-len(self.data) % multiple))


def pack_pointer(pointer: Ref | int) -> Packed:
    """One pointer; 0: none."""
    return Packed(bytes(8), ((0, pointer),)) if isinstance(pointer, Ref) else Packed(pointer.to_bytes(8, "little"))


class Params:
    """The parameter struct ``name`` in a source ``text``, parsed from there so that it is defined only once.

    ``pack(**fields)`` gives the by-value argument of a launch: bytes, or ``Packed`` if a field is a ``Ref``. The field
    of an int array is bytes; missing ones are 0.
    """

    _formats: ClassVar[dict[str, str]] = {"long long": "q", "int": "i", "float": "f"}

    def __init__(self, text: str, name: str):
        body = re.search(rf"struct {name} \{{(.*?)\n\}};", text, re.DOTALL)
        assert body, f"no struct {name}"
        code = re.sub(r"//[^\n]*", "", body[1])
        kinds: list[str] = []
        self.names: list[str] = []
        self.types: dict[str, str] = {}  # as written, such as "const float*" or "int"
        for statement in filter(None, (part.strip() for part in code.split(";"))):
            if "*" in statement:
                if "," in statement:
                    raise self._not_read(name, statement)
                kind, members = "P", [statement.rpartition("*")[2]]
                written = statement.rpartition("*")[0].strip() + "*"
            else:
                written = next((k for k in self._formats if statement.startswith(k + " ")), "")
                if not written:
                    raise self._not_read(name, statement)
                kind, members = self._formats[written], statement[len(written):].split(",")
            for member in members:
                found = re.fullmatch(r"\s*(\w+)(\[(\d+)\])?\s*", member)
                if found is None or found[2] and kind != "i":
                    raise self._not_read(name, statement)
                self.names.append(found[1])
                self.types[found[1]] = written + (found[2] or "")
                kinds.append(f"{4 * int(found[3])}s" if found[2] else kind)
        self._indices = {name: i for i, name in enumerate(self.names)}
        self._nothing: list[Any] = [b"" if kind.endswith("s") else 0 for kind in kinds]
        ends = [struct.calcsize("@" + "".join(kinds[:i + 1])) for i in range(len(kinds))]
        self._offsets = [end - struct.calcsize(kind) for end, kind in zip(ends, kinds)]
        self._pack = struct.Struct("@" + "".join(kinds) + "0q").pack  # padded to the struct's alignment

    def _not_read(self, name: str, statement: str) -> ValueError:
        return ValueError(f"struct {name} may have members of type {', '.join(self._formats)}, arrays of int, and "
                          f"pointers, each in a statement of its own, got {statement!r}")

    def pack(self, **fields: Any) -> Any:
        return self._packed([fields[name] for name in self.names])

    def pack_some(self, *groups: Mapping[str, Any]) -> Any:
        """The argument with the fields of all ``groups``, later ones first; missing fields are 0."""
        values = list(self._nothing)
        indices = self._indices
        for group in groups:
            for name, value in group.items():
                values[indices[name]] = value
        return self._packed(values)

    def _packed(self, values: list[Any]) -> Any:
        refs = []
        for i, value in enumerate(values):
            if type(value) is Ref:
                refs.append((self._offsets[i], value))
                values[i] = 0
        data = self._pack(*values)
        return Packed(data, tuple(refs)) if refs else data
