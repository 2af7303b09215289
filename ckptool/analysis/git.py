"""Git as both of its verbs ask it, and what git-lfs puts in the place of a large file."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection

from ckptool.errors import FileProblem, RunFailed

SMALL = 1024  # bytes, which no pointer of git-lfs has
POINTER = re.compile(
    rb"version https://git-lfs\.github\.com/spec/v1\n(?:.*\n)*?oid sha256:([0-9a-f]{64})\nsize (\d+)\n"
)


def git(*words: str, ok: Collection[int] = (0,), given: bytes = b"", at: str | None = None) -> str | None:
    """The output of a git command; None where it ends with another code of `ok` than 0.

    Raises `RunFailed` with what git says, `FileProblem` where there is no git.
    """
    try:
        done = subprocess.run(["git", *words], input=given, capture_output=True, cwd=at, check=False)
    except OSError as error:
        raise FileProblem("git could not be started", str(error), "Install git.") from error
    if done.returncode not in ok:
        said = os.fsdecode(done.stderr).strip().partition("\n")[0]
        raise RunFailed(f"git {words[0]} ended with code {done.returncode}: {said}")
    return None if done.returncode else os.fsdecode(done.stdout)
