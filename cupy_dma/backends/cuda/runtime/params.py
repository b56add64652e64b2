"""The parameter struct of a kernel, read from its source."""
from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Any, ClassVar


class Params:
    """The parameter struct ``name`` in a source ``text``, read from there so that it is written down once.

    ``pack(**fields)`` gives the by-value argument of a launch.
    """

    _formats: ClassVar[dict[str, str]] = {"long long": "q", "int": "i", "float": "f"}

    def __init__(self, text: str, name: str):
        body = re.search(rf"struct {name} \{{(.*?)\n\}};", text, re.DOTALL)
        assert body, f"no struct {name}"
        code = re.sub(r"//[^\n]*", "", body[1])
        form, self.names = "@", []
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
            form += kind * len(members)
            self.names += [member.strip() for member in members]
            self.types.update((member.strip(), written) for member in members)
        self._indices = {name: i for i, name in enumerate(self.names)}
        self._pack = struct.Struct(form + "0q").pack  # padded to the struct's alignment

    def _not_read(self, name: str, statement: str) -> ValueError:
        return ValueError(f"struct {name} may have members of type {', '.join(self._formats)}, and pointers, each in a "
                          f"statement of its own, got {statement!r}")

    def pack(self, **fields: Any) -> bytes:
        return self._pack(*[fields[name] for name in self.names])

    def pack_some(self, *groups: Mapping[str, Any]) -> bytes:
        """The argument with the fields of all ``groups``, later ones first; 0 for a field that none has."""
        values: list[Any] = [0] * len(self.names)
        indices = self._indices
        for group in groups:
            for name, value in group.items():
                values[indices[name]] = value
        return self._pack(*values)
