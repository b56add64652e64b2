"""What the commands share in reading their arguments."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from cupy_dma.cli.exit import complain


class Parser(argparse.ArgumentParser):
    """Tells misuse in one line, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        sys.exit(complain(f"{message} (more: {self.prog} --help)"))

    def _print_message(self, message: str, file: Any = None) -> None:
        """Of --help and --version; argparse itself ignores that they could not be written."""
        print(message, end="", file=file)


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an argument that is a whole number from ``least`` to ``most``."""
    allowed = f"at least {least}" if most is None else f"from {least} to {most}"

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number {allowed}, got {text!r}") from None
        if number < least or (most is not None and number > most):
            raise argparse.ArgumentTypeError(f"must be {allowed}, got {text}")
        return number

    return convert
