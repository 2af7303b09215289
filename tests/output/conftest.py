"""Folders that are there already, and ways to replace them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptool.output import folders
from tests.support.folder_plans import OLD


@pytest.fixture
def old(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    for name, data in OLD.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(params=["exchanged", "put aside"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of replacing a folder: that of Linux, and that of file systems which cannot exchange two names."""
    if request.param == "put aside":
        monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    return str(request.param)
