"""Derivatives: ``jax.custom_vjp`` around the programs.

    attend      floats, others -> out, lse            gradients for the floats, through out and lse
    scored      floats         -> scores              gradients for the floats
    add_sinks   out, lse, sink_logits -> out, lse     gradients for all three (``calls/sinks.py``)

``floats`` and ``others`` are dicts of arrays by name (``tasks.py``). The forward keeps its arguments, its results and
the mask that a dynamic call selects; key lists are made again. Only gradients that jax asks for are computed. They
cannot be differentiated again: ``custom_jvp`` raises an error that says so.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from cupy_dma.calls import sinks
from cupy_dma.calls.gradients import INPUTS
from cupy_dma.jax.programs import run_program
from cupy_dma.jax.tasks import SCORE_INPUTS, Task

Arrays = dict[str, Any]


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """The floats whose gradients are requested."""

    names: tuple[str, ...]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run_once(task: Task, arrays: Arrays) -> Arrays:
    """The results of a task within a differentiated function: they cannot be differentiated again."""
    return run_program(task, arrays)


@_run_once.defjvp
def _no_second_derivative(task: Task, arrays: Any, tangents: Any) -> Any:
    raise NotImplementedError("the gradients of cupy_dma.jax are not differentiable (there is no second derivative); "
                              "put jax.lax.stop_gradient around the arguments of the inner function")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(task: Task, floats: Arrays, others: Arrays) -> tuple[Any, Any]:
    """``out, lse`` of a task "attention" or "dynamic"."""
    found = run_program(task, {**floats, **others})
    return found["out"], found["lse"]


def _attend_forward(task: Task, floats: Arrays, others: Arrays) -> tuple[Any, Any]:
    values, wanted = _values(floats, INPUTS)
    masks, _ = _values(others, ())
    found = _run_once(task, {**values, **masks})
    kept = {name: x for name, x in {**values, **masks, **found}.items() if name not in ("padding", "documents")}
    return (found["out"], found["lse"]), (kept, wanted, {name: None for name in floats})


def _attend_backward(task: Task, residuals: Any, upstream: Any) -> tuple[Any, Any]:
    kept, wanted, gradients = residuals
    dout, dlse = upstream
    no_dout, no_dlse = (isinstance(x, SymbolicZero) for x in upstream)
    if wanted.names and not (no_dout and no_dlse):
        upstream = {"dout": jnp.zeros_like(kept["out"]) if no_dout else dout}
        if not no_dlse:
            upstream["dlse"] = dlse
        gradients = {**gradients, **_run_once(backward_task(task, kept, wanted.names), {**kept, **upstream})}
    return gradients, None


def backward_task(task: Task, kept: Arrays, needs: tuple[str, ...]) -> Task:
    """The task of the gradients of a task "attention" or "dynamic"."""
    return task._replace(operation="backward", hints=task.hints if "start" in kept else None, selection=None,
                         needs=needs)


attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scored(task: Task, floats: Arrays) -> Any:
    """The scores of a task "key_scores"."""
    return run_program(task, floats)["scores"]


def _scored_forward(task: Task, floats: Arrays) -> tuple[Any, Any]:
    values, wanted = _values(floats, SCORE_INPUTS)
    return _run_once(task, values)["scores"], (values, wanted)


def _scored_backward(task: Task, residuals: Any, dscores: Any) -> tuple[Any]:
    values, wanted = residuals
    gradients: Arrays = {name: None for name in values}
    if wanted.names and not isinstance(dscores, SymbolicZero):
        backward = task._replace(operation="key_scores_backward", needs=wanted.names)
        gradients.update(_run_once(backward, {**values, "dscores": dscores}))
    return (gradients,)


scored.defvjp(_scored_forward, _scored_backward, symbolic_zeros=True)


@jax.custom_vjp
def add_sinks(out: Any, lse: Any, sink_logits: Any) -> tuple[Any, Any]:
    """The results of an attention with sinks, from those without."""
    keys, _, total = sinks.shares(jnp, lse, sink_logits.astype(lse.dtype))
    return (out.astype(lse.dtype) * sinks.of_rows(keys)).astype(out.dtype), total


def _sinks_forward(out: Any, lse: Any, sink_logits: Any) -> tuple[Any, Any]:
    found = add_sinks(out, lse, sink_logits)
    return found, (found[0], lse, sink_logits)


def _sinks_backward(residuals: Any, upstream: Any) -> tuple[Any, Any, Any]:
    (out, lse, sink_logits), (dout, dlse) = residuals, upstream
    keys, sink, _ = sinks.shares(jnp, lse, sink_logits.astype(lse.dtype))
    products = jnp.where(out == 0, 0, dout.astype(lse.dtype) * out.astype(lse.dtype))
    delta = products.sum(-1).swapaxes(-1, -2)
    return ((dout.astype(lse.dtype) * sinks.of_rows(keys)).astype(out.dtype), keys * dlse + sink * delta,
            sinks.summed(sink * (dlse - delta)).astype(sink_logits.dtype))


add_sinks.defvjp(_sinks_forward, _sinks_backward)


def _values(arrays: Arrays, order: tuple[str, ...]) -> tuple[Arrays, _Wanted]:
    """The arrays, and those of them that have a gradient, in this order."""
    return ({name: x.value for name, x in arrays.items()},
            _Wanted(tuple([name for name in order if name in arrays and arrays[name].perturbed])))
