"""The Python blocks of the pages in docs/, run as a reader would."""
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"


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
