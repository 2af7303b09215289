"""Real git repositories, with a home of their own."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.programs import path_with

IDENTITY = "[user]\n\tname = n\n\temail = n@example.org\n[init]\n\tdefaultBranch = main\n"
needs_lfs = pytest.mark.skipif(shutil.which("git-lfs") is None, reason="git-lfs is not installed")


def own_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder in which git finds an identity, and nothing of this machine's configuration."""
    for name in [name for name in os.environ if name.startswith(("GIT_", "XDG_"))]:
        monkeypatch.delenv(name)
    home = folder / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(IDENTITY)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("PATH", path_with())
    return home


def run_git(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *map(str, words)], env=os.environ | environment, capture_output=True, text=True, check=False
    )


def git_output(*words: str | Path, **environment: str) -> str:
    done = run_git(*words, **environment)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def commit(message: str) -> None:
    git_output("add", "-A")
    git_output("commit", "-q", "-m", message)
