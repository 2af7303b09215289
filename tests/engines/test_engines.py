"""The real engines (`make engines`): each writes its folders anew, and each folder is one checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import Run
from tests.support.engine_cases import ROOT, check_case

SCRIPTS = sorted(path.stem for path in ROOT.glob("make_*.py"))


@pytest.mark.engines
@pytest.mark.parametrize("script", SCRIPTS)
def test_what_an_engine_writes_is_one_checkpoint(script: str, tmp_path: Path, run: Run) -> None:
    made = tmp_path / "made"
    command = [sys.executable, "-m", f"fixtures.engines.{script}", made]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1_800, cwd=ROOT.parents[1], check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    cases = sorted(path.parent for path in made.glob("*/case.json"))
    assert cases
    for case in cases:
        (scratch := tmp_path / case.name).mkdir()
        check_case(case, scratch, run)
