"""`rename` by rules and by files of rules."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptool
from ckptool.errors import Conflict, NoMatch, UsageError
from tests.support.files import load, saved, weights
from tests.support.same import assert_same_objects

RULES = ["blocks.{n}.attn.* => layers.{n}.self_attn.*", "blocks.{n}.* => layers.{n}.*"]
STATE = weights("blocks.0.attn.q.weight", "blocks.10.mlp.weight", "head.weight")
RENAMED = ["layers.0.self_attn.q.weight", "layers.10.mlp.weight", "head.weight"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return saved({"state_dict": STATE, "epoch": 1}, tmp_path / "in.pt")


def test_rules(file: Path, tmp_path: Path) -> None:
    done = ckptool.rename(file, RULES, tmp_path / "out.pt", verify=True)
    after = load(tmp_path / "out.pt")
    assert list(after["state_dict"]) == RENAMED and after["epoch"] == 1
    assert_same_objects(list(STATE.values()), list(after["state_dict"].values()))
    assert done.summary == "2 of 3 keys renamed" and done.facts["changed"] == 2
    assert f"blocks.0.attn.q.weight → {RENAMED[0]}" in done.details


def test_a_file_of_rules(file: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("".join(f"- '{rule}'\n" for rule in RULES))
    ckptool.rename(file, out=tmp_path / "a.pt", rules_file=str(rules))
    ckptool.rename(file, RULES, tmp_path / "b.pt")
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()
    ckptool.rename(file, "head.* => out.*", tmp_path / "c.pt", rules_file=str(rules))  # one rule may be a text
    assert list(load(tmp_path / "c.pt")["state_dict"]) == [*RENAMED[:2], "out.weight"]


def test_there_and_back_in_place(file: Path) -> None:
    before = load(file)
    ckptool.rename(file, ["blocks.* => layers.*"], in_place=True, verify=True)
    ckptool.rename(file, ["layers.* => blocks.*"], in_place=True, verify=True)
    assert_same_objects(before, load(file))


def test_rules_that_leave_every_key(file: Path, tmp_path: Path) -> None:
    done = ckptool.rename(file, ["* => *"], tmp_path / "out.pt")
    assert done.how == "copy" and (tmp_path / "out.pt").read_bytes() == file.read_bytes()


def test_refusals(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    with pytest.raises(UsageError, match="rename was given no rule"):
        ckptool.rename(file, out=out)
    with pytest.raises(UsageError, match="is not a rule"):
        ckptool.rename(file, ["blocks.*"], out)
    with pytest.raises(NoMatch) as caught:
        ckptool.rename(file, ["nothing.* => x.*"], out)
    assert caught.value.exit_code == 1
    with pytest.raises(Conflict, match="would all be 'w'"):
        ckptool.rename(file, ["*.weight => w"], out)
    assert not out.exists()


def test_at(tmp_path: Path) -> None:
    file = saved({"G": weights("a.w"), "D": weights("a.w")}, tmp_path / "in.pt")
    ckptool.rename(f"{file}#D", ["a.* => b.*"], tmp_path / "out.pt")
    assert [list(root) for root in load(tmp_path / "out.pt").values()] == [["a.w"], ["b.w"]]
