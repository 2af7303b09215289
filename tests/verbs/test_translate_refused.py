"""Rules and weights that do not go together: an error that points at the rule, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import CkptoolError, UsageError

STATE = {
    "l.0.qkv": torch.arange(42.0).reshape(7, 6),
    "l.1.qkv": torch.arange(42.0).reshape(7, 6),
    "e.0.w": torch.ones(2, 3),
    "e.2.w": torch.ones(2, 3),
    "half": torch.ones(2, 3, dtype=torch.float16),
    "count": torch.tensor(3),
}

WRONG = {
    "sizes that do not divide": ("l.{n}.qkv => l.{n}.{q,k,v} : split 0", "7 cannot be split into 3 equal parts"),
    "sizes of another sum": ("l.{n}.qkv => l.{n}.{q,k,v} : split 0 [2, 2, 2]", "7 is not 2 \\+ 2 \\+ 2"),
    "an unbound variable": ("l.{n}.qkv => l.{n}.{q,k} : split 0 [heads, -1]", "'heads' has no value"),
    "a variable on the right alone": ("l.{n}.qkv => l.{m}.x", "'m'"),
    "two for one key": ("l.{n}.qkv => x", "two tensors would be 'x'"),
    "a member that is missing": ("e.{e}.w => e : stack 0 over e", "there is nothing for e = 1"),
    "a name that is missing": ("l.{n}.qkv, l.{n}.bias => l.{n}.x : cat 0", "no l.0.bias"),
    "a division with a rest": ("l.{n}.qkv => l.{n}.x : unflatten 0 [7 / 2, 2]", "7 cannot be divided by 2"),
    "a division by zero": ("l.{n}.qkv => l.{n}.x : unflatten 0 [7 // 0, 2]", "by 0"),
    "a huge repeat": ("l.{n}.qkv => l.{n}.x : repeat 0 1000000000", "would become"),
    "a huge pad": ("l.{n}.qkv => l.{n}.x : pad 0 9007199254740992", "would become"),
    "a huge resize": ("l.{n}.qkv => l.{n}.x : resize [99999999999, -1] rows(mean)", "would become"),
    "a number beyond all": ("l.{n}.qkv => l.{n}.x : pad 0 9007199254740992 * 9007199254740992", "9007199254740992"),
    "no such dimension": ("l.{n}.qkv => l.{n}.x : transpose 0 2", "has no dimension 2"),
    "a dimension of a number": ("count => count2 : transpose", "has no dimension"),
    "two types": ("half, e.0.w => x : cat 0", "cannot be put together"),
    "an unknown operation": ("half => x : transmogrify", "unknown operation 'transmogrify'"),
    "an operation without its numbers": ("half => x : permute", "is not how permute is written"),
    "code": ("half => x : reshape [__import__('os').getpid(), -1]", "is not an expression"),
    "deep arithmetic": ("half => x : pad 0 " + "(" * 140 + "1" + ")" * 140, "is not an expression|cannot be padded"),
    "many names": ("half => {a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}", "8,192 names"),
    "more tensors than names": ("l.{n}.qkv => l.{n}.{a,b} : split 0 [2, 2, 3]", "3 tensors come out of it"),
    "an integer that is added to": ("count => x : add 1", "is of no floating type"),
    "no match": ("nothing => x", "matches no key"),
    "a keyless name": ("re:(h)alf => ", "is not a rule"),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.save(STATE, tmp_path / "in.pt")
    return tmp_path / "in.pt"


@pytest.mark.parametrize("name", WRONG)
def test_an_error_points_at_the_rule(name: str, file: Path) -> None:
    rule, message = WRONG[name]
    before = sorted(file.parent.iterdir())
    with pytest.raises(CkptoolError, match=message):
        ckptool.translate(file, rule, file.with_name("out.pt"), rest="keep")
    assert sorted(file.parent.iterdir()) == before
    rules = file.with_name("rules.yaml")
    rules.write_text(f"# comment\nrules:\n  - {json.dumps(rule)}\n")
    with pytest.raises(CkptoolError, match=message) as caught:
        ckptool.translate(file, out=file.with_name("out.pt"), rules_file=rules, rest="keep")
    assert "rules.yaml, line 3" in str(caught.value)
    assert sorted(file.parent.iterdir()) == sorted([*before, rules])


def test_variables_that_are_each_other(file: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("variables: {a: b + 1, b: a - 1}\nrules: ['half => x : pad 0 a']\n")
    with pytest.raises(UsageError, match="the variables are computed of each other: a → b → a"):
        ckptool.translate(file, out=tmp_path / "out.pt", rules_file=rules, rest="keep")


def test_numbers_are_set_or_configured(file: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text": {"heads": 3}}')
    rule: Any = "l.{n}.qkv => l.{n}.{q,k} : split 0 [text.heads, -1]"
    ckptool.translate(file, rule, tmp_path / "out.pt", rest="keep")
    assert torch.load(tmp_path / "out.pt")["l.0.q"].shape == (3, 6)
    with pytest.raises(UsageError, match="no rule has a variable"):
        ckptool.translate(file, rule, tmp_path / "no.pt", rest="keep", set="head=3")


def test_files_that_are_no_rules(file: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    for text, message in {
        "rules: 3\n": "line 1: not a list",
        "a: b\n": "'a' is none of",
        "rules: []\nrules: []\n": "'rules' stands there twice",
        "- [a, b]\n": "line 1",
        "'": "not valid YAML|line 1",
        "x" * 10 + "\n" + "y: [" * 3000: "nested too deep|line",
        "fill: ['a => ones like b']\n": "is not of the form",
    }.items():
        rules.write_text(text)
        with pytest.raises(UsageError, match=message):
            ckptool.translate(file, out=tmp_path / "out.pt", rules_file=rules, rest="keep")
    rules.write_text("rules: ['half => x']\n")
    with pytest.raises(UsageError, match=r"ckptool\.translate"):
        ckptool.convert(file, tmp_path / "out.pt", rules_file=rules)
    assert not (tmp_path / "out.pt").exists()
