"""New keys by rules, and all that follows them: `_metadata`, optimizers, averaged models."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.nodes import OrderedDict
from ckptool.conventions.state_dicts import StateDict, model_state_dicts
from ckptool.errors import Conflict, FileProblem, NoMatch, UsageError
from ckptool.names import steps
from ckptool.names.rule_files import renaming
from ckptool.names.rules import Rule
from ckptool.transforms.rename import Renamed, apply
from fixtures.traps import TRAPS, batch_norm_model
from tests.support.files import opened, weights
from tests.support.looped import looped
from tests.support.same import assert_same_tree
from tests.support.stripping import stripped


def by_rules(checkpoint: Checkpoint, roots: Sequence[StateDict], rules: Sequence[Rule]) -> Renamed:
    return apply(checkpoint, roots, steps.by_rules(rules, dict.fromkeys(key for root in roots for key in root.names())))


def renamed(value: Any, folder: Path, *rules: str) -> Renamed:
    checkpoint = opened(value, folder)
    return by_rules(checkpoint, model_state_dicts(checkpoint), renaming(rules))


def keys_by(rules: list[str], *keys: str) -> list[str]:
    """The keys as rules rename them, without a checkpoint around."""
    checkpoint = Checkpoint(dict.fromkeys(keys, 0), "live")
    done = by_rules(checkpoint, model_state_dicts(checkpoint, named=True), renaming(rules))
    return list(done.checkpoint.tree)


def test_a_number_below_zero_is_refused() -> None:
    with pytest.raises(UsageError, match=r"f0: 0-1 is below zero"):
        steps.renamed(renaming(["f{n} => f{n-1}"]), ["f0"])


# Metadata ------------------------------------------------------------------------------------------------------------


def test_a_renamed_model_loads_as_before(tmp_path: Path) -> None:
    """BatchNorm of version 1 has no num_batches_tracked; strict loading works, as its version went along."""
    state = TRAPS["12-metadata-of-an-old-version"]()
    tree = renamed(state, tmp_path, "{n}.{name} => body.{n}.{name}").checkpoint.tree
    back = collections.OrderedDict((key, entry.torch()) for key, entry in tree.items())
    back._metadata = collections.OrderedDict(tree.metadata)  # type: ignore[attr-defined]
    nn.ModuleDict({"body": batch_norm_model()}).load_state_dict(back, strict=True)
    back._metadata["body.1"] = {"version": 2}  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        nn.ModuleDict({"body": batch_norm_model()}).load_state_dict(back, strict=True)


def test_modules_without_parameters_are_renamed_too(tmp_path: Path) -> None:
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(2, 2), nn.ReLU())})
    metadata = renamed(model.state_dict(), tmp_path, "body.* => trunk.*").checkpoint.tree.metadata
    assert list(metadata) == ["", "trunk", "trunk.0", "trunk.1"]


def test_other_attributes_and_kinds_stay(tmp_path: Path) -> None:
    state = batch_norm_model().state_dict()
    state.note = ["kept"]
    tree = renamed(state, tmp_path, "0.* => first.*").checkpoint.tree
    assert type(tree) is OrderedDict and tree.attributes is not None and tree.attributes["note"] == ["kept"]
    assert type(tree.metadata) is OrderedDict
    assert type(renamed(dict(state), tmp_path, "0.* => first.*").checkpoint.tree) is dict


def test_the_order_of_keys_stays(tmp_path: Path) -> None:
    tree = renamed(TRAPS["16-key-order"](), tmp_path, "m => zz").checkpoint.tree
    assert list(tree) == ["z", "a", "zz", "10", "9", "B", "é"]


# Optimizers ----------------------------------------------------------------------------------------------------------


def test_param_names_of_optimizers_follow(tmp_path: Path) -> None:
    value = TRAPS["17-adamw-param-names"]()
    done = renamed(value, tmp_path, "* => head.*").checkpoint.tree
    assert done["optimizer"]["param_groups"][0]["param_names"] == ["head.weight", "head.bias"]
    assert list(done["optimizer"]["state"]) == [0, 1] and done["optimizer"]["param_groups"][0]["params"] == [0, 1]


def test_optimizer_state_by_names_follows(tmp_path: Path) -> None:
    moments = {"step": torch.tensor(2.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    names = ["module.fc.weight", "module.fc.bias"]
    optimizer = {"state": dict.fromkeys(names, moments), "param_groups": [{"lr": 0.1, "params": names}]}
    done = stripped({"model": weights(*names), "parts": [{"optimizer": optimizer}]}, tmp_path)
    inner = done["parts"][0]["optimizer"]
    assert list(inner["state"]) == inner["param_groups"][0]["params"] == ["fc.weight", "fc.bias"]
    assert inner["state"]["fc.weight"] is inner["state"]["fc.bias"]


def test_integer_ids_of_optimizers_stay_integers(tmp_path: Path) -> None:
    value = {"state_dict": weights("module.0", "module.1"), "optimizer": TRAPS["17-adam-integer-ids"]()["optimizer"]}
    done = stripped(value, tmp_path)
    assert [type(key) for key in done["optimizer"]["state"]] == [int, int]


def test_names_of_other_parameters_stay(tmp_path: Path) -> None:
    optimizer = {"state": {}, "param_groups": [{"params": [0, 1], "param_names": ["a.w", "elsewhere.w"]}]}
    done = renamed({"model": weights("a.w"), "optimizer": optimizer}, tmp_path, "a.* => b.*").checkpoint.tree
    assert done["optimizer"]["param_groups"][0]["param_names"] == ["b.w", "elsewhere.w"]


def test_names_of_state_that_would_collide(tmp_path: Path) -> None:
    moments = {"exp_avg": torch.ones(1), "exp_avg_sq": torch.ones(1)}
    optimizer = {"state": {"a.w": moments, "b.w": dict(moments)}, "param_groups": [{"params": ["a.w", "b.w"]}]}
    with pytest.raises(Conflict, match="optimizer's state"):
        renamed({"model": weights("a.w"), "optimizer": optimizer}, tmp_path, "a.* => b.*")


# Rules ---------------------------------------------------------------------------------------------------------------


@looped(
    ("rule", "old", "new"),
    [
        ("a => b", "a", "b"),
        ("a => b", "aa", None),  # the whole key
        ("a.* => b.*", "a.x.y.z", "b.x.y.z"),  # * crosses dots
        ("*.weight => *.w", "a.b.weight", "a.b.w"),
        ("*.a.* => *.b.*", "x.a.y", "x.b.y"),
        ("a* => *", "a", ""),
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
    assert [name for _, name in steps.renamed(renaming([rule]), [old]).values()] == [new] * (new is not None)


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
        renaming([rule])
    assert caught.value.why


def test_the_first_rule_that_matches_counts() -> None:
    rules = ["a.b.* => first.*", "a.* => second.*", "* => rest.*"]
    assert keys_by(rules, "a.b.c", "a.c", "d") == ["first.c", "second.c", "rest.d"]
    assert keys_by(["a => b", "b => c"], "a", "b") == ["b", "c"]  # one rule a key, never two
    assert keys_by(["a => b", "b => a"], "a", "b") == ["b", "a"]


def test_a_rule_without_a_match() -> None:
    with pytest.raises(NoMatch) as caught:
        keys_by(["a => b", "x.* => y.*"], "a")
    assert caught.value.exit_code == 1 and caught.value.what == "the rule 'x.* => y.*' matches no key"
    with pytest.raises(NoMatch, match="Earlier rules took every key"):
        keys_by(["* => y.*", "a => b"], "a")


def test_a_rule_that_changes_nothing_matches() -> None:
    assert keys_by(["* => *"], "a", "b") == ["a", "b"]


def test_rules_that_collide_are_a_conflict() -> None:
    with pytest.raises(Conflict) as caught:
        keys_by(["*.w => w"], "a.w", "b.w", "c")
    assert caught.value.what == "keys of the file would collide: a.w and b.w would both be 'w'"
    with pytest.raises(Conflict, match=r"a\.w and w would both be 'w'"):
        keys_by(["a.* => *"], "a.w", "w")
    with pytest.raises(Conflict, match="become empty"):
        keys_by(["a* => *"], "a")


keys = st.lists(st.text("abé._0", min_size=1, max_size=6), min_size=1, max_size=6, unique=True)


# Injective renamings of any key, each with its inverse.
INJECTIVE = [
    ("* => x.*", "x.* => *"),
    ("* => *.end", "*.end => *"),
    (r"re:(?s)(.)(.*) => \2-\1", r"re:(?s)(.*)-(.) => \2\1"),
]


@given(keys, st.sampled_from(INJECTIVE))
def test_there_and_back_is_the_identity(names: list[str], rules: tuple[str, str]) -> None:
    before = after = Checkpoint(dict.fromkeys(names, 0), "live")
    for rule in rules:
        after = by_rules(after, model_state_dicts(after, named=True), renaming([rule])).checkpoint
    assert_same_tree(before, after)


paths = st.lists(st.sampled_from(["a", "b", "0", "module"]), min_size=2, max_size=4).map(".".join)


@given(st.lists(paths, min_size=1, max_size=6, unique=True), st.sampled_from(["x.", "a.b.", "module."]))
def test_there_and_back_with_the_versions_of_modules(names: list[str], prefix: str) -> None:
    above = {".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 1)}
    metadata = OrderedDict({path: {"version": number} for number, path in enumerate(["", *sorted(above)])})
    state = OrderedDict(dict.fromkeys(names, 0), {"_metadata": metadata})
    before = after = Checkpoint(state, "live")
    for rule in (f"* => {prefix}*", f"{prefix}* => *"):
        after = by_rules(after, model_state_dicts(after, named=True), renaming([rule])).checkpoint
    assert_same_tree(before, after)


def shift(by: int) -> Callable[[str], str]:
    return lambda key: "".join(chr(ord(letter) + by) if letter != "." else "." for letter in key)


@given(keys)
def test_a_function_and_its_inverse(names: list[str]) -> None:
    before = Checkpoint(dict.fromkeys(names, 0), "live")
    there = apply(before, model_state_dicts(before, named=True), shift(1)).checkpoint
    back = apply(there, model_state_dicts(there, named=True), shift(-1)).checkpoint
    assert list(back.tree) == names and back.tree == before.tree


# Rules from a file ---------------------------------------------------------------------------------------------------


def rules_of(text: str, folder: Path) -> list[Rule]:
    path = folder / "rules.yaml"
    path.write_text(text, encoding="utf-8")
    return [*renaming((), str(path))]


@pytest.mark.parametrize(
    "text",
    [
        "- a.* => b.*\n- c => d\n",
        "a.*: b.*\nc: d\n",
        "rules:\n  - a.* => b.*\n  - c => d\n",
        "rules:\n  a.*: b.*\n  c: d\n",
        "# a comment\n---\n- 'a.* => b.*'\n- \"c => d\"\n",
    ],
)
def test_rules_file(text: str, tmp_path: Path) -> None:
    rules = rules_of(text, tmp_path)
    assert [new for _, new in steps.renamed(rules, ["a.x", "c"]).values()] == ["b.x", "d"]


@pytest.mark.parametrize(
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
    ],
)
def test_an_error_in_a_rules_file_points_at_its_line(text: str, line: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        rules_of(text, tmp_path)
    assert f"rules.yaml, line {line}" in caught.value.what, caught.value


def test_an_idle_rule_of_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    rules = rules_of("- a => b\n- x => y\n", tmp_path)
    checkpoint = Checkpoint({"a": 0}, "live")
    with pytest.raises(NoMatch, match=r"rules\.yaml, line 2"):
        by_rules(checkpoint, model_state_dicts(checkpoint, named=True), rules)


def test_a_rules_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileProblem):
        renaming((), str(tmp_path / "missing.yaml"))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises((FileProblem, UsageError)):
        renaming((), str(tmp_path / "bytes.yaml"))
