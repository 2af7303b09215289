"""Folders of real engines with one file broken: an error that names it, or the same values; never a wrong `ok`."""

import importlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import Run
from tests.support.engine_cases import committed_cases
from tests.support.hostile_folders import Mutation, folder_mutations, problems_with

SAMPLE = 18  # in every run of the tests; all of them are in `make soak`


def broken() -> Iterator[tuple[Path, Mutation]]:
    rng = random.Random(11)
    for case in committed_cases():
        about = json.loads((case / "case.json").read_text())
        if "rules" in about:  # tests/transforms/test_join_ranks.py has those
            continue
        if "needs" not in about or importlib.util.find_spec(about["needs"]):
            yield from ((case, mutation) for mutation in folder_mutations(case / "checkpoint", rng))


def check(case: Path, mutation: Mutation, tmp_path: Path, run: Run) -> list[str]:
    shutil.rmtree(tmp_path, ignore_errors=True)
    folder = tmp_path / "checkpoint"
    shutil.copytree(case / "checkpoint", folder)
    mutation.do(folder)
    return problems_with(folder, mutation, case / "weights.safetensors", tmp_path / "out.safetensors", run)


def test_a_sample(tmp_path: Path, run: Run) -> None:
    every = list(broken())
    wrong = {}
    for case, mutation in random.Random(3).sample(every, min(SAMPLE, len(every))):
        if found := check(case, mutation, tmp_path / "work", run):
            wrong[f"{case.name}: {mutation}"] = found
    assert not wrong


@pytest.mark.soak
@pytest.mark.parametrize("case", committed_cases(), ids=lambda case: case.name)
def test_every_file_in_every_way(case: Path, tmp_path: Path, run: Run) -> None:
    wrong = {}
    for found_in, mutation in broken():
        if found_in == case and (found := check(case, mutation, tmp_path / "work", run)):
            wrong[str(mutation)] = found
    assert not wrong
