"""Bad input is refused with a message that names what is wrong."""
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest


def check_refused(error: type[Exception], words: Iterable[str], call: Callable[..., Any], *given: Any,
                  **named: Any) -> None:
    """The call raises ``error``, and its message has all of these words."""
    with pytest.raises(error) as caught:
        call(*given, **named)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def wrong(function: Callable[..., Any], error: type[Exception], **values: Iterable[Any]) -> list[Any]:
    """Cases for ``check_wrong``: one for each of these values of each argument."""
    return [pytest.param(function, error, name, value, id=f"{function.__name__}-{error.__name__}-{name}-{i}")
            for name, given in values.items() for i, value in enumerate(given)]


def check_wrong(function: Callable[..., Any], error: type[Exception], name: str, value: Any) -> None:
    """The function raises ``error`` for this value (or what it returns), and the message names the argument and what
    was given."""
    value = value() if callable(value) else value
    with pytest.raises(error) as caught:
        function(**{name: value})
    message = str(caught.value)
    assert name in message and any(fact in message for fact in _facts(value)), message


def _facts(value: Any) -> Iterator[str]:
    """Words by which a message may describe a value."""
    yield from (repr(value), type(value).__name__)
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _facts(item)
    elif hasattr(value, "shape"):
        yield from (str(tuple(value.shape)).strip("(,)"), "stride", *(f"{size} query heads" for size in value.shape))
    if hasattr(value, "dtype"):
        yield from (type(value).__module__, str(value.dtype), str(value.tolist()), "dense array")
