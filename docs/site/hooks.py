"""Extensions of mkdocs: pages and pictures generated from the repository when the site is built.

- CONTRIBUTING.md becomes a page;
- a chart of benchmarks/results becomes one SVG element for each panel, in the colours of the page;
- ``<!-- number -->`` is the speed that the landing page shows;
- tables of results, between ``<!-- table:forward -->`` and its end, get room;
- ``<!-- picture: name | what it shows -->`` in front of a Python block runs the block, which leaves a matplotlib Axes
  or Figure in ``ax``, and puts the picture behind it, as an SVG element;
- an empty block ``{ .python .excerpt file="..." }`` gets the file's text, with ``part="..."`` what follows the comment
  ``# ---- part`` in it;
- ``<!-- command: plot -->`` is replaced by what ``python -m cupy_dma plot --help`` says;
- links to files that are no pages become plain file names;
- what lets the search work from the disk is assets/worker.js instead of a script from the network.
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the tree, installed or not

from benchmarks.harness import charts, folders, report  # noqa: E402
from benchmarks.harness.pages import REPORTS  # noqa: E402

CHARTS = {shown.record.removesuffix(".json"): shown for shown in REPORTS.values() if shown.panels is not None}
CHART = re.compile(r"\[!\[([^\]]*)\]\(results/(\w+)\.png\)\]\(results/\2\.png\)")
INTERVALS = re.compile(r"!\[([^\]]*)\]\(assets/readme-intervals\.png\)")
PICTURE = re.compile(r"<!-- picture: (\S+) \| (.*?) -->\n(```python\n(.*?)```\n)", re.DOTALL)
SHIM = "https://unpkg.com/iframe-worker/shim"  # of the theme's plugin `offline`


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, "contributing.md", content=(ROOT / "CONTRIBUTING.md").read_text()))
    return files


def pictures(markdown: str) -> dict[str, str]:
    """The pictures of a page's blocks, run one after the other as a reader would."""
    names: dict[str, Any] = {"__name__": "gallery"}
    made = {}
    for block in re.finditer(r"(?:<!-- picture: (\S+) \| .*? -->\n)?```python\n(.*?)```", markdown, re.DOTALL):
        exec(compile(block[2], "docs/gallery.md", "exec"), names)
        if block[1]:
            drawn = names["ax"]
            made[block[1]] = charts.svg(getattr(drawn, "figure", drawn), block[1])
    return made


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = page.file.src_uri
    if source == "contributing.md":
        markdown = re.sub(r"\]\(docs/", "](", markdown)
    if PICTURE.search(markdown):
        page.meta["pictures"] = pictures(markdown)
        markdown = PICTURE.sub(r'\3\n<div class="charts" data-picture="\1" role="img" aria-label="\2"></div>\n',
                               markdown)
    markdown = re.sub(r"<!-- table:(\w+) -->\n(.*?)\n<!-- /table:\1 -->",
                      r'<div class="results" markdown="1">\n\n\2\n\n</div>', markdown, flags=re.DOTALL)
    markdown = CHART.sub(r'<div class="charts" data-chart="\2" role="img" aria-label="\1"></div>', markdown)
    if source == "index.md":
        markdown = INTERVALS.sub(r'<div class="charts" data-chart="intervals" role="img" aria-label="\1"></div>',
                                 markdown.replace("<!-- number -->", number()))
    markdown = re.sub(r"<!-- command: (\S+) -->", lambda m: usage(m[1]), markdown)
    markdown = re.sub(r'```\{ \.(\w+) \.excerpt file="([^"]+)"(?: part="([^"]+)")? \}\n```',
                      lambda m: excerpt(m[1], m[2], m[3]), markdown)
    return re.sub(r"\[([^\]\n]*)\]\(([^)\s]+)\)", lambda m: link(m, source, files), markdown)


def chart(name: str) -> str:
    """The pictures of the newest results of this name, with the machine and the date."""
    if name == "intervals":
        return charts.svg(pictures_of_readme().intervals((5.2, 3.6), notes=False), name)
    path = folders.recorded(f"{name}.json")
    assert path is not None, f"a page shows the chart of {name}, which is not recorded"
    result = json.loads(path.read_text())
    shown = "".join(f"<figure>{svg}</figure>" for svg in charts.svgs(CHARTS[name].panels(result)))
    machine = f"{result['device']}, {result['date'][:10]}" if "device" in result else ""
    return f"{shown}<figcaption>{machine}</figcaption>" if machine else shown


def pictures_of_readme() -> Any:
    spec = importlib.util.spec_from_file_location("readme_pictures", ROOT / "docs" / "site" / "readme_pictures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def number() -> str:
    """How much faster a training step's attention is than a dense one, of the newest results."""
    result = folders.read("backward_performance.json")
    case = next(case for case in result["cases"] if case["name"] == "model H16/8 D128 N131072 w2048")
    ours, dense = (report.value(case, who, "forward+backward") for who in ("cupy_dma", "cudnn"))
    assert ours and dense
    gpu = result["device"].removeprefix("NVIDIA ")
    return (f'<p class="number"><strong>{report.times(dense / ours)}</strong> as fast as dense attention by cuDNN, '
            f"forward and backward, for 128K tokens with a window of 2048, on one {gpu} ({result['date'][:10]})</p>")


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Types in docstrings are text with marks for code, which is what they are set in anyway; and a type that says all
    needs no dash behind it."""
    html = re.sub(r"<code>[^<]*``[^<]*</code>", lambda m: m[0].replace("``", ""), html)
    html = re.sub(r'(<div [^>]*data-picture="([^"]+)"[^>]*>)</div>',
                  lambda m: f"{m[1]}{page.meta['pictures'][m[2]]}</div>", html)
    html = re.sub(r'(<div [^>]*data-chart="(\w+)"[^>]*>)</div>', lambda m: f"{m[1]}{chart(m[2])}</div>", html)
    return re.sub(r"\s*–\s*<div class=\"doc-md-description\">\s*</div>", "", html)


def on_post_build(config: Any) -> None:
    site = Path(config.site_dir)
    for path in site.rglob("*.html"):
        up = "../" * (len(path.relative_to(site).parts) - 1)
        path.write_text(path.read_text().replace(SHIM, f"{up}assets/worker.js"))


def link(match: re.Match, source: str, files: Files) -> str:
    """The link as it is, or its text and the file's name where that is no page of the site."""
    text, target = match[1], match[2]
    path = target.partition("#")[0]
    if not path or re.match(r"[a-z]+:", path):
        return match[0]
    inside = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    if inside in ("../CONTRIBUTING.md", "CONTRIBUTING.md"):
        return f"[{text}]({posixpath.relpath('contributing.md', posixpath.dirname(source) or '.')})"
    if files.get_file_from_path(inside) or files.get_file_from_path(posixpath.join(inside, "README.md")):
        return match[0] if files.get_file_from_path(inside) else f"[{text}]({posixpath.join(path, 'README.md')})"
    name = inside.removeprefix("../")
    if not (ROOT / name).exists():
        return match[0]  # strict mode reports it
    return f"`{name}`" if text.strip("`") in (name, target) else f"{text} (`{name}`)"


def usage(name: str) -> str:
    """The help text of a command."""
    from cupy_dma.__main__ import parser

    commands = next(action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    chosen = commands.choices[name]
    chosen.formatter_class = lambda prog: argparse.HelpFormatter(prog, max_help_position=26, width=84)
    return f"```text\n{chosen.format_help().strip()}\n```"


def excerpt(language: str, name: str, part: str | None = None) -> str:
    text = (ROOT / name).read_text()
    if part is not None:
        text = re.split(rf"^# ---- {re.escape(part)}\b.*\n+", text, flags=re.MULTILINE)[1].partition("\n# ---- ")[0]
    elif language == "python":
        text = text.rpartition('\n\nif __name__ == "__main__":')[0]  # how a script starts is the same everywhere
    return f'```{{ .{language} title="{name}" }}\n{text.rstrip()}\n```'
