"""``vmap`` and ``shard_map``.

Under ``vmap`` the same program runs with a larger batch: the new axis of every operand is merged with its axis B and
split off the results again. Parameters of scores have no axis B; if they are mapped, or their gradients are wanted for
every element, the elements run one after the other (``lax.map``).

Within ``shard_map`` a callback sees one shard. jax checks over which mesh axes a value varies, which callbacks do not
know; so operands are made to vary alike before the call, and results after it. The transpose of the former sums the
gradients of replicated operands over the shards.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

PARAMETERS = ("dt_proj", "A", "dt_bias")
_BROADCAST = ("bias", "start", "stop", "dense", "padding", "documents")  # a size of 1 may stand for any batch


def rule(program: Any, run_program: Callable[..., dict[str, Any]], size: int, mapped: Sequence[bool],
         *arrays: Any) -> tuple[tuple[Any, ...], tuple[bool, ...]]:
    """The rule of ``custom_vmap`` for a program: results, and which of them are mapped."""
    task, specs = program.task, program.specs
    per_element = {name for name, is_mapped in zip(specs, mapped) if is_mapped and (
        name in PARAMETERS or name == "documents" and len(specs[name][0]) == 1)}
    if per_element or set(task.needs).intersection(PARAMETERS):
        return _one_by_one(program, mapped, arrays)
    batch = next(specs[name][0][0] for name in ("query", "value", "scores") if name in specs)
    given = {name: _merged(name, x, is_mapped, size, batch, name in task.needs)
             for (name, is_mapped), x in zip(zip(specs, mapped), arrays)}
    found = run_program(task, given)
    split = [_split(found[name], shape, dtype, size, batch) for name, (shape, dtype) in program.results.items()]
    return tuple([x for x, _ in split]), tuple([is_mapped for _, is_mapped in split])


def _one_by_one(program: Any, mapped: Sequence[bool], arrays: Sequence[Any]) -> tuple[Any, tuple[bool, ...]]:
    def element(some: list[Any]) -> tuple[Any, ...]:
        own = iter(some)
        return program.run(*[next(own) if is_mapped else x for is_mapped, x in zip(mapped, arrays)])

    found = jax.lax.map(element, [x for is_mapped, x in zip(mapped, arrays) if is_mapped])
    return found, (True,) * len(program.results)


def _merged(name: str, x: Any, is_mapped: bool, size: int, batch: int, wanted: bool) -> Any:
    """An operand ``(size, 1|B, ...)``, or without the first axis if not ``is_mapped``, as ``(1 | size * B, ...)``.
    ``wanted``: its gradient is needed, for every element."""
    if name in PARAMETERS or name == "documents" and x.ndim == 1:
        return x
    own = x.shape[1] if is_mapped else x.shape[0]
    if not is_mapped and own == 1 and name in _BROADCAST and not wanted:
        return x
    if wanted and own < batch and x.dtype.itemsize == 2:
        x = x.astype(jnp.float32)  # its gradient is summed over the batch before it is rounded
    x = x if is_mapped else x[None]
    x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
    return x.reshape(size * batch, *x.shape[2:])


def _split(x: Any, shape: tuple[int, ...], dtype: str, size: int, batch: int) -> tuple[Any, bool]:
    """A result for the merged batch as one of ``shape`` for every element, and whether it is mapped."""
    if x.shape[0] != size * batch:
        return x, False
    x = x.reshape(size, batch, *x.shape[1:])
    if shape[0] == batch:
        return x, True
    if dtype == "int32":  # the starts of a mask: those of all rows are equal
        return x[:, :1], True
    return x.sum(1, keepdims=True).astype(dtype), True


# ---- shard_map ------------------------------------------------------------------------------------------------------


def manual_axes(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The axes of the mesh over which any of these varies."""
    found: set[Any] = set()
    for x in arrays:
        found |= _axes_of(x)
    return tuple(sorted(found, key=str))


def varying(x: Any, axes: tuple[Any, ...]) -> Any:
    """``x``, varying over these axes."""
    missing = tuple([axis for axis in axes if axis not in _axes_of(x)]) if axes else ()
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _axes_of(x: Any) -> frozenset[Any]:
    kind: Any = jax.typeof(x)
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


def alike(*arrays: dict[str, Any]) -> list[dict[str, Any]]:
    """Dicts of arrays, all varying over the same axes."""
    axes = manual_axes([x for some in arrays for x in some.values()])
    return [{name: varying(x, axes) for name, x in some.items()} for some in arrays]
