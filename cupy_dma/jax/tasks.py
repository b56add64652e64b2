"""Tasks: what a callback computes, as functions of a backend and of operands by name.

    operation              operands                                                           results
    key_scores             value, dt_proj, A, dt_bias                                         scores
    key_scores_backward    dscores, value, dt_proj, A, dt_bias                                gradients
    top_w                  scores, padding, documents                                         start, stop
    attention              query, key, value, bias, start, stop, dense                        out, lse
    dynamic                query, key, value, bias or dt_proj, A, dt_bias, padding, documents
                                                                      out, lse, start, stop, and bias if computed
    backward               dout, dlse, out, lse, those of attention, dt_proj, A, dt_bias      gradients

In a dynamic call the scores are the ``bias``. Operands have been checked when the call was traced; XLA's buffers are
contiguous. A task is hashable: with the shapes and types of its operands it identifies a program.
"""
from __future__ import annotations

from typing import Any, NamedTuple

from cupy_dma import checks
from cupy_dma.arrays import Operand
from cupy_dma.calls.gradients import INPUTS, chain_gradients
from cupy_dma.calls.run import attention_of, scores_of
from cupy_dma.calls.scores import Recipe
from cupy_dma.calls.types import AttentionCall, DynamicCall, key_bias, with_mask
from cupy_dma.masks.documents import check_documents
from cupy_dma.masks.interval import Hints, IntervalMask
from cupy_dma.masks.selection import Candidates
from cupy_dma.masks.windows import Window

SCORE_INPUTS = ("value", "dt_proj", "A", "dt_bias")
Given = dict[str, Operand]
ArraySpec = tuple[tuple[int, ...], str]  # shape and type


class Task(NamedTuple):
    """What is computed, all but shapes and types."""

    operation: str
    backend: str | None
    form: str = "exp"  # of scores to be computed
    options: tuple[bool, float, float, bool, int] = (False, 1.0, 0.0, False, 0)  # those of ``AttentionCall``
    hints: Hints | None = None  # of the mask that is given
    selection: tuple[Window, str] | None = None  # window and keys; None where every key is kept
    needs: tuple[str, ...] = ()  # which gradients


def results_of(task: Task, specs: dict[str, ArraySpec]) -> list[tuple[str, ArraySpec]]:
    """Names, shapes and types of a task's results, for operands of these shapes and types."""
    if task.operation == "key_scores":
        return [("scores", _score_spec(specs["value"]))]
    if task.operation in ("key_scores_backward", "backward"):
        return [(name, specs[name]) for name in task.needs]
    if task.operation == "top_w":
        return _runs_of(task, specs, specs["scores"][0])
    (batch, length, heads, _), dtype = specs["query"]
    found = [("out", specs["query"]), ("lse", ((batch, heads, length), wide(dtype)))]
    if task.operation == "dynamic":
        computed = _score_spec(specs["value"])
        if task.selection is not None:
            found += _runs_of(task, specs, specs["bias"][0] if "bias" in specs else computed[0])
        if "bias" not in specs:
            found.append(("bias", computed))
    return found


def wide(dtype: str) -> str:
    """The type of lse and scores."""
    return "float64" if dtype == "float64" else "float32"


def _score_spec(value: ArraySpec) -> ArraySpec:
    (batch, length, heads, _), dtype = value
    return (batch, heads, length), wide(dtype)


def _runs_of(task: Task, specs: dict[str, ArraySpec], scores: tuple[int, ...]) -> list[tuple[str, ArraySpec]]:
    assert task.selection is not None
    documents = specs.get("documents", ((0,), ""))[0]
    rows = documents[0] if task.selection[1] == "global" and len(documents) == 2 else 1
    return [("start", ((rows, 1, scores[2]), "int32")), ("stop", (scores, "int32"))]


def run(task: Task, module: Any, given: Given) -> tuple[Any, ...]:
    """The results of a task on the backend ``module``, in the order of ``results_of``; they broadcast to its shapes."""
    return _OPERATIONS[task.operation](task, module, given)


def _key_scores(task: Task, module: Any, given: Given) -> tuple[Any, ...]:
    return (module.key_scores(*_recipe(task, given)),)


def _key_scores_backward(task: Task, module: Any, given: Given) -> tuple[Any, ...]:
    found = module.key_scores_backward(given["dscores"], *_recipe(task, given), frozenset(task.needs))
    named = dict(zip(SCORE_INPUTS, found))
    return tuple([named[name] for name in task.needs])


def _top_w(task: Task, module: Any, given: Given) -> tuple[Any, ...]:
    assert task.selection is not None
    scores = given["scores"]
    mask = IntervalMask._selected(scores, *task.selection, _candidates(given, scores.shape[2]), module)
    return mask._start.array, mask._stop.array


def _attention(task: Task, module: Any, given: Given) -> tuple[Any, ...]:
    return module.attention(_call(task, given))


def _dynamic(task: Task, module: Any, given: Given) -> tuple[Any, ...]:
    own, recipe = _call(task, given), None if "bias" in given else _recipe(task, given)
    window, keys = task.selection or (own.key_length, "prefix")
    call = DynamicCall(own, given.get("bias"), recipe, window, keys, _candidates(given, own.key_length))
    runs: tuple[Any, ...] = ()
    if task.selection is None:
        own = with_mask(own, None, key_bias(scores_of(call, module)))
    else:
        own = attention_of(call, module)
        assert own.mask is not None
        runs = own.mask._start.array, own.mask._stop.array
    out, lse = module.attention(own)
    assert own.bias is not None
    return (out, lse, *runs) if recipe is None else (out, lse, *runs, own.bias.array)


def _backward(task: Task, module: Any, given: Given) -> tuple[Any, ...]:
    upstream = given["dout"], given["out"], given["lse"], given.get("dlse")
    recipe = _recipe(task, given) if "dt_proj" in given else None
    found = chain_gradients(_call(task, given), recipe, upstream, frozenset(task.needs), module)
    return tuple([found[name] for name in task.needs])


_OPERATIONS = {"key_scores": _key_scores, "key_scores_backward": _key_scores_backward, "top_w": _top_w,
               "attention": _attention, "dynamic": _dynamic, "backward": _backward}
#: the operands of each operation, in this order; those a call does not have are left out
NAMES = {"key_scores": SCORE_INPUTS, "key_scores_backward": ("dscores", *SCORE_INPUTS),
         "top_w": ("scores", "padding", "documents"),
         "attention": (*INPUTS[:4], "start", "stop", "dense"),
         "dynamic": (*INPUTS, "padding", "documents"),
         "backward": ("dout", "dlse", "out", "lse", *INPUTS, "start", "stop", "dense")}


def _recipe(task: Task, given: Given) -> Recipe:
    return given["value"], given["dt_proj"], given["A"], given.get("dt_bias"), task.form


def _candidates(given: Given, length: int) -> Candidates:
    padding, documents = given.get("padding"), given.get("documents")
    if documents is not None:
        check_documents(documents, length)
    return Candidates(None if padding is None else checks.with_axes(padding, 2), documents)


def _call(task: Task, given: Given) -> AttentionCall:
    bias, dense, mask = given.get("bias"), given.get("dense"), None
    if bias is not None:
        bias = key_bias(bias) if len(bias.shape) == 3 else checks.with_axes(bias, 4)
    if "start" in given:
        assert task.hints is not None
        start, stop = given["start"], given["stop"]
        mask = IntervalMask._make(start.library, start.array, stop.array, task.hints)
    return AttentionCall(given["query"], given["key"], given["value"], mask,
                         None if dense is None else checks.with_axes(dense, 4), bias, *task.options)
