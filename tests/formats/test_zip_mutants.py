"""Zip archives mutated by structure: whenever ckptool reads one, torch reads the same values and Python's `zipfile` the
same records."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.checkpoint.tree import walk
from ckptool.errors import Ambiguous, CkptoolError
from ckptool.formats import read
from fixtures.make import make_all
from tests.support.files import written
from tests.support.zip_mutants import (
    Tally,
    behind_a_guard,
    benign,
    by_torch,
    disagreement,
    interrupted,
    mutant,
    rezipped_mutant,
    tree,
    two_in_one,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mutants")


def judged(seeds: range, folder: Path) -> Tally:
    tally = Tally()
    for seed in seeds:
        tally.add(*mutant(seed, folder), folder / "mutant.pt")
    return tally


def test_readers_agree_about_whatever_is_read(folder: Path) -> None:
    tally = judged(range(600), folder)
    assert not tally.wrong, "\n".join(tally.wrong)
    assert tally.read > 60 and sum(tally.refused.values()) > 300, tally


@pytest.mark.soak
@pytest.mark.parametrize("part", range(20))
def test_soak_readers_agree_about_whatever_is_read(part: int, folder: Path) -> None:
    tally = judged(range(1000 + 1000 * part, 2000 + 1000 * part), folder)
    assert not tally.wrong, "\n".join(tally.wrong)


# What must not be refused ---------------------------------------------------------------------------------------------


def kinds(path: Path) -> list[str]:
    """What is in a file, shortly."""
    return [f"{value!r:.60}" for _, value in walk(read(path).tree)]


def test_every_fixture_is_read_however_it_was_zipped_again(folder: Path) -> None:
    seen = 0
    for path in make_all(folder / "fixtures").values():
        if not path.is_file() or not zipfile.is_zipfile(path):
            continue
        expected, data = kinds(path), path.read_bytes()
        for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            again = written(rezipped_mutant(data, compression), folder / "again.pt")
            assert kinds(again) == expected, path.name
        seen += 1
    assert seen > 5


def test_an_interrupted_edit_is_read_and_undone(folder: Path) -> None:
    rng, path = random.Random(5), folder / "torn.pt"
    for data in benign(folder):
        whole = written(data, path)
        before = ckptool.load(whole, mmap=False)
        torn = written(interrupted(data, folder, rng), path)
        assert disagreement(torn, ckptool.load(torn, mmap=False)) == ""
        ckptool.edit(torn, set={"mark": 1}, in_place=True)
        assert path.read_bytes()[: len(data)] == data
        after = torch.load(path, weights_only=True)
        assert after.pop("mark") == 1 and list(after) == list(before)


# What must ------------------------------------------------------------------------------------------------------------


def test_a_second_directory_however_odd_is_refused_and_nothing_is_cut_off(folder: Path) -> None:
    rng, path = random.Random(6), folder / "two.pt"
    plain = by_torch(tree(2, 1))
    for number in range(150):
        data = (behind_a_guard if number % 3 else two_in_one)(plain, rng)
        written(data, path)
        for write in (
            lambda: ckptool.remap(path, to="cpu", in_place=True),
            lambda: ckptool.edit(path, set={"mark": 1}, in_place=True),
        ):
            with pytest.raises(CkptoolError) as caught:
                write()
            assert path.read_bytes() == data, number
        assert number % 3 == 0 or type(caught.value) is Ambiguous, (number, caught.value)


def test_bytes_of_others_behind_the_archive_are_refused_and_not_cut_off(folder: Path) -> None:
    """They end in what an interrupted edit leaves at the very end, and do not begin as one."""
    plain = by_torch(tree(2, 1))
    for middle in (
        b"notes of mine, " * 9,
        b"PK\x03\x04\x14" + bytes(60),
        b"\0" * 3 + b"x" * 80,
        by_torch(tree(1, 9), "m")[:-200],
    ):
        path = written(plain + middle + plain[-42:], folder / "notes.pt")
        with pytest.raises(Ambiguous):
            ckptool.edit(path, set={"mark": 1}, in_place=True)
        assert path.read_bytes() == plain + middle + plain[-42:]
