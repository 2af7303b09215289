"""Work that workers of somebody else do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.checkpoint import workers
from tests.support.errors import three_parts
from tests.support.files import saved


def test_work_is_done_in_the_folder_that_it_was_asked_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker on another machine stands in some folder of its own."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    saved({"a": torch.ones(3)}, tmp_path / "here" / "m.pt")
    monkeypatch.chdir(tmp_path / "there")
    is_done, report = workers._outcome_in(str(tmp_path / "here"), {}, ckptool.verify, "m.pt")
    assert is_done and report.fine and os.getcwd() == str(tmp_path / "there")
    is_done, error = workers._outcome_in(str(tmp_path / "none"), {}, ckptool.verify, "m.pt")
    assert not is_done and "has no folder" in error.what and three_parts(error)
    is_done, report = workers._outcome_in(str(tmp_path / "none"), {}, ckptool.verify, str(tmp_path / "here" / "m.pt"))
    assert is_done and report.fine
    gone = str(tmp_path / "gone")  # while it is worked on there: what comes next is not lost for it
    for _ in range(2):
        os.mkdir(gone)
        assert workers._outcome_in(gone, {}, os.rmdir, gone) == (True, None) and os.getcwd() == str(tmp_path / "there")
