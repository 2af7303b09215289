"""Several files at once: where one is refused, none is written; or the others are, where that was asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.files import saved, weights


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files, and between them one that has no weights."""
    monkeypatch.chdir(tmp_path)
    for name in ("one.pt", "three.pt"):
        saved(weights("module.a.w", "a.b"), tmp_path / name)
    saved({"epoch": 3}, tmp_path / "two.pt")
    return tmp_path


FILES = ("one.pt", "two.pt", "three.pt")


def test_as_json_each_file_has_its_object(three: Path, run: Callable[..., object]) -> None:
    ran = run("strip-module", *FILES, "--partial", "-d", "out", "--skip-refused", "--json")
    results = json.loads(ran.out)["results"]
    assert ran.code == 1 and [each["schema"].partition("/")[0] for each in results].count("ckptool.error") == 1
    assert len(results) == 3
