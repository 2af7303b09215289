"""Folders that real engines wrote, as they lie in the repository: each is one checkpoint in every verb."""

import json
from pathlib import Path

from tests.support.cli import Run
from tests.support.engine_cases import check_case, committed_cases, judged_layouts, scripts
from tests.support.looped import looped


@looped("case", committed_cases(), ids=lambda case: case.name, at_once=4, here=0.6)
def test_a_folder_is_one_checkpoint_with_the_values_of_its_engine(case: Path, tmp_path: Path, run: Run) -> None:
    check_case(case, tmp_path, run)


def test_the_folders_are_small() -> None:
    files = [path for case in committed_cases() for path in case.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 3_000_000


def test_the_table_of_layouts_names_every_case_and_its_judges() -> None:
    rows = judged_layouts()
    assert rows.keys() == {case for cases in scripts().values() for case in cases}
    for case, row in rows.items():
        rules = ("yes", "yes", "with `--rules`", "of what was converted")
        assert row.verbs == (rules if case == "megatron-mp-rank" else ("yes",) * 4), case
        assert row.layout and row.judge and row.optimizer.startswith(("yes: ", "no: ")), case
    for case in committed_cases():
        assert (case / "optimizer.safetensors").exists() == rows[case.name].optimizer.startswith("yes"), case.name
        assert ("rules" in json.loads((case / "case.json").read_text())) == (case.name == "megatron-mp-rank")
