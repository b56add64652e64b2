"""Reports skipped tests: details in the summary of a run, and the count in capitals as its last line.

pytest's own list of skips has a line for every place and reason, hundreds without torch, and is not printed.
"""
import re
from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest

# Reasons of skips that name a missing package, and its name.
_MISSING = ((r"could not import '(\w+)", r"\1"), (r"No module named '(\w+)", r"\1"), (r"CuPy is not installed", "cupy"),
            (r"needs a C\+\+ compiler", "g++"), (r"pip install ([\w-]+)", r"\1"))
_NO_GPU = "needs a CUDA GPU"
_OTHERS = "OTHER REASONS, SEE ABOVE"
SHOWN = 10  # other reasons


def missing_package(reason: str) -> str | None:
    """The missing package because of which a test was skipped, or None."""
    for pattern, package in _MISSING:
        match = re.search(pattern, reason)
        if match:
            return match.expand(package)
    return None


def summary(skipped: Iterable) -> tuple[list[str], str]:
    """The details and the last line from pytest's reports; both empty if no test was skipped."""
    tests: Counter[str] = Counter()
    files: defaultdict[str, set[str]] = defaultdict(set)
    others: Counter[str] = Counter()
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        package = missing_package(reason)
        whole_file = isinstance(report, pytest.CollectReport)
        if _NO_GPU in reason or whole_file and report.nodeid.startswith("tests/gpu/"):
            why = "THERE IS NO CUDA GPU"
        else:
            why = f"{package} IS MISSING".upper() if package else _OTHERS
        if whole_file:  # each worker of pytest-xdist collects it
            files[why].add(report.nodeid)
        else:
            tests[why] += 1
        if why == _OTHERS:
            others[reason] += 1
    details = [f"not run, {why.lower()}: {', '.join(sorted(files[why]))}" for why in sorted(files) if why != _OTHERS]
    details += [f"not run, {count} times: {reason}" for reason, count in others.most_common(SHOWN)]
    if len(others) > SHOWN:
        details.append(f"not run: {len(others) - SHOWN} more reasons")
    counts = [f"{_counted(tests[why], len(files[why]))} NOT RUN: {why}"
              for why in sorted({*tests, *files}, key=lambda why: (why == _OTHERS, -tests[why], why))]
    return details, "; ".join(counts)


def _counted(tests: int, files: int) -> str:
    parts = [(tests, "TEST"), (files, "WHOLE FILE")]
    return " AND ".join(f"{count} {name}{'S' * (count != 1)}" for count, name in parts if count)


def pytest_terminal_summary(terminalreporter):
    details, last = summary(terminalreporter.stats.get("skipped", ()))
    for line in details:
        terminalreporter.write_line(line, yellow=True)
    if "TORCH IS MISSING" in last:
        terminalreporter.write_line("make test TORCH=... names what pip installs as torch", yellow=True)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)  # after pytest's own summary
def pytest_sessionfinish(session):
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    _, last = summary(reporter.stats.get("skipped", ())) if reporter else ((), "")
    if last:
        reporter.write_line(last, yellow=True, bold=True)
