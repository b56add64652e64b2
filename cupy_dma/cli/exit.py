"""Exit status of the commands: 0 when all is well, 1 when a check failed, 2 when a command cannot run as asked."""
from __future__ import annotations

import sys


def complain(message: str) -> int:
    """Say why a command cannot run as asked, and what to install or to change. Returns the exit status."""
    print(f"cupy_dma: {message}", file=sys.stderr)
    return 2
