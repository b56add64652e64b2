"""Sums of float32 arrays over outer axes, rounded to a type (``kernels/common/sums.cu``)."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupy_dma.arrays import Operand
from cupy_dma.backends.cuda.runtime import jit
from cupy_dma.backends.cuda.runtime.builder import Array, Builder
from cupy_dma.backends.cuda.runtime.configs import ELEMENTS, blocks

THREADS = 256  # as in the kernel file


@dataclass(frozen=True)
class SumConfig(jit.Config):
    source = "common/sums.cu"
    result: str


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes to sum over: extents and strides, in elements; 1 and 0 for absent axes."""

    rows: int = 1  # of the result
    row: int = 0
    columns: int = 1
    firsts: int = 1
    first: int = 0
    seconds: int = 1
    second: int = 0


def add_rows(build: Builder, array: Array, axes: Axes, dtype: str, shape: tuple[int, ...]) -> Array:
    """``result[o, i]``, ``rows x columns`` numbers in this ``shape``: the sum over ``firsts`` and ``seconds``."""
    return _add(build, array, axes, dtype, shape, "add_rows", blocks(axes.rows * axes.columns, THREADS))


def add_all(build: Builder, array: Array, axes: Axes, dtype: str, shape: tuple[int, ...]) -> Array:
    """``result[o]``, ``rows`` numbers in this ``shape``: the sum over ``firsts`` and the contiguous ``columns``."""
    return _add(build, array, axes, dtype, shape, "add_all", axes.rows)


def add_splits(build: Builder, dtype: str, fields: dict[str, Any]) -> None:
    """Launches the sums over query splits: ``fields`` of ``SplitParams``, results of this ``dtype``."""
    arrays = ("partial_key" in fields) + ("partial_value" in fields)
    numbers = arrays * fields["size"] // 4 + ("partial_bias" in fields) * fields["rows"] * fields["length"]
    build.launch(build.load(SumConfig(ELEMENTS[dtype]), "add_splits"), blocks(numbers, THREADS), THREADS,
                 jit.params("common/sums.cu", "SplitParams").pack_some(fields))


def sum_to_bias(build: Builder, dbias: Array, bias: Operand, shape: tuple[int, int, int]) -> Array:
    """float32 (B, H, Lk), of this ``shape``, summed over the axes along which the bias broadcasts; rounded once to the
    bias's type."""
    (batch, heads, length), (own_batch, own_heads, _, keys) = shape, bias.shape
    if (own_batch, own_heads, keys) == shape and bias.dtype == "float32":
        return dbias.reshape(bias.shape)
    rows, group = own_batch * own_heads, heads // own_heads
    outer = {"rows": rows, "row": group * length, "firsts": batch if own_batch == 1 else 1, "first": heads * length}
    if keys != length:
        axes, add = Axes(columns=group * length, **outer), add_all
    else:
        axes, add = Axes(columns=length, seconds=group, second=length, **outer), add_rows
    return add(build, dbias, axes, bias.dtype, bias.shape)


def _add(build: Builder, array: Array, axes: Axes, dtype: str, shape: tuple[int, ...], entry: str, grid: int) -> Array:
    result = build.empty(shape, dtype)
    if grid:
        params = jit.params("common/sums.cu", "SumParams").pack(
            **{"in": array.ref}, out=result.ref, first=axes.first, second=axes.second, row=axes.row,
            firsts=axes.firsts, seconds=axes.seconds, rows=axes.rows, columns=axes.columns)
        build.launch(build.load(SumConfig(ELEMENTS[dtype]), entry), grid, THREADS, params)
    return result
