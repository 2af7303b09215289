"""Folders that real engines wrote, as they lie in the repository: each is one checkpoint in every verb."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import Run
from tests.support.engine_cases import check_case, committed_cases


@pytest.mark.parametrize("case", committed_cases(), ids=lambda case: case.name)
def test_a_folder_is_one_checkpoint_with_the_values_of_its_engine(case: Path, tmp_path: Path, run: Run) -> None:
    check_case(case, tmp_path, run)


def test_the_folders_are_small() -> None:
    files = [path for case in committed_cases() for path in case.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 3_000_000
