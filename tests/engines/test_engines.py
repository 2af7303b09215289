"""The real engines (`make engines`): each writes its folders anew, and each folder is one checkpoint."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.cli import Run
from tests.support.engine_cases import ROOT, check_case, judged_layouts, scripts

pytestmark = pytest.mark.engines
CASES = [(script, case) for script, cases in scripts().items() for case in cases]
SECONDS: dict[str, tuple[float, float]] = {}  # of each case: to make it, and to check it


@pytest.fixture(scope="session")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | str]:
    """The chosen cases, or why one could not be made. One process for a script: its imports take longest."""
    out = tmp_path_factory.mktemp("made")
    chosen: dict[str, list[str]] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.originalname == test_what_an_engine_writes.__name__:
            chosen.setdefault(item.callspec.params["script"], []).append(item.callspec.params["case"])
    found: dict[str, Path | str] = {}
    for script, cases in chosen.items():
        command = [sys.executable, "-m", f"fixtures.engines.{script}", out, *cases]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1_200, cwd=ROOT.parents[1], check=False)
        found |= dict.fromkeys(cases, done.stderr[-4_000:])
        for line in done.stdout.splitlines():
            name, tab, seconds = line.partition("\t")
            if tab and name in cases:
                found[name] = out / name
                SECONDS[name] = float(seconds), 0.0
    return found


@pytest.mark.parametrize(("script", "case"), CASES, ids=[case for _, case in CASES])
def test_what_an_engine_writes(script: str, case: str, made: dict[str, Path | str], tmp_path: Path, run: Run) -> None:
    """Is one checkpoint, with the engine's own values."""
    folder = made[case]
    assert isinstance(folder, Path), f"{script}: {folder}"
    start = time.monotonic()
    check_case(folder, tmp_path, run)
    SECONDS[case] = SECONDS[case][0], time.monotonic() - start
    judged = judged_layouts()[case].optimizer.startswith("yes")
    assert (folder / "optimizer.safetensors").exists() == judged
