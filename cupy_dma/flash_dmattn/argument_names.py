"""The names of an argument in all versions of the original.

The functions of this package are written with the newest names; ``@any_names`` lets a call use the older ones and the
short ones of the CUDA extension. Passing one argument under two names raises TypeError.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

_OTHER_NAMES = {
    "query": ("q", "query_states"),
    "key": ("k", "key_states"),
    "value": ("v", "value_states"),
    "attn_mask": ("mask", "attention_mask", "active_mask"),
    "attn_bias": ("bias", "attention_bias", "zoh", "zoh_states"),
    "softmax_scale": ("scale", "scaling"),
    "is_causal": ("causal",),
    "window_size": ("keep_window_size",),
    "return_attn_probs": ("return_softmax",),
    "cu_seqlens_q": ("cu_seq_lens_q",),
    "cu_seqlens_k": ("cu_seq_lens_k",),
    "max_seqlen_q": ("max_length_q",),
    "max_seqlen_k": ("max_length_k",),
}
_NEWEST = {name: (newest, *others) for newest, others in _OTHER_NAMES.items() for name in (newest, *others)}


def any_names(function: _Function) -> _Function:
    """``function``, callable with any of the names of its arguments.

    A function may itself use an older name: it receives the argument under the name that is among its parameters.
    """
    parameters = tuple(inspect.signature(function).parameters)
    own_name = {}
    for parameter in parameters:
        for name in _NEWEST.get(parameter, ()):
            if name not in parameters:
                own_name[name] = parameter

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if any([name in own_name for name in named]):
            named = _renamed(function.__name__, parameters[:len(arguments)], named, own_name)
        return function(*arguments, **named)

    return call  # type: ignore[return-value]


def _renamed(function: str, positional: Sequence[str], named: dict[str, Any], own_name: dict[str, str]
             ) -> dict[str, Any]:
    given_as: dict[str, str] = {}
    for name in named:
        own = own_name.get(name, name)
        if own in given_as or own in positional:
            raise TypeError(f"{function}() takes {own} under one name only, got both {given_as.get(own, own)!r} "
                            f"and {name!r}")
        given_as[own] = name
    return {own: named[name] for own, name in given_as.items()}


def in_either_order(function: _Function) -> _Function:
    """A varlen function of ``query, key, value, attn_mask, attn_bias, cu_seqlens_q, ...``, callable also in the later
    order without mask and bias. The fourth argument tells them apart: only cumulative lengths have one axis."""
    parameters = [name for name, parameter in inspect.signature(function).parameters.items()
                  if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    newer = parameters[5:]

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if len(arguments) > 3 and len(getattr(arguments[3], "shape", ())) == 1:
            moved = dict(zip(newer, arguments[3:]))
            twice = [name for name in moved if name in named]
            if len(arguments) > 3 + len(newer):
                raise TypeError(f"{function.__name__}() takes at most {3 + len(newer)} positional arguments with "
                                f"cu_seqlens_q as the fourth, got {len(arguments)}")
            if twice:
                raise TypeError(f"{function.__name__}() got {twice[0]} by position and by name")
            return function(*arguments[:3], **moved, **named)
        return function(*arguments, **named)

    return call  # type: ignore[return-value]
