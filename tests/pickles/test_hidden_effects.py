"""Whatever stock torch runs, or is broken by, while it loads a file: it is mentioned, and nothing passes it on."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest

import ckptool
from ckptool.errors import CkptoolError
from tests.support.hidden_effects import HiddenEffect, fate, hidden_effects


def said(file: Path) -> bool:
    """Whether `scan` or opening it says something of a file."""
    try:
        return ckptool.scan(file).findings > 0
    except CkptoolError:
        return True


def passed_on(file: Path, out: Path) -> bool:
    """Whether a writer that has nothing to change, or one that has, passes it on without being told to."""
    for write in (lambda: ckptool.strip_module(file, out), lambda: ckptool.rename(file, ["w => v"], out)):
        try:
            write()
        except CkptoolError:
            continue
        out.unlink()
        return True
    return False


def check(case: HiddenEffect, folder: Path) -> str:
    file, out = folder / "in.pt", folder / "out.pt"
    what = fate(case.content, folder)
    mentioned = said(file)
    if what:
        assert mentioned, (case.title, what)
        assert not passed_on(file, out), (case.title, what)
    if case.fine:
        assert not what, (case.title, what)
        assert not mentioned, (case.title, "is as the library writes it")
    return what or ("said" if mentioned else "quiet")


def sweep(count: int, seed: int, folder: Path) -> Counter[str]:
    return Counter(check(case, folder) for case in itertools.islice(hidden_effects(random.Random(seed)), count))


@pytest.mark.filterwarnings("ignore")
def test_hidden_effects_are_said_and_not_passed_on(tmp_path: Path) -> None:
    found = sweep(30, 7, tmp_path)
    assert found["ran"] and found["quiet"] and found["said"] and len(found) > 3, found


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(10))
def test_hidden_effects_are_said_and_not_passed_on_at_length(seed: int, tmp_path: Path) -> None:
    print(sweep(200, 1_000 + seed, tmp_path))
