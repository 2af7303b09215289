"""What the fuzzer starts from, and what it found before, gone through once without it."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest

from ckptool.formats import read
from tests.fuzz.exercise import TooMuch, exercise, exercise_bytes
from tests.fuzz.mending import mended_tar, mended_zip
from tests.fuzz.seeds import TARGETS, seeds
from tests.support.files import written
from tests.support.hostile_inputs import KNOWN, ONE, pickle_zip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("of", [6, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("target", TARGETS)
def test_only_our_errors_come_out_of_any_seed(target: str, of: int) -> None:
    found = list(seeds(target))
    assert found
    for name, data in random.Random(target).sample(found, -(-len(found) // of)):
        try:
            exercise_bytes(data)
            if target == "pickle":
                exercise_bytes(pickle_zip(data, ONE))
        except Exception as finding:
            raise AssertionError(f"{name}: {finding!r}") from finding


def test_what_was_found_once_is_mended() -> None:
    for path in (Path(__file__).parent / "findings").glob("*"):
        exercise(os.fspath(path))


def test_checksums_are_set_right_after_a_change(tmp_path: Path) -> None:
    data = pickle_zip(*KNOWN)
    changed = data.replace(b"epoch", b"EPOCH")
    assert "EPOCH" in read(written(mended_zip(changed), tmp_path / "a.pt")).tree
    assert mended_zip(data) == data and mended_zip(b"PK\1\2" + bytes(100)) and mended_zip(b"") == b""
    name, tar = next(iter(seeds("tar")))
    broken = bytearray(tar)
    broken[100] ^= 1
    assert name and mended_tar(tar) != bytes(broken) and len(mended_tar(bytes(broken))) == len(tar)


def test_too_much_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.exercise.SECONDS", -1.0)
    with pytest.raises(TooMuch):
        exercise_bytes(struct.pack("<Q", 2) + b"{}")
