"""New keys, and all that follows them: `_metadata`, optimizers, averaged models."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import swa_utils

from ckptool.checkpoint import Checkpoint
from ckptool.errors import Conflict, FileProblem, NoMatch, UsageError
from ckptool.nodes import OrderedDict
from ckptool.roots import model_roots
from ckptool.transforms.rename import Renamed, add, apply, by_rules, strip
from ckptool.transforms.rules import Rule, parse_rule, read_rules
from fixtures.make import make
from fixtures.traps import TRAPS, batch_norm_model
from tests.checkpoints import opened, three_parts, weights
from tests.helpers import assert_same_tree


def stripped(value: Any, folder: Path, *prefixes: str, **options: Any) -> Any:
    checkpoint = opened(value, folder)
    return strip(checkpoint, model_roots(checkpoint), prefixes, **options).checkpoint.tree


def renamed(value: Any, folder: Path, *rules: str, at: str | None = None) -> Renamed:
    checkpoint = opened(value, folder)
    return by_rules(checkpoint, model_roots(checkpoint, at), [parse_rule(rule) for rule in rules])


def keys_by(rules: list[str], *keys: str) -> list[str]:
    """The keys as rules rename them, without a checkpoint around."""
    checkpoint = Checkpoint(dict.fromkeys(keys, 0), "live")
    done = by_rules(checkpoint, model_roots(checkpoint, ""), [parse_rule(rule) for rule in rules])
    return list(done.checkpoint.tree)


# Prefixes off --------------------------------------------------------------------------------------------------------

STRIPPED = {
    "13-at-the-start": ["a", "b.c"],
    "13-twice": ["module.a", "module.b"],
    "13-in-the-middle": ["backbone.module.a", "backbone.module.b"],
    "13-the-word-inside-a-name": ["modules.a", "my_module.b", "module_.c", "submodule.module"],
    "13-a-child-called-module": ["weight", "bias"],
    "14-fsdp": ["0.weight", "1.bias"],
    "14-activation-checkpoint": ["layers.0.weight", "layers.1.weight"],
    "14-fsdp-of-activation-checkpoint": ["layers.0.weight", "b"],
    "14-deepspeed": ["a.weight", "b.bias"],
    "14-lightning-of-dp": ["model.module.a.weight", "model.module.b.bias"],
    "14-deepspeed-of-dp-of-compile": ["a", "b"],
}


@pytest.mark.parametrize("name", STRIPPED)
def test_row(name: str, tmp_path: Path) -> None:
    assert list(stripped(TRAPS[name](), tmp_path)) == STRIPPED[name]


@pytest.mark.parametrize("name", ["14-dp-of-compile", "14-compile-of-dp", "12-metadata-below-a-prefix"])
def test_row_wrapped_like_the_bare_model(name: str, tmp_path: Path) -> None:
    tree = stripped(TRAPS[name](), tmp_path)
    bare = batch_norm_model().state_dict()
    assert list(tree) == list(bare)
    assert tree.metadata == bare._metadata and list(tree.metadata) == list(bare._metadata)


def test_row_14_compiled_submodule(tmp_path: Path) -> None:
    tree = stripped(TRAPS["14-compiled-submodule"](), tmp_path)
    bare = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).state_dict()
    assert list(tree) == list(bare) and tree.metadata == bare._metadata


@pytest.mark.parametrize("name", ["14-averaged", "14-averaged-of-dp", "averaged.pt"])
def test_row_14_n_averaged_does_not_stand_in_the_way(name: str, tmp_path: Path) -> None:
    from ckptool.formats import read

    checkpoint = read(make(name, tmp_path))
    done = strip(checkpoint, model_roots(checkpoint))
    keys = list(done.checkpoint.tree)
    assert keys[0] == "n_averaged" and done.changed == len(keys) - 1
    front = "module." if name == "14-averaged-of-dp" else ""
    assert all(key.startswith(front) and not key.startswith(f"{front}module.") for key in keys[1:])


def test_row_15_collision_names_both(tmp_path: Path) -> None:
    with pytest.raises(Conflict) as caught:
        stripped(TRAPS["15-collision"](), tmp_path, partial=True)
    assert three_parts(caught.value) == (
        "conflict",
        "1 keys of the file would collide: a and module.a would both be 'a'",
    )
    with pytest.raises(Conflict, match=re.escape("a._orig_mod.b and a.b would both be 'a.b'")):
        stripped(TRAPS["15-collision-of-wrappers"](), tmp_path)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("13-on-some-keys", "1 of 2 keys of the file begin with 'module.'; without it: ema_decay"),
        ("13-a-submodule-called-module", "2 of 3 keys of the file begin with 'module.'; without it: head.weight"),
        ("15-collision", "1 of 2 keys of the file begin with 'module.'; without it: a"),
    ],
)
def test_row_13_on_some_keys_only(name: str, counts: str, tmp_path: Path) -> None:
    with pytest.raises(Conflict) as caught:
        stripped(TRAPS[name](), tmp_path)
    assert three_parts(caught.value) == ("conflict", counts) and "--partial" in caught.value.fix


def test_row_13_partial_goes_on(tmp_path: Path) -> None:
    assert list(stripped(TRAPS["13-on-some-keys"](), tmp_path, partial=True)) == ["a", "ema_decay"]
    wrapped = {"_orig_mod.module.a": torch.ones(1), "_orig_mod.b": torch.ones(1)}
    with pytest.raises(Conflict, match="1 of 2"):  # module. is behind a wrapper that goes too
        stripped(wrapped, tmp_path)
    assert list(stripped(wrapped, tmp_path, partial=True)) == ["a", "b"]


def test_compiled_submodules_are_no_mixture(tmp_path: Path) -> None:
    assert list(stripped(weights("a._orig_mod.x", "b.x"), tmp_path)) == ["a.x", "b.x"]


def test_row_13_a_key_that_is_only_the_prefix(tmp_path: Path) -> None:
    with pytest.raises(Conflict, match="without a name"):
        stripped({"module.": torch.ones(1), "module.a": torch.ones(1)}, tmp_path)


def test_named_prefixes_in_order(tmp_path: Path) -> None:
    value = weights("model.net.a", "model.net.b")
    assert list(stripped(value, tmp_path, "model.")) == ["net.a", "net.b"]
    assert list(stripped(value, tmp_path, "model.", "net.")) == ["a", "b"]
    assert list(stripped(weights("module.module.a"), tmp_path, "module.", "module.")) == ["a"]
    with pytest.raises(NoMatch, match=r"no key begins with 'net\.'") as caught:
        stripped(value, tmp_path, "net.", "model.")
    assert caught.value.exit_code == 1
    with pytest.raises(UsageError, match="empty"):
        stripped(value, tmp_path, "model.", "")


@pytest.mark.parametrize("prefix", ["model.", "_orig_mod."])
def test_a_named_prefix_on_some_keys(prefix: str, tmp_path: Path) -> None:
    value = weights(f"{prefix}a", "b")
    with pytest.raises(Conflict, match="1 of 2 keys"):
        stripped(value, tmp_path, prefix)
    assert list(stripped(value, tmp_path, prefix, partial=True)) == ["a", "b"]


def test_a_named_prefix_leaves_other_wrappers(tmp_path: Path) -> None:
    assert list(stripped(weights("module._orig_mod.a"), tmp_path, "module.")) == ["_orig_mod.a"]


def test_all_roots_and_only_roots(tmp_path: Path) -> None:
    value = {"G": weights("module.a.x"), "D": weights("module.b.x"), "module.config": {"module.c": 1}}
    tree = stripped(value, tmp_path)
    assert [list(tree[name]) for name in ("G", "D")] == [["a.x"], ["b.x"]]
    assert list(tree) == ["G", "D", "module.config"] and tree["module.config"] == {"module.c": 1}


def test_a_root_that_stands_twice_stays_one(tmp_path: Path) -> None:
    model = weights("module.a.x")
    tree = stripped({"model": model, "best": model}, tmp_path)
    assert tree["model"] is tree["best"] and list(tree["best"]) == ["a.x"]


def test_nothing_to_do_is_the_same_checkpoint(tmp_path: Path) -> None:
    checkpoint = opened(weights("a.x", "backbone.module.y"), tmp_path)
    done = strip(checkpoint, model_roots(checkpoint))
    assert done.checkpoint is checkpoint and (done.changed, done.total, done.examples) == (0, 2, ())


def test_the_report_counts_by_root(tmp_path: Path) -> None:
    value = {"G": weights("module.a.x", "module.b.x"), "D": weights("b.x")}
    checkpoint = opened(value, tmp_path)
    done = strip(checkpoint, model_roots(checkpoint))
    assert (done.changed, done.total, done.roots) == (2, 3, (("G", 2, 2), ("D", 0, 1)))
    assert done.examples == (("module.a.x", "a.x"), ("module.b.x", "b.x"))


# Prefixes on ---------------------------------------------------------------------------------------------------------


def test_add_is_what_a_wrapper_does(tmp_path: Path) -> None:
    model = batch_norm_model()
    checkpoint = opened(model.state_dict(), tmp_path)
    for wrapped, prefix in ((nn.DataParallel(model), "module."), (torch.compile(model), "_orig_mod.")):
        tree = add(checkpoint, model_roots(checkpoint), prefix).checkpoint.tree
        there = wrapped.state_dict()
        assert list(tree) == list(there)
        assert tree.metadata == there._metadata and list(tree.metadata) == list(there._metadata)


def test_row_12_the_outermost_version_moves_along(tmp_path: Path) -> None:
    state = batch_norm_model().state_dict()
    state._metadata[""] = {"version": 7}
    checkpoint = opened(state, tmp_path)
    metadata = add(checkpoint, model_roots(checkpoint)).checkpoint.tree.metadata
    assert (metadata[""], metadata["module"], metadata["module.1"]) == ({"version": 1}, {"version": 7}, {"version": 2})


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "net.", "a.b.", "a.b.c.", "x"])
@pytest.mark.parametrize(
    "name",
    [
        "12-metadata",
        "12-metadata-of-an-old-version",
        "12-metadata-missing",
        "13-twice",
        "14-averaged",
        "14-averaged-of-dp",
        "18-cyclic-dict",
    ],
)
def test_row_12_strip_of_add_is_the_identity(name: str, prefix: str, tmp_path: Path) -> None:
    checkpoint = opened(TRAPS[name](), tmp_path)
    at = "" if name == "18-cyclic-dict" else None
    added = add(checkpoint, model_roots(checkpoint, at), prefix).checkpoint
    assert all(key.startswith(prefix) or key == "n_averaged" for key in added.tree)
    assert_same_tree(checkpoint, strip(added, model_roots(added, at), [prefix]).checkpoint)


def test_strip_of_add_without_an_entry_for_the_outermost_module(tmp_path: Path) -> None:
    state = batch_norm_model().state_dict()
    del state._metadata[""]
    checkpoint = opened(state, tmp_path)
    added = add(checkpoint, model_roots(checkpoint)).checkpoint
    assert_same_tree(checkpoint, strip(added, model_roots(added)).checkpoint)


@pytest.mark.parametrize(
    "name", ["training.pt", "gan.pt", "lightning.ckpt", "ties.pt", "numpy_values.pt", "averaged.pt"]
)
def test_strip_of_add_on_training_files(name: str, tmp_path: Path) -> None:
    from ckptool.formats import read

    checkpoint = read(make(name, tmp_path))
    added = add(checkpoint, model_roots(checkpoint)).checkpoint
    assert_same_tree(checkpoint, strip(added, model_roots(added), ["module."]).checkpoint)


# Metadata ------------------------------------------------------------------------------------------------------------


def test_row_12_a_renamed_model_loads_as_before(tmp_path: Path) -> None:
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


def test_row_16_the_order_of_keys_stays(tmp_path: Path) -> None:
    tree = renamed(TRAPS["16-key-order"](), tmp_path, "m => zz").checkpoint.tree
    assert list(tree) == ["z", "a", "zz", "10", "9", "B", "é"]


# Optimizers ----------------------------------------------------------------------------------------------------------


def test_row_17_param_names_follow(tmp_path: Path) -> None:
    value = TRAPS["17-adamw-param-names"]()
    done = renamed(value, tmp_path, "* => head.*").checkpoint.tree
    assert done["optimizer"]["param_groups"][0]["param_names"] == ["head.weight", "head.bias"]
    assert list(done["optimizer"]["state"]) == [0, 1] and done["optimizer"]["param_groups"][0]["params"] == [0, 1]


def test_row_17_state_by_names_follows(tmp_path: Path) -> None:
    moments = {"step": torch.tensor(2.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    names = ["module.fc.weight", "module.fc.bias"]
    optimizer = {"state": dict.fromkeys(names, moments), "param_groups": [{"lr": 0.1, "params": names}]}
    done = stripped({"model": weights(*names), "parts": [{"optimizer": optimizer}]}, tmp_path)
    inner = done["parts"][0]["optimizer"]
    assert list(inner["state"]) == inner["param_groups"][0]["params"] == ["fc.weight", "fc.bias"]
    assert inner["state"]["fc.weight"] is inner["state"]["fc.bias"]


def test_row_17_integer_ids_stay_integers(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
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
    ],
)
def test_one_rule(rule: str, old: str, new: str | None) -> None:
    assert parse_rule(rule)(old) == new


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("a", "is not a rule"),
        ("a =>", "is not a rule"),
        ("=> b", "is not a rule"),
        ("a => b => c", "is not a rule"),
        ("", "is not a rule"),
        ("a.* => {n}.*", r"\{n\} is not on the left side"),
        ("a => b.*", "more \\* than the left"),
        ("re:( => b", "cannot work"),
        (r"re:(a) => \2", "cannot work"),
        (r"re:a => \g<name>", "cannot work"),
        (r"re:a+ => \1", "cannot work"),
    ],
)
def test_a_rule_that_cannot_work(rule: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        parse_rule(rule)
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


def test_row_15_rules_that_collide() -> None:
    with pytest.raises(Conflict) as caught:
        keys_by(["*.w => w"], "a.w", "b.w", "c")
    assert caught.value.what == "1 keys of the file would collide: a.w and b.w would both be 'w'"
    with pytest.raises(Conflict, match=r"a\.w and w would both be 'w'"):
        keys_by(["a.* => *"], "a.w", "w")
    with pytest.raises(Conflict, match="without a name"):
        keys_by(["a* => *"], "a")


def test_at_one_root_only(tmp_path: Path) -> None:
    done = renamed({"G": weights("a.w"), "D": weights("a.w")}, tmp_path, "a.* => b.*", at="D")
    assert [list(done.checkpoint.tree[name]) for name in "GD"] == [["a.w"], ["b.w"]]


keys = st.lists(st.text("abé._0", min_size=1, max_size=6), min_size=1, max_size=6, unique=True)
# Injective renamings of any key, each with its inverse.
INJECTIVE = [
    ("* => x.*", "x.* => *"),
    ("* => *.end", "*.end => *"),
    (r"re:(?s)(.)(.*) => \2-\1", r"re:(?s)(.*)-(.) => \2\1"),
]


@given(keys, st.sampled_from(INJECTIVE))
def test_there_and_back_is_the_identity(names: list[str], rules: tuple[str, str]) -> None:
    before = after = Checkpoint({"model": dict.fromkeys(names, 0), "epoch": 1}, "live")
    for rule in rules:
        after = by_rules(after, model_roots(after, "model"), [parse_rule(rule)]).checkpoint
    assert_same_tree(before, after)


paths = st.lists(st.sampled_from(["a", "b", "0", "module"]), min_size=2, max_size=4).map(".".join)


@given(st.lists(paths, min_size=1, max_size=6, unique=True), st.sampled_from(["x.", "a.b.", "module."]))
def test_there_and_back_with_the_versions_of_modules(names: list[str], prefix: str) -> None:
    above = {".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 1)}
    metadata = OrderedDict({path: {"version": number} for number, path in enumerate(["", *sorted(above)])})
    state = OrderedDict(dict.fromkeys(names, 0), {"_metadata": metadata})
    before = after = Checkpoint({"model": state}, "live")
    for rule in (f"* => {prefix}*", f"{prefix}* => *"):
        after = by_rules(after, model_roots(after, "model"), [parse_rule(rule)]).checkpoint
    assert_same_tree(before, after)


def shift(by: int) -> Callable[[str], str]:
    return lambda key: "".join(chr(ord(letter) + by) if letter != "." else "." for letter in key)


@given(keys)
def test_a_function_and_its_inverse(names: list[str]) -> None:
    before = Checkpoint(dict.fromkeys(names, 0), "live")
    there = apply(before, model_roots(before, ""), shift(1)).checkpoint
    back = apply(there, model_roots(there, ""), shift(-1)).checkpoint
    assert list(back.tree) == names and back.tree == before.tree


# Rules from a file ---------------------------------------------------------------------------------------------------


def rules_of(text: str, folder: Path) -> list[Rule]:
    path = folder / "rules.yaml"
    path.write_text(text, encoding="utf-8")
    return read_rules(str(path))


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
    assert [rule("a.x") or rule("c") for rule in rules] == ["b.x", "d"]


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
        by_rules(checkpoint, model_roots(checkpoint, ""), rules)


def test_a_rules_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileProblem):
        read_rules(str(tmp_path / "missing.yaml"))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises((FileProblem, UsageError)):
        read_rules(str(tmp_path / "bytes.yaml"))


def test_swa_model_goes_through(tmp_path: Path) -> None:
    """What is stripped of an averaged model loads into the bare one, apart from the counter."""
    model = batch_norm_model()
    tree = stripped(swa_utils.AveragedModel(model).state_dict(), tmp_path)
    assert [key for key in tree if key != "n_averaged"] == list(model.state_dict())
