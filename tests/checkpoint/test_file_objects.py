"""Open files in the place of paths: what they hold from where they stand."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from ckptool.checkpoint.file_objects import source_of
from ckptool.errors import UsageError


@pytest.mark.parametrize(
    "file",
    [io.StringIO("text"), 3, None, type("Odd", (), {"read": lambda self, n=-1: "text"})()],
    ids=["text", "number", "none", "odd"],
)
def test_what_gives_no_bytes_is_refused(file: Any) -> None:
    with pytest.raises(UsageError):
        source_of(file)


def test_closed_and_write_only_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with path.open("wb") as file, pytest.raises(UsageError, match="cannot be read from"):
        source_of(file)
    with pytest.raises(UsageError, match="cannot be read from"):
        source_of(file)
    with path.open() as text, pytest.raises(UsageError, match="open as text"):
        source_of(text)
