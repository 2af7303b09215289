"""Folders that real engines wrote, as they lie in the repository: each is one checkpoint in every verb."""

import importlib.util
import json
import random
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import ckptool
from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.tree import memories, walk
from ckptool.conventions.optimizer_keys import nested
from ckptool.conventions.state_dicts import optimizers
from ckptool.formats import FORMATS, PROGRAMS, Format
from tests.support.cli import Run
from tests.support.engine_cases import check_case, committed_cases, judged_layouts, scripts
from tests.support.hostile_folders import Mutation, folder_mutations, problems_with
from tests.support.looped import looped


@looped("case", committed_cases(), ids=lambda case: case.name, at_once=4, here=0.6)
def test_a_folder_is_one_checkpoint_with_the_values_of_its_engine(case: Path, tmp_path: Path, run: Run) -> None:
    check_case(case, tmp_path, run)


@looped("case", committed_cases(), ids=lambda case: case.name)
def test_every_parameter_has_a_step_and_moments_of_its_own(case: Path) -> None:
    """torch counts steps in place: one that parameters shared would be counted once for each of them."""
    if "rules" in json.loads((case / "case.json").read_text()):
        return
    tree = ckptool.open(case / "checkpoint").tree
    for _, optimizer in optimizers(nested(tree)):
        tensors = [entry for _, entry in walk(optimizer["state"]) if isinstance(entry, TensorEntry) and entry.numel]
        assert len({*memories(dict(enumerate(tensors))).values()}) == len(tensors)


def test_what_is_never_a_file_is_known_as_a_folder() -> None:
    never = Format("", "")
    no_file = [each for each in FORMATS if (each.begins, each.endings) == (never.begins, never.endings)]
    assert [each.name for each in no_file if not each.is_folder] == [*PROGRAMS]  # zips as torch writes them


def test_the_folders_are_small() -> None:
    files = [path for case in committed_cases() for path in case.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 3_000_000


def test_the_table_of_layouts_names_every_case_and_its_judges() -> None:
    rows = judged_layouts()
    assert rows.keys() == {case for cases in scripts().values() for case in cases}
    for case, row in rows.items():
        assert row.layout and row.judge and row.optimizer.startswith(("yes: ", "no: ")), case
    for case in committed_cases():
        assert (case / "optimizer.safetensors").exists() == rows[case.name].optimizer.startswith("yes"), case.name
        assert ("rules" in json.loads((case / "case.json").read_text())) == (case.name == "megatron-mp-rank")


# Broken in one way each: an error that names the file, or the same values; never a wrong `ok` ------------------------


SAMPLE = 18  # in every run of the tests; all of them are in `make soak`


def broken() -> Iterator[tuple[Path, Mutation]]:
    rng = random.Random(11)
    for case in committed_cases():
        about = json.loads((case / "case.json").read_text())
        if "rules" in about:  # tests/transforms/test_join_ranks.py has those
            continue
        if "needs" not in about or importlib.util.find_spec(about["needs"]):
            yield from ((case, mutation) for mutation in folder_mutations(case / "checkpoint", rng))


def wrong_in(mutations: Iterable[tuple[Path, Mutation]], scratch: Path, run: Run) -> dict[str, list[str]]:
    """What is wrong with how the verbs take each of the broken folders."""
    found = {}
    for case, mutation in mutations:
        shutil.rmtree(scratch, ignore_errors=True)
        folder, out = scratch / "checkpoint", scratch / "out.safetensors"
        shutil.copytree(case / "checkpoint", folder)
        mutation.do(folder)
        found[f"{case.name}: {mutation}"] = problems_with(folder, mutation, case / "weights.safetensors", out, run)
    return {what: problems for what, problems in found.items() if problems}


def test_a_sample(tmp_path: Path, run: Run) -> None:
    every = list(broken())
    assert wrong_in(random.Random(3).sample(every, min(SAMPLE, len(every))), tmp_path / "work", run) == {}


@pytest.mark.soak
@pytest.mark.parametrize("case", committed_cases(), ids=lambda case: case.name)
def test_every_file_in_every_way(case: Path, tmp_path: Path, run: Run) -> None:
    assert wrong_in((each for each in broken() if each[0] == case), tmp_path / "work", run) == {}
