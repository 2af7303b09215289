"""`inspect --only` and `-q`: what is chosen, what is read, what a script gets."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptool
from ckptool.checkpoint.patterns import matcher
from ckptool.errors import NoMatch
from tests.support.cli import Run
from tests.support.programs import programs


@pytest.fixture
def file(tmp_path: Path) -> str:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "notes": {"lr": 0.1}}
    torch.save(saved, tmp_path / "m.pt")
    return str(tmp_path / "m.pt")


PATTERNS = ["*.bias", "0.weight", "model/0.*", "epoch", "*lr", "re:running", "*", "optimizer/*"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_only_chooses_by_address_or_key_everywhere(pattern: str, file: str, run: Run) -> None:
    every, chosen = ckptool.inspect(file), ckptool.inspect(file, only=pattern)
    matches = matcher(pattern)

    def wanted(path: str) -> bool:
        return matches(path) or any(matches(path.removeprefix(f"{root}/")) for root in ("model", "optimizer", "notes"))

    for rows, all_rows in ((chosen.tensors, every.tensors), (chosen.entries, every.entries)):
        assert [row.address for row in rows] == [row.address for row in all_rows if wanted(row.address)]
    assert chosen.tensor_bytes == sum(row.tensor.nbytes for row in chosen.tensors)
    found = run("inspect", file, "--only", pattern, "-q")
    assert found.out.splitlines() == [row.address for row in (*chosen.tensors, *chosen.entries)]
    facts = json.loads(run("inspect", file, "--only", pattern, "--json").out)
    assert ["/".join(map(str, row["path"])) for row in facts["tensors"]] == [row.address for row in chosen.tensors]
    assert (
        sum(part["tensors"] for part in facts["parts"]) == len(chosen.tensors)
        and run("inspect", file, "--only", pattern).code == 0
    )


def test_a_pattern_that_matches_nothing_is_named(file: str, run: Run) -> None:
    with pytest.raises(NoMatch, match="'none'"):
        ckptool.inspect(file, only=["epoch", "none"])
    assert run("inspect", file, "--only", "none").code == 1


def test_statistics_are_of_what_is_chosen(tmp_path: Path, run: Run) -> None:
    torch.save({"m": {"a.weight": torch.ones(9), "b.weight": torch.full((9,), torch.nan)}}, tmp_path / "m.pt")
    one = ckptool.inspect(tmp_path / "m.pt", stats=True, only="a.weight")
    assert list(one.statistics) == ["m/a.weight"] and one.statistics["m/a.weight"].mean == 1
    assert not one.notes and ckptool.inspect(tmp_path / "m.pt", stats=True).notes[0].code == "non-finite"


def test_names_are_for_a_shell_loop(file: str) -> None:
    program = str(programs() / "ckptool")
    script = (
        f"for name in $({program} inspect {file} -q --only '*.bias'); do {program} show {file}#$name || exit 9; done"
    )
    found = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert found.returncode == 0 and found.stdout.count("f32 [4]") == 2, found.stderr


def test_verify_names_the_files_that_are_not_fine(file: str, tmp_path: Path, run: Run) -> None:
    cut = tmp_path / "cut.pt"
    cut.write_bytes(Path(file).read_bytes()[:-40])
    found = run("verify", "-q", file, str(cut))
    assert (found.code, found.out.splitlines()) == (1, [str(cut)])
    assert (run("verify", "-q", file).code, run("verify", "-q", file).out) == (0, "")
