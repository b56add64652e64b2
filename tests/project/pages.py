"""The Python blocks of the pages in docs/, run as a reader would, and commands."""
import os
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def said_by(*command: Any, cwd: Path = ROOT, **environment: str) -> str:
    """The output of a command, which must end well."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, env={**os.environ, **environment},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def run_page(name: str, *, gpu: bool) -> dict[str, Any]:
    """Run the blocks of docs/name one after another and return their variables. Blocks after ``<!-- gpu -->`` need a
    GPU."""
    page = DOCS / name
    names: dict[str, Any] = {"__name__": page.stem}
    text = page.read_text()
    for block in re.finditer(r"(<!-- gpu -->\n)?```python\n(.*?)```", text, re.DOTALL):
        if gpu or not block[1]:
            exec(compile("\n" * text[:block.start(2)].count("\n") + block[2], str(page), "exec"), names)
    return names
