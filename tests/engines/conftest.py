"""What `make engines` prints at its end: the cases and their seconds."""

from __future__ import annotations

import sys

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    module = sys.modules.get("tests.engines.test_engines")
    seconds = getattr(module, "SECONDS", {})
    if seconds:
        terminalreporter.section("cases of the engines")
        for case, (made, checked) in seconds.items():
            terminalreporter.write_line(f"{case:32} made in {made:5.1f} s, checked in {checked:4.1f} s")
