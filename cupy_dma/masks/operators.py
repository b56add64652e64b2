"""Operators that would silently do something else than combine two masks."""
from __future__ import annotations

from typing import Any, NoReturn

_INSTEAD = {"&": "to see what both show pass them as mask=(mask, array)",
            "|": "unite it with the dense mask, mask.to_dense(query_length) | array",
            "==": "compare the dense mask, mask.to_dense(query_length) == array"}


class MaskOperators:
    """A base of masks."""

    __slots__ = ()
    __array_ufunc__ = None  # or NumPy would apply array & mask to each element

    def __bool__(self) -> NoReturn:
        raise TypeError("a mask has no truth value: 'a and b' would be b alone; write a & b for what both show, a | b "
                        "for what either does, and 'mask is None' to ask whether there is one")

    def __rand__(self, other: Any) -> Any:
        return self._with(other, "&")

    def __ror__(self, other: Any) -> Any:
        return self._with(other, "|")

    def _with(self, other: Any, sign: str) -> Any:
        """``mask sign other`` where that is no mask: TypeError for an array, else NotImplemented."""
        if isinstance(other, MaskOperators) or not hasattr(other, "shape"):
            return NotImplemented
        raise TypeError(f"mask {sign} array is not defined, got {type(other).__module__}.{type(other).__qualname__}: "
                        f"{_INSTEAD[sign]}")
