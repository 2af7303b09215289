"""What every test can have."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptool.cli import main
from tests.support.cli import Ran, Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process: `run("inspect", path)`."""

    def ran(*words: str | Path) -> Ran:
        capsys.readouterr()
        code = main([str(word) for word in words])
        return Ran(code, *capsys.readouterr())

    return ran
