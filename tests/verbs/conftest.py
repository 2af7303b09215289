"""A command line of the harness."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ckptool import cli
from tests.support.small_runs import MLP, Typed


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """A command line in an empty folder that has a run.yaml: exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(MLP | {"run": "runs/x"}))

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.main(words)
        return code, *capsys.readouterr()

    return run
