"""Exit status of the commands: 0 when all is well, 1 when a check failed or an output could not be written, 2 when a
command cannot run as asked, 130 when it was interrupted. What is wrong is told in one line."""
from __future__ import annotations

import os
import sys
from collections.abc import Callable

FAILED, UNUSABLE, INTERRUPTED = 1, 2, 130


def complain(message: str, status: int = UNUSABLE) -> int:
    """Say what is wrong, and what to install or to change. Returns the exit status."""
    print(f"cupy_dma: {message}", file=sys.stderr)
    return status


def status_of(command: Callable[[], int]) -> int:
    """Run a command. Returns its exit status, which is 0 only if all of its output has been written."""
    if sys.stdout is None:  # the caller closed it, and print would drop everything without a word
        return complain("cannot write the output: standard output is closed", FAILED)
    try:
        try:
            status = command()
        except SystemExit as answered:  # argparse: --help, --version, or what is wrong
            status = int(answered.code or 0)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return complain("interrupted", INTERRUPTED)
    except MemoryError as error:
        return complain(f"not enough memory: {error}".rstrip(": "))
    except OSError as error:
        if error.filename is not None:
            return complain(f"{error.filename}: {error.strerror}", FAILED)
        _drop_output()
        return complain(f"cannot write the output: {error.strerror or error}", FAILED)
    return status


def _drop_output() -> None:
    """Leave the interpreter nothing to write at its end, where it would fail once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
