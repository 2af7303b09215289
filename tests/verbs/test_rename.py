"""`rename`: rules and files of them, and all that follows the keys: `_metadata`, the names that optimizers keep."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptool
from ckptool.errors import CkptoolError, Conflict, NoMatch, UsageError
from tests.support.files import load, saved, weights
from tests.support.looped import looped
from tests.support.same import assert_same_objects

STATE = weights("blocks.0.attn.q.weight", "blocks.10.mlp.weight", "head.weight")


def keys_by(rules: list[str], *keys: str) -> list[str]:
    return list(ckptool.rename(dict.fromkeys(keys, 0), rules, at=""))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return saved({"state_dict": STATE, "epoch": 1}, tmp_path / "in.pt")


# Rules ---------------------------------------------------------------------------------------------------------------


@looped(
    ("rule", "old", "new"),
    [
        ("a => b", "a", "b"),
        ("a => b", "aa", None),  # the whole key
        ("a.* => b.*", "a.x.y.z", "b.x.y.z"),  # * crosses dots
        ("*.weight => *.w", "a.b.weight", "a.b.w"),
        ("*.a.* => *.b.*", "x.a.y", "x.b.y"),
        ("blocks.{n}.attn.* => layers.{n}.self_attn.*", "blocks.12.attn.q.weight", "layers.12.self_attn.q.weight"),
        ("blocks.{n}.* => layers.{n}.*", "blocks.1.2.w", "layers.1.2.w"),
        ("{n}.w => {n}", "a.b.w", None),  # {n} does not cross dots
        ("{a}.{b} => {b}.{a}", "x.y", "y.x"),
        ("{a}.{a} => twice.{a}", "x.x", "twice.x"),
        ("{a}.{a} => twice.{a}", "x.y", None),
        ("{n}.* => all.{n}.{n}.*", "1.w", "all.1.1.w"),
        ("a.b => c", "axb", None),  # a dot is a dot
        ("a+(b) => c\\1", "a+(b)", "c1"),  # no regular expression
        (r"\* => star", "*", "star"),
        (r"a => \{b\}", "a", "{b}"),
        ("a  =>   b", "a", "b"),
        ("a* => b*", "a\nb", "b\nb"),
        (r"re:^enc\.(.*)$ => encoder.\1", "enc.a.b", r"encoder.a.b"),
        (r"re:(?P<head>\w+)\.(\d+) => \g<head>_\2", "h.12", "h_12"),
        (r"re:(?i)ENC\.(?s:(.*)) => enc.\1", "eNc.a\nb", "enc.a\nb"),
        (r"re:(?x)(a) # a comment => \1\1", "a", "aa"),
        (r"re:enc => x", "encoder", None),  # the whole key, here too
        ("ключ.* => key.*", "ключ.w", "key.w"),
        ("f{n}.weight => head.{n+1}.weight", "f1.weight", "head.2.weight"),
        ("f{n}.weight => head.{n+1}.weight", "fc.weight", None),  # a sum is of a number
        ("{n}.{m}.* => {m - 1}.{n+10}.*", "0.1.w", "0.10.w"),
        ("layer{n}.w => layer{n+1}.w", "layer009.w", "layer010.w"),
        ("{n} => {n}.{n+0}", "007", "007.007"),
        (r"{n} => \{n+1\}", "1", "{n+1}"),
        ("a.{n}.{m} => b.{2 * n + m}", "a.3.1", "b.7"),
    ],
)
def test_one_rule(rule: str, old: str, new: str | None) -> None:
    if new is not None:
        assert keys_by([rule], old) == [new]
        return
    with pytest.raises(NoMatch) as caught:
        keys_by([rule], old)
    assert caught.value.exit_code == 1 and caught.value.what == f"the rule {rule!r} matches no key"


@looped(
    ("rule", "says"),
    [
        ("a", "is not a rule"),
        ("a =>", "is not a rule"),
        ("=> b", "is not a rule"),
        ("a => b => c", "is not a rule"),
        ("", "is not a rule"),
        ("a.* => {n}.*", r"\{n\} is not on the left side"),
        ("a => b.*", "more \\* than the left"),
        ("re:( => b", "is invalid"),
        (r"re:(a) => \2", "is invalid"),
        (r"re:a => \g<name>", "is invalid"),
        (r"re:a+ => \1", "is invalid"),
        ("a.{q,k} => b.{q,k} : transpose", "it changes tensors"),
        ("f{n} => g{n**2}", r"a \{ begins a variable"),
        ("f{n} => g{n+m}", r"\{m\} is not on the left side"),
        ("f{n} => g{}", r"a \{ begins a variable"),
        ("f{n => g", r"a \{ begins a variable"),
        ("f{n} => g{m+1}", r"\{m\} is not on the left side"),
        (r"re:f(\d) => g{n+1}", "is for rules without re:"),
    ],
)
def test_a_rule_that_cannot_work(rule: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        keys_by([rule], "a")
    assert caught.value.why


@looped(
    ("rules", "keys", "kind", "says"),
    [
        ([], "a", UsageError, "rename was given no rule"),
        (["a => b", "x.* => y.*"], "a", NoMatch, r"the rule 'x\.\* => y\.\*' matches no key"),
        (["* => y.*", "a => b"], "a", NoMatch, "Earlier rules took every key"),
        (["*.w => w"], "a.w b.w c", Conflict, r"keys of the file would collide: a\.w and b\.w would both be 'w'"),
        (["*.w => w"], "a.w b.w c.w", Conflict, "would all be 'w'"),
        (["a.* => *"], "a.w w", Conflict, r"a\.w and w would both be 'w'"),
        (["a* => *"], "a", Conflict, "become empty"),
        (["f{n} => f{n-1}"], "f0", UsageError, r"f0: 0-1 is below zero"),
        (["*a*a*b => c"], "a" * 1_500 + "b", UsageError, "too many ways"),
    ],
)
def test_refusals(rules: list[str], keys: str, kind: type[CkptoolError], says: str) -> None:
    with pytest.raises(kind, match=says):
        keys_by(rules, *keys.split())


def test_a_rule_with_many_stars_on_a_key_of_usual_length() -> None:
    assert keys_by(["*a*a*b => c"], "ca" * 20 + "b") == ["c"]
    long = "model.layers.1.attn.q_proj.lora_A." + "x" * 60
    assert keys_by(["*.layers.*.attn.*.lora_*.* => c"], long) == ["c"]


keys = st.lists(st.text("abé._0", min_size=1, max_size=6), min_size=1, max_size=6, unique=True)
paths = st.lists(st.sampled_from(["a", "b", "0", "module"]), min_size=2, max_size=4).map(".".join)
# Injective renamings of any key, each with its inverse.
INJECTIVE = [
    ("* => x.*", "x.* => *"),
    ("* => *.end", "*.end => *"),
    (r"re:(?s)(.)(.*) => \2-\1", r"re:(?s)(.*)-(.) => \2\1"),
]


@given(keys, st.sampled_from(INJECTIVE))
def test_there_and_back_is_the_identity(names: list[str], rules: tuple[str, str]) -> None:
    before = after = dict.fromkeys(names, 0)
    for rule in rules:
        after = ckptool.rename(after, rule, at="")
    assert_same_objects(before, after)


# What follows --------------------------------------------------------------------------------------------------------


@given(st.lists(paths, min_size=1, max_size=6, unique=True), st.sampled_from(["x.", "a.b.", "module."]))
def test_there_and_back_with_the_versions_of_modules(names: list[str], prefix: str) -> None:
    above = {".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 1)}
    before: Any = collections.OrderedDict(dict.fromkeys(names, 0))
    before._metadata = {path: {"version": number} for number, path in enumerate(["", *sorted(above)])}
    there = ckptool.rename(before, f"* => {prefix}*", at="")
    assert_same_objects(before, ckptool.rename(there, f"{prefix}* => *", at=""))


def test_names_of_state_that_would_collide() -> None:
    moments = {"exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1)}
    optimizer = {"state": {"a.w": moments, "b.w": dict(moments)}, "param_groups": [{"params": ["a.w", "b.w"]}]}
    with pytest.raises(Conflict, match="optimizer's state"):
        ckptool.rename({"model": weights("a.w"), "optimizer": optimizer}, "a.* => b.*")


# Files of rules ------------------------------------------------------------------------------------------------------


def by_file(text: str, folder: Path, *keys: str) -> list[str]:
    (path := folder / "rules.yaml").write_text(text, encoding="utf-8")
    return list(ckptool.rename(dict.fromkeys(keys, 0), rules_file=str(path), at=""))


@looped(
    ("text", "line"),
    [
        ("- a => b\n- c\n", 2),
        ("- a => b\n\n# more\n- x.* => {n}\n", 4),
        ("rules:\n  - a => b\n  - [nested]\n", 3),
        ("a: b\nc: {d: e}\n", 2),
        ("a: b\n[c]: d\n", 2),
        ("a: b\n  c: d\n", 2),
        ("- 're:( => x'\n", 1),
        ("just text\n", 1),
        ("", 1),
        ("- a => b\n- x => y\n", 2),  # which matches nothing
    ],
)
def test_an_error_in_a_rules_file_points_at_its_line(text: str, line: int, tmp_path: Path) -> None:
    with pytest.raises((UsageError, NoMatch)) as caught:
        by_file(text, tmp_path, "a")
    assert f"rules.yaml, line {line}" in caught.value.what, caught.value


# Files ---------------------------------------------------------------------------------------------------------------


def test_there_and_back_in_place(file: Path) -> None:
    before = load(file)
    ckptool.rename(file, ["blocks.* => layers.*"], in_place=True, verify=True)
    ckptool.rename(file, ["layers.* => blocks.*"], in_place=True, verify=True)
    assert_same_objects(before, load(file))
