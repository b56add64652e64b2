"""Bad input is refused with a message that names what is wrong."""
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def check_refused(error: type[Exception], words: Iterable[str], call: Callable[..., Any], *given: Any,
                  **named: Any) -> None:
    """The call raises ``error``, and its message has all of these words."""
    with pytest.raises(error) as caught:
        call(*given, **named)
    for word in words:
        assert word in str(caught.value), str(caught.value)
