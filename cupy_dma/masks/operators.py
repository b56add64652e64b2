"""Operators that Python or NumPy would apply to masks with another meaning: they raise."""
from __future__ import annotations

from typing import Any, NoReturn

_INSTEAD = {"&": "to intersect them pass mask=(mask, array)",
            "|": "unite it with the dense mask, mask.to_dense(query_length) | array",
            "==": "compare the dense mask, mask.to_dense(query_length) == array"}


class MaskOperators:
    """A base of masks."""

    __slots__ = ()
    __array_ufunc__ = None  # or NumPy would apply array & mask to each element

    def __bool__(self) -> NoReturn:
        raise TypeError("a mask has no truth value ('a and b' would return b): write a & b for the intersection, a | b "
                        "for the union, 'mask is None' to test for a missing mask")

    def __rand__(self, other: Any) -> Any:
        return self._with(other, "&")

    def __ror__(self, other: Any) -> Any:
        return self._with(other, "|")

    def _with(self, other: Any, sign: str) -> Any:
        """``mask sign other`` if ``other`` is not a mask: TypeError for an array, else NotImplemented."""
        if isinstance(other, MaskOperators) or not hasattr(other, "shape"):
            return NotImplemented
        raise TypeError(f"mask {sign} array is not defined, got {type(other).__module__}.{type(other).__qualname__}: "
                        f"{_INSTEAD[sign]}")
