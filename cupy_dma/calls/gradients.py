"""The arguments of backward passes: the forward's results and the upstream gradients."""
from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from cupy_dma import checks
from cupy_dma.arrays import Operand, describe
from cupy_dma.calls.head_dims import backward_with_equal_dims, narrowed
from cupy_dma.calls.run import takes_value_dim
from cupy_dma.calls.scores import Recipe
from cupy_dma.calls.types import AttentionBackwardCall, AttentionCall

#: arguments that can have a gradient; scores, given or computed, count as the bias
INPUTS = ("query", "key", "value", "bias", "dt_proj", "A", "dt_bias")
Upstream = tuple[Operand, Operand, Operand, Operand | None]  # dout, out, lse, dlse in the caller's shapes


def check_needs(needs: Iterable[str], allowed: tuple[str, ...]) -> frozenset[str]:
    """Names of the requested gradients. ValueError for a name that is not allowed."""
    names = (needs,) if isinstance(needs, str) else tuple(needs)
    for name in names:
        if name not in allowed:
            raise ValueError(f"needs must be some of {', '.join(map(repr, allowed))}, got {name!r}")
    return frozenset(names)


def check_upstream(call: AttentionCall, dout: Any, out: Any, lse: Any, dlse: Any) -> Upstream:
    """The checked ``dout, out, lse, dlse`` of this call. Those of packed sequences have no batch axis."""
    q, packed = call.query, call.sequences is not None
    rows = describe(dout, "dout"), describe(out, "out")
    given = (*(q.shape[1:] if packed else q.shape)[:-1], call.value_dim)
    for operand in rows:
        if operand.dtype != q.dtype:
            raise TypeError(f"{operand.name} must have query's type {q.dtype}, got {operand.dtype}")
        if operand.shape != given:
            like = "query's shape" if call.value_dim == call.head_dim else "query's shape but value's head dim,"
            raise ValueError(f"{operand.name} must have {like} {given}, got {operand.shape}")
        checks.require_same_device((q, operand))
    if lse is None:
        raise TypeError("lse must be an array, got None: it is what attention(..., return_lse=True) returned")
    meaning, shape = ("(H, total_q)", (q.shape[2], q.shape[1])) if packed else (
        "(B, H, Lq)", (q.shape[0], q.shape[2], q.shape[1]))
    return (*rows, check_floats(lse, "lse", meaning, shape, q),
            None if dlse is None else check_floats(dlse, "dlse", meaning, shape, q))


def check_floats(array: Any, name: str, meaning: str, shape: tuple[int, ...], like: Operand) -> Operand:
    """A checked float operand of this shape, of ``like``'s library and device."""
    operand = describe(array, name)
    checks.one_of_types(operand)
    checks.has_shape(operand, meaning, [(size,) for size in shape])
    checks.require_same_device((like, operand))
    return operand


def attention_gradients(call: AttentionCall, upstream: Upstream, needs: frozenset[str],
                        module: ModuleType) -> tuple[Any, ...]:
    """``dquery, dkey, dvalue, dbias`` in the shapes of the caller's arrays, from the backend ``module``; None for what
    ``needs`` leaves out."""
    whole = backward_call(call, upstream, needs)
    if call.value_dim != call.head_dim and not takes_value_dim(whole, module):
        whole = backward_with_equal_dims(whole)
    dquery, dkey, dvalue, dbias = module.attention_backward(whole)
    dquery, dkey, dvalue = (narrowed(x.library, gradient, x.shape[-1], x.dtype, x.device)
                            for x, gradient in ((call.query, dquery), (call.key, dkey), (call.value, dvalue)))
    if dbias is not None:
        assert call.bias is not None
        dbias = dbias.reshape(tuple(call.bias.array.shape))
    if call.sequences is None:
        return dquery, dkey, dvalue, dbias
    if dbias is not None:
        dbias = dbias.reshape(dbias.shape[-2:])
    return *(None if gradient is None else gradient[0] for gradient in (dquery, dkey, dvalue)), dbias


def chain_gradients(call: AttentionCall, recipe: Recipe | None, upstream: Upstream, needs: frozenset[str],
                    module: ModuleType) -> dict[str, Any]:
    """``attention_gradients`` by name. With a ``recipe``, whose scores are the call's bias, also the gradients of
    ``dt_proj``, ``A`` and ``dt_bias``; the gradient of ``value`` is then the sum of both terms, rounded once."""
    through_scores = frozenset() if recipe is None else needs - {"query", "key", "bias"}
    direct = needs.intersection(INPUTS[:4]) | ({"bias"} if through_scores else set())
    found = dict(zip(INPUTS, attention_gradients(call, upstream, direct, module)))
    if recipe is not None and through_scores:
        library, value, dscores, packed = call.query.library, found["value"], found["bias"], call.sequences is not None
        if packed:  # scores have a batch axis
            value, dscores = None if value is None else value[None], dscores[None]
        added = None if value is None else library.operand(value, "dvalue")
        made = module.key_scores_backward(library.operand(dscores, "dscores"), *recipe, through_scores, added)
        found.update((name, x) for name, x in zip(("value", *INPUTS[4:]), made) if name in through_scores)
        if packed and "value" in through_scores:
            found["value"] = found["value"][0]
    return found


def backward_call(call: AttentionCall, upstream: Upstream, needs: frozenset[str]) -> AttentionBackwardCall:
    """The backward call, with its upstream arrays in the layout that ``AttentionBackwardCall`` documents."""
    q = call.query
    if call.sequences is not None and call.sequences.page_table is not None:
        raise NotImplementedError("block_table must be None: attention over a paged KV cache has no backward pass "
                                  "(pages may be shared); gather the keys and pass them as (total_k, Hkv, D)")
    dout, out = (x if x.strides[-1] == 1 else contiguous(x) for x in upstream[:2])
    lse, dlse = (None if x is None else contiguous_floats(x, q) for x in upstream[2:])
    if call.sequences is not None:
        dout, out = checks.with_axes(dout, 4), checks.with_axes(out, 4)
        lse, dlse = (None if x is None else checks.with_axes(x, 3) for x in (lse, dlse))
    assert lse is not None
    return AttentionBackwardCall(call, dout, out, lse, dlse, needs)


def contiguous_floats(operand: Operand, like: Operand) -> Operand:
    """The operand, contiguous and in float32 (float64 for float64), the type of per-row and per-key numbers."""
    kind = "float64" if like.dtype == "float64" else "float32"
    if operand.dtype != kind:
        operand = operand.library.operand(operand.library.astype(operand.array, kind), operand.name)
    return contiguous(operand)


def contiguous(operand: Operand) -> Operand:
    """The operand in C order."""
    packed = operand.library.contiguous(operand.array)
    return operand if packed is operand.array else operand.library.operand(packed, operand.name)
