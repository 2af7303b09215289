"""`rename`, `translate`, `strip-module` and `add-module`: rules and files of them, wrappers' prefixes, and all that
follows the keys: `_metadata`, the names that optimizers keep."""

import collections
import json
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckptool
from ckptool.errors import CkptoolError, Conflict, NoMatch, UsageError
from fixtures.make import make
from fixtures.traps import TRAPS, batch_norm_model
from tests.support.errors import refused
from tests.support.files import load, weights
from tests.support.looped import looped
from tests.support.same import assert_same_objects


def keys_by(rules: list[str], *keys: str) -> list[str]:
    return list(ckptool.rename(dict.fromkeys(keys, 0), rules, at=""))


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
        ("*a*a*b => c", "ca" * 20 + "b", "c"),
        ("*.layers.*.attn.*.lora_*.* => c", "model.layers.1.attn.q_proj.lora_A." + "x" * 60, "c"),
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
        (["* => y.*", "a => b"], "a", NoMatch, "Earlier rules matched all of its keys"),
        (["b.0 => c"], "a b.00 b.0.w", NoMatch, r"For all keys below it: 'b\.0\.\* => c\.\*'"),
        (["b.{n}.* => c.{n}.*"], "a a.b.0.w", NoMatch, r"'\*\.b\.\{n\}\.\* => \*\.c\.\{n\}\.\*'"),
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
    (path := tmp_path / "rules.yaml").write_text(text, encoding="utf-8")
    with pytest.raises((UsageError, NoMatch)) as caught:
        ckptool.rename({"a": 0}, rules_file=str(path), at="")
    assert f"rules.yaml, line {line}" in caught.value.what, caught.value


# `strip-module` and `add-module`.
@looped(
    ("value", "options", "keys"),
    [
        (TRAPS["13-on-some-keys"](), {"partial": True}, "a ema_decay"),
        (weights("_orig_mod.module.a", "_orig_mod.b"), {"partial": True}, "a b"),
        (weights("a._orig_mod.x", "b.x"), {}, "a.x b.x"),  # compiled submodules are no mixture
        (weights("model.net.a", "model.net.b"), {"prefix": "model."}, "net.a net.b"),
        (weights("model.net.a", "model.net.b"), {"prefix": ["model.", "net."]}, "a b"),
        (weights("module.module.a"), {"prefix": ["module.", "module."]}, "a"),
        (weights("module._orig_mod.a"), {"prefix": "module."}, "_orig_mod.a"),  # other wrappers stay
        (weights("model.a", "b"), {"prefix": "model.", "partial": True}, "a b"),
        (weights("_orig_mod.a", "b"), {"prefix": "_orig_mod.", "partial": True}, "a b"),
    ],
)
def test_prefixes_that_were_asked_for(value: Any, options: dict[str, Any], keys: str) -> None:
    assert list(ckptool.strip_module(value, **options)) == keys.split()


_SOME = "of the file begin with 'module.'; without it:"


@looped(
    ("value", "options", "kind", "says"),
    [
        (TRAPS["13-on-some-keys"](), {}, Conflict, f"1 of 2 keys {_SOME} ema_decay"),
        (TRAPS["13-a-submodule-called-module"](), {}, Conflict, f"2 of 3 keys {_SOME} head.weight"),
        (TRAPS["15-collision"](), {}, Conflict, f"1 of 2 keys {_SOME} a"),
        (weights("_orig_mod.module.a", "_orig_mod.b"), {}, Conflict, "1 of 2 keys"),  # behind a wrapper that goes too
        (weights("model.a", "b"), {"prefix": "model."}, Conflict, "1 of 2 keys"),
        (weights("_orig_mod.a", "b"), {"prefix": "_orig_mod."}, Conflict, "1 of 2 keys"),
        (
            TRAPS["15-collision"](),
            {"partial": True},
            Conflict,
            "keys of the file would collide: a and module.a would both be 'a'",
        ),
        (TRAPS["15-collision-of-wrappers"](), {}, Conflict, "a._orig_mod.b and a.b would both be 'a.b'"),
        (weights("module.", "module.a"), {}, Conflict, "become empty"),
        (weights("model.net.a"), {"prefix": ["net.", "model."]}, NoMatch, "no key begins with 'net.'"),
        (weights("model.net.a"), {"prefix": ["model.", ""]}, UsageError, "the prefix is empty"),
        (weights("model.net.a"), {"at": "x"}, UsageError, "there is no x"),
        (
            {"o": {"state": {}, "param_groups": [{"params": []}]}},
            {"at": "o"},
            UsageError,
            "o is the state of an optimizer",
        ),
    ],
)
def test_what_is_not_stripped(value: Any, options: dict[str, Any], kind: type[CkptoolError], says: str) -> None:
    with pytest.raises(kind, match=re.escape(says)) as caught:
        ckptool.strip_module(value, **options)
    assert caught.value.exit_code == (2 if kind is UsageError or kind is Conflict else 1)
    assert ("--partial" in caught.value.fix) == ("keys of the file begin" in caught.value.what)


class Around(torch.nn.Module):
    """A module around another, as a wrapper has it."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        super().__init__()
        self.add_module(name, module)


def random_model(pick: random.Random, wrappers: list[str], depth: int = 0) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model with modules that have no keys, and the same with wrappers around some of its modules."""
    nn = torch.nn
    if depth == 3 or (depth and pick.random() < 0.3):
        leaves = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU(), nn.MultiheadAttention(4, 2), nn.Identity()
        made = wrapped = pick.choice(leaves)
    else:
        pairs = {f"{pick.choice('ab')}{n}": random_model(pick, wrappers, depth + 1) for n in range(pick.randint(1, 3))}
        made, wrapped = (nn.ModuleDict({name: pair[side] for name, pair in pairs.items()}) for side in (0, 1))
    return made, Around(pick.choice(wrappers), wrapped) if pick.random() < 0.3 else wrapped


@looped("seed", range(60))
def test_versions_are_those_of_the_module_that_has_the_names(seed: int) -> None:
    """Judged by torch: a model and the same in other modules have just these `_metadata`, in this order."""
    pick = random.Random(seed)
    model, wrapped = random_model(pick, ["_orig_mod", "_checkpoint_wrapped_module"])
    bare = model.state_dict()
    if not bare:
        return

    def is_of(found: Any, module: torch.nn.Module) -> bool:
        wanted: Any = module.state_dict()
        return list(found) == list(wanted) and list(found._metadata.items()) == list(wanted._metadata.items())

    assert is_of(ckptool.strip_module(Around("module", wrapped).state_dict()), model)
    assert is_of(ckptool.add_module(bare), Around("module", model))
    deeper = Around("x", Around("y", model))
    assert is_of(ckptool.rename(bare, "* => x.y.*"), deeper)
    assert is_of(ckptool.rename(deeper.state_dict(), "x.y.* => *"), model)
    assert is_of(ckptool.strip_module(deeper.state_dict(), prefix="x.y."), model)
    as_fsdp: Any = collections.OrderedDict(
        (f"module.{key}", value) for key, value in bare.items()
    )  # whose hooks rename the keys
    as_fsdp._metadata = Around("module", wrapped).state_dict()._metadata  # alone
    found = ckptool.strip_module(as_fsdp)
    assert list(found) == list(bare) and dict(found._metadata) == dict(bare._metadata)


def test_the_outermost_version_moves_along() -> None:
    state = batch_norm_model().state_dict()
    state._metadata[""] = {"version": 7}
    found = ckptool.add_module(state)._metadata
    assert (found[""], found["module"], found["module.1"]) == ({"version": 1}, {"version": 7}, {"version": 2})
    with pytest.raises(UsageError, match="the prefix is empty"):
        ckptool.add_module(state, prefix="")
    del state._metadata[""]
    assert_same_objects(state, ckptool.strip_module(ckptool.add_module(state)))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "net.", "a.b.", "a.b.c.", "x"])
@looped(
    "name",
    "12-metadata 12-metadata-of-an-old-version 12-metadata-missing 13-twice 14-averaged 14-averaged-of-dp"
    " 18-cyclic-dict".split(),
)
def test_strip_of_add_is_the_identity(name: str, prefix: str) -> None:
    state, at = TRAPS[name](), "" if name == "18-cyclic-dict" else None
    added = ckptool.add_module(state, prefix=prefix, at=at)
    assert all(key.startswith(prefix) or key == "n_averaged" for key in added)
    assert_same_objects(state, ckptool.strip_module(added, prefix=prefix, at=at))


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
    "a huge pad": ("l.{n}.qkv => l.{n}.x : pad 0 9007199254740992", "would become"),
    "a number beyond all": ("l.{n}.qkv => l.{n}.x : pad 0 9007199254740992 * 9007199254740992", "9007199254740992"),
    "no such dimension": ("l.{n}.qkv => l.{n}.x : transpose 0 2", "has no dimension 2"),
    "a dimension of a number": ("count => count2 : transpose", "has no dimension"),
    "two types": ("half, e.0.w => x : cat 0", "cannot be joined"),
    "an unknown operation": ("half => x : transmogrify", "unknown operation 'transmogrify'"),
    "an operation without its numbers": ("half => x : permute", "is not valid for permute"),
    "code": ("half => x : reshape [__import__('os').getpid(), -1]", "is not an expression"),
    "deep arithmetic": ("half => x : pad 0 " + "(" * 140 + "1" + ")" * 140, "is not an expression|cannot be padded"),
    "many names": ("half => {a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}", "8,192 names"),
    "more tensors than names": ("l.{n}.qkv => l.{n}.{a,b} : split 0 [2, 2, 3]", "3 tensors come out of it"),
    "an integer that is added to": ("count => x : add 1", "is not of a floating-point type"),
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
    translate = partial(ckptool.translate, file, out=file.with_name("out.pt"), rest="keep")
    refused(CkptoolError, file.parent, lambda: translate(rule), message)
    rules = file.with_name("rules.yaml")
    rules.write_text(f"# comment\nrules:\n  - {json.dumps(rule)}\n")
    error = refused(CkptoolError, file.parent, lambda: translate(rules_file=rules), message)
    assert "rules.yaml, line 3" in str(error)


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
        "rules: []\nrules: []\n": "'rules' appears twice",
        "- [a, b]\n": "line 1",
        "'": "not valid YAML|line 1",
        "x" * 10 + "\n" + "y: [" * 3000: "nested too deep|line",
        "fill: ['a => ones like b']\n": "is not of the form",
        "variables: {a: b + 1, b: a - 1}\nrules: ['half => x : pad 0 a']\n": "'a', which is 'b \\+ 1', has no value",
    }.items():
        rules.write_text(text)
        translate = partial(ckptool.translate, file, out=tmp_path / "out.pt", rules_file=rules, rest="keep")
        refused("usage", tmp_path, translate, message)
    rules.write_text("rules: ['half => x']\n")
    convert = partial(ckptool.convert, file, tmp_path / "out.pt", rules_file=rules)
    refused("usage", tmp_path, convert, r"ckptool\.translate")


def test_the_names_that_an_optimizer_keeps_follow(tmp_path: Path) -> None:
    file, out = make("training.pt", tmp_path), tmp_path / "out.pt"
    assert ckptool.add_module(file, out).facts["changed"] == 18
    groups = [load(path)["optimizer_state_dict"]["param_groups"][0]["param_names"] for path in (file, out)]
    assert groups[1] == [f"module.{name}" for name in groups[0]]
