"""What `make engines` prints at its end, the cases and their seconds; and what torchvision needs to be imported."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torchvision") is not None:  # here, and in the processes that the tests start
    SHIM = str(Path(__file__).parent / "path")
    os.environ["PYTHONPATH"] = os.pathsep.join([SHIM, *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path.append(SHIM)
    import_module("torchvision_operators")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    module = sys.modules.get("tests.engines.test_engines")
    seconds = getattr(module, "SECONDS", {})
    if seconds:
        terminalreporter.section("cases of the engines")
        for case, (made, checked) in seconds.items():
            terminalreporter.write_line(f"{case:32} made in {made:5.1f} s, checked in {checked:4.1f} s")
