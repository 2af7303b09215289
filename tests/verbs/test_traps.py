"""Every trap (docs/traps.md), and random graphs of everything that people save, through every verb that writes: stock
torch loads what it loaded before, or it is refused by name.

Values, types, bits, strides, the order of keys, `requires_grad`, and which objects are one and which are two.
"""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import CkptoolError
from ckptool.formats import read
from fixtures.traps import TRAPS
from tests.formats.contract import same_for_torch
from tests.support.errors import refused
from tests.support.files import load, saved
from tests.support.looped import looped
from tests.support.object_graphs import KINDS, Graph, saved_graph
from tests.support.same import assert_same_objects, assert_same_tree

OPTIONS: dict[str, Any] = {"verify": True, "keep_unknown": True}

# What has no dictionary that looks like weights, so that verbs on keys ask for the part by name.
WITHOUT_WEIGHTS = {
    *(
        "09-dtypes-as-values 11-typed-storage 11-uninitialized-buffer 11-uninitialized-parameter 11-wrapper-subclass "
        "17-optimizer-states-named 17-several-param-groups 18-cyclic-dict 18-cyclic-list 18-empty-containers "
        "18-keys-that-are-not-text 18-keys-with-dots-and-slashes 18-nested-deeply 18-none-and-scalars 18-shared-list "
        "19-dtypes-and-strings 19-numpy-arrays 19-numpy-odd-arrays 20-collections-of-python 20-defaultdict-of-unknown "
        "20-dict-subclass 20-functions-and-classes 20-namespace 20-numbers-and-dates 20-numpy-scalars 20-path "
        "20-random-states 20-sets"
    ).split()
}
# What strip-module refuses: keys that are prefixed in part, or that would become one.
MIXED = {
    *"13-a-submodule-called-module 13-on-some-keys 13-only-the-prefix 15-collision 15-collision-of-wrappers".split()
}
# What `convert --all` has no words for.
NOT_CARRIED = {
    *"11-wrapper-subclass 20-unknown-call 20-unknown-object 20-dict-subclass 20-defaultdict-of-unknown".split()
}


def on_and_off(file: Path, there: Path, back: Path) -> None:
    added = ckptool.add_module(file, there, **OPTIONS)
    assert added.verified and added.how == "new file"
    for root in added.facts["roots"]:
        part = read(there).tree if not root["root"] else ckptool.open(f"{there}#{root['root']}").tree
        assert all(key.startswith("module.") or key == "n_averaged" for key in part)
    ckptool.strip_module(there, back, prefix="module.", **OPTIONS)


def on_and_off_in_place(file: Path, there: Path, back: Path) -> None:
    added = ckptool.add_module(back, in_place=True, **OPTIONS)
    assert added.how == "in place" and added.verified
    assert added.bytes_written == back.stat().st_size - file.stat().st_size
    ckptool.strip_module(back, in_place=True, prefix="module.", **OPTIONS)


def moved_and_back(file: Path, there: Path, back: Path) -> None:
    done = ckptool.remap(file, there, to="cuda:1", **OPTIONS)
    assert done.verified and done.facts["changed"] == done.facts["storages"]
    ckptool.remap(there, back, to="cpu", **OPTIONS)


def converted_and_back(file: Path, there: Path, back: Path) -> None:
    there = there.with_suffix(".safetensors")
    assert ckptool.convert(file, there, all=True, **OPTIONS).verified
    assert ckptool.convert(there, back, **OPTIONS).verified


# Ways there and back, with the traps that each refuses, and the error's code.
WAYS: dict[Callable[[Path, Path, Path], None], tuple[str, set[str]]] = {
    on_and_off: ("usage", WITHOUT_WEIGHTS),
    on_and_off_in_place: ("usage", WITHOUT_WEIGHTS),
    moved_and_back: ("", set()),
    converted_and_back: ("unsupported", NOT_CARRIED),
}


@looped("name", TRAPS, here=1 / 3)
def test_every_trap_comes_back_or_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """`same_for_torch` compares storages, strides, types, ties, order and types of keys, `_metadata`, and loads the
    result as safely as the original."""
    file = saved(TRAPS[name](), tmp_path / "in.pt")
    for way, (code, refuses) in WAYS.items():
        (place := tmp_path / way.__name__).mkdir()
        there, back = place / "there.pt", place / "back.pt"
        if way is on_and_off_in_place:
            shutil.copy(file, back)
        if name in refuses:
            refused(code, place, partial(way, file, there, back))
            continue
        way(file, there, back)
        same_for_torch(file, back, mmap=way is on_and_off_in_place)
        assert_same_tree(read(file), read(back))


@looped("name", TRAPS, here=1 / 3)
def test_strip_changes_only_names_or_is_refused(name: str, tmp_path: Path) -> None:
    file, out = saved(TRAPS[name](), tmp_path / "in.pt"), tmp_path / "out.pt"
    if name in WITHOUT_WEIGHTS | MIXED:
        code = "usage" if name in WITHOUT_WEIGHTS else "conflict"
        refused(code, tmp_path, lambda: ckptool.strip_module(file, out, **OPTIONS))
        return
    done = ckptool.strip_module(file, out, **OPTIONS)
    if done.how == "copy":
        assert out.read_bytes() == file.read_bytes() and done.facts["changed"] == 0
        return
    assert name[:2] in ("12", "13", "14") and done.facts["changed"] > 0
    before, after = load(file), load(out)
    assert_same_objects(list(before.values()), list(after.values()))
    again = ckptool.strip_module(out, tmp_path / "again.pt")
    assert again.how == "copy" or name == "13-twice" or list(after)[1].startswith("module.")


@looped("name", TRAPS, here=1 / 3)
def test_the_same_input_gives_the_same_bytes_under_any_name(name: str, tmp_path: Path) -> None:
    outputs = []
    for number, called in enumerate(("in.pt", "another name.bin")):
        file = saved(TRAPS[name](), tmp_path / called)
        ckptool.remap(file, tmp_path / f"{number}.pt", to="cuda:3", keep_unknown=True)
        outputs.append((tmp_path / f"{number}.pt").read_bytes())
    assert outputs[0] == outputs[1]


pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of features in beta and going away

# What may be refused, by verb and the error's code, in a graph that has a rule's kind. Nothing else may.
WHOLE_MODULES = {"module", "training"}  # verbs on keys do not change what is below one
REFUSED: dict[tuple[str, str], set[str]] = {
    **{
        (verb, "usage"): WHOLE_MODULES
        for verb in ("strip-module", "strip-module in place", "rename", "cast of nothing")
    },
    **{(f"{verb} strip-module", "usage"): WHOLE_MODULES for verb in ("add-module and", "repeated")},
    ("dcp and back", "conflict"): {"shared"},  # what contains itself has no end of names
    ("safetensors and back", "unsupported"): WHOLE_MODULES
    | {"mapping", "sequence", "people", "nested class", "python", "odd array"},
}


def renamed(graph: Any, function: Callable[[str], str]) -> Any:
    """The graph with other keys in its state dict, which stays the same object; `_metadata` has the modules' paths."""
    state = graph["model"]
    items = list(state.items())
    state.clear()
    state.update((function(key), value) for key, value in items)
    if hasattr(state, "_metadata"):
        pairs = [(function(f"{path}.") if path else path, value) for path, value in state._metadata.items()]
        state._metadata = {path.rstrip("."): value for path, value in pairs}
    return graph


def stripped(graph: Any) -> Any:
    return renamed(graph, lambda key: key.removeprefix("module."))


def with_entry(graph: Any) -> Any:
    graph["note"] = 1
    return graph


def without_metadata(graph: Any) -> Any:
    vars(graph["model"]).pop("_metadata", None)
    return graph


def same(graph: Any) -> Any:
    return graph


def averaged(graph: Any) -> Any:
    """The weights with every value written out: the mean of negative views is no view."""
    state, made = graph["model"], dict[int, torch.Tensor]()
    for key, value in state.items():
        if id(value) not in made:
            made[id(value)] = value
            if value.is_neg():
                made[id(value)] = value.resolve_neg()
        state[key] = made[id(value)]
    return state


# How each verb is called, and what it makes of the graph.
Call = Callable[[Path, Path], Any]
VERBS: dict[str, tuple[Call, Callable[[Any], Any]]] = {
    "strip-module": (lambda file, out: ckptool.strip_module(file, out, **OPTIONS), stripped),
    "strip-module in place": (lambda file, out: in_place(ckptool.strip_module, file, out), stripped),
    "repeated strip-module": (lambda file, out: twice(file, out), stripped),
    "add-module and strip-module": (lambda file, out: wrapped_and_back(file, out), without_metadata),
    "rename": (
        lambda file, out: ckptool.rename(file, ["module.* => net.*"], out, **OPTIONS),
        lambda graph: renamed(graph, lambda key: key.replace("module.", "net.", 1)),
    ),
    "remap there and back": (lambda file, out: there_and_back(file, out), same),
    "remap to where it is": (lambda file, out: ckptool.remap(file, out, to="cpu", **OPTIONS), same),
    "cast of nothing": (lambda file, out: ckptool.cast(file, out, dtype="f16", exclude=["*"], **OPTIONS), same),
    "edit": (lambda file, out: ckptool.edit(file, out, set={"note": 1}, **OPTIONS), with_entry),
    "edit in place": (lambda file, out: in_place(ckptool.edit, file, out, set={"note": 1}), with_entry),
    "convert": (lambda file, out: ckptool.convert(file, out, all=True, **OPTIONS), same),
    "slim": (lambda file, out: ckptool.slim(file, out, keep_optimizer=True, **OPTIONS), same),
    "bundle": (
        lambda file, out: ckptool.bundle({"one": file}, out, values={"n": 1}, **OPTIONS),
        lambda graph: {"one": graph, "n": 1},
    ),
    "safetensors and back": (lambda file, out: by_safetensors(file, out), same),
    "dcp and back": (lambda file, out: by_dcp(file, out), same),
    "average of itself": (lambda file, out: ckptool.average([f"{file}#model"] * 2, out, **OPTIONS), averaged),
    "warm start of itself": (
        lambda file, out: ckptool.warm_start(f"{file}#model", f"{file}#model", out, **OPTIONS),
        lambda graph: graph["model"],
    ),
    "unbundle": (lambda file, out: of_bundle(file, out), same),
}
# These change what is stored, or what torch says of the outermost module, on purpose.
BY_VALUES = {"slim", "average of itself", "warm start of itself", "dcp and back"}
WITHOUT_METADATA = {"add-module and strip-module"}


def in_place(verb: Callable[..., Any], file: Path, out: Path, **options: Any) -> Any:
    """The verb on a copy of the file; what cannot be changed in place is rewritten."""
    shutil.copy(file, out)
    try:
        return verb(out, in_place=True, **options, **OPTIONS)
    except ckptool.errors.UsageError as error:
        out.unlink()
        if "cannot be changed in place" not in error.what:
            raise
        return verb(file, out, **options, **OPTIONS)


def twice(file: Path, out: Path) -> None:
    once = out.with_name("once.pt")
    ckptool.strip_module(file, once, overwrite=True, **OPTIONS)
    ckptool.strip_module(once, out, **OPTIONS)
    assert once.read_bytes() == out.read_bytes()


def wrapped_and_back(file: Path, out: Path) -> None:
    wrapped = out.with_name("wrapped.pt")
    ckptool.add_module(file, wrapped, prefix="wrapped.", overwrite=True, **OPTIONS)
    ckptool.strip_module(wrapped, out, prefix="wrapped.", **OPTIONS)


def by_safetensors(file: Path, out: Path) -> None:
    other = out.with_name("other.safetensors")
    ckptool.convert(file, other, all=True, overwrite=True, **OPTIONS)
    ckptool.convert(other, out, all=True, **OPTIONS)


def by_dcp(file: Path, out: Path) -> None:
    """By a folder for one rank or several."""
    other, ranks = out.with_name("other.dcp"), file.stat().st_size % 4 or None
    ckptool.convert(file, other, overwrite=True, ranks=ranks, **OPTIONS)
    ckptool.convert(other, out, **OPTIONS)


def there_and_back(file: Path, out: Path) -> None:
    away = out.with_name("away.pt")
    ckptool.remap(file, away, to="cuda:3", overwrite=True, **OPTIONS)
    ckptool.remap(away, out, to="cpu", **OPTIONS)


def of_bundle(file: Path, out: Path) -> None:
    bundle, folder = out.with_name("bundle.pt"), out.with_name("folder")
    ckptool.bundle({"one": file}, bundle, overwrite=True, **OPTIONS)
    ckptool.unbundle(bundle, folder, overwrite=True, **OPTIONS)
    shutil.move(folder / "one.pt", out)


def check(graph: Graph, verb: str, folder: Path) -> str:
    """Fails unless torch loads from the verb's output what it should, or the verb refuses what it may; says which."""
    call, change = VERBS[verb]
    file, out = folder / "in.pt", folder / "out.pt"
    file.write_bytes(graph.data)
    out.unlink(missing_ok=True)
    try:
        call(file, out)
    except CkptoolError as error:
        allowed = REFUSED.get((verb, error.code), set()) | REFUSED.get(("every verb", error.code), set())
        assert allowed & graph.kinds, f"seed {graph.seed}, {verb}: {error}"
        assert not out.exists() or "in place" in verb
        return "refused"
    assert file.read_bytes() == graph.data
    try:
        expected, found = change(load(file, weights_only=False)), load(out, weights_only=False)
        if verb in WITHOUT_METADATA:
            without_metadata(found)
        assert_same_objects(expected, found, storages=verb not in BY_VALUES, tuples=True)
    except Exception as error:
        raise AssertionError(f"seed {graph.seed}, {verb}, protocol {graph.protocol}: {error}") from error
    return "kept"


@pytest.mark.long("every kind of object meets several verbs")
def test_what_every_verb_rewrites_is_what_it_was(tmp_path: Path) -> None:
    choose, results, kinds = random.Random(0), Counter[str](), set[str]()
    for graph in filter(None, map(saved_graph, range(12))):
        kinds |= graph.kinds
        for verb in choose.sample(sorted(VERBS), 4):
            results[check(graph, verb, tmp_path)] += 1
    assert kinds >= KINDS and results.total() > 40, "torch itself loads the most of the graphs"
    assert results["refused"] < results["kept"] / 5


@pytest.mark.soak
@pytest.mark.parametrize("verb", VERBS)
def test_a_thousand_graphs_through_each_verb(verb: str, tmp_path: Path) -> None:
    """Others for each, so that together they are many: a minute each, where all through all would be hours."""
    first = 1_000 * (1 + sorted(VERBS).index(verb))
    for graph in filter(None, map(saved_graph, range(first, first + 1_000))):
        check(graph, verb, tmp_path)
