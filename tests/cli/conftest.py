"""Checkpoints that the command line is tried on, and a way to run it in this process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fixtures.make import make_all
from tests.support.repositories import git_output, own_home
from tests.support.small_files import make_small_files

NAMES = ("dp.pt compiled.pt cuda.pt training.pt gan.pt ties.pt numpy_values.pt model.safetensors legacy.pt").split()


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make_all(folder, NAMES)
    return folder


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small files of all kinds, and a run; not to be changed."""
    folder = tmp_path_factory.mktemp("worst") / "made"
    folder.mkdir()
    make_small_files(folder)
    return folder


@pytest.fixture
def files(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh copy of the files, which is also the working directory."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "CKPTOOL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty git repository, which is the working directory; its user has no other configuration."""
    own_home(tmp_path, monkeypatch)
    folder = tmp_path / "a repository"
    git_output("init", "-q", folder)
    monkeypatch.chdir(folder)
    return folder
