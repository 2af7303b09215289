"""What `make engines` prints at its end (the cases and their seconds, the table of scanners), what it skips, and what
torchvision needs to be imported.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Generator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torchvision") is not None:  # here, and in the processes that the tests start
    SHIM = str(Path(__file__).parent / "path")
    os.environ["PYTHONPATH"] = os.pathsep.join([SHIM, *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path.append(SHIM)
    import_module("torchvision_operators")


PINNED = (Path(__file__).parents[2] / "constraints-engines.txt").read_text()
LIBRARIES = re.findall(r"^([\w-]+)(?:\[\w+\])?==", PINNED.replace("-", "_"), re.MULTILINE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed because one of the pinned libraries is not installed, here or in a process that it started, is
    skipped, and says so."""
    report = yield
    missing = re.search(r"No module named '(\w+)", report.longreprtext) if report.failed else None
    if missing and find_spec(missing[1]) is None and any(each.startswith(missing[1]) for each in LIBRARIES):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.reportinfo()[1] or 0, f"Skipped: {missing[1]} is not installed")
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    module = sys.modules.get("tests.engines.test_engines")
    seconds = getattr(module, "SECONDS", {})
    if seconds:
        terminalreporter.section("cases of the engines")
        for case, (made, checked) in seconds.items():
            terminalreporter.write_line(f"{case:32} made in {made:5.1f} s, checked in {checked:4.1f} s")
    lines = getattr(sys.modules.get("tests.engines.test_scanners"), "LINES", [])
    if lines:
        terminalreporter.section("flagged by scanners of pickles")
        for line in lines:
            terminalreporter.write_line(line)
