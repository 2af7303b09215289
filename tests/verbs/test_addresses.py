"""`FILE#ADDRESS` and `--at`: the same thing to every verb of a kind. Stock torch is the judge of what changed and what
did not."""

import copy
import os
import random
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool.commands import VERBS, Use
from ckptool.errors import CkptoolError, Conflict, UsageError
from tests.support.errors import refused
from tests.support.files import saved, weights
from tests.support.looped import looped
from tests.support.part_files import pipeline_folder
from tests.support.same import assert_same_objects

pytestmark = pytest.mark.filterwarnings("ignore:.*optimizer-differs:UserWarning")  # of `bake`, in memory

load = partial(torch.load, weights_only=False, map_location="cpu")


class Holder:
    """Somebody's own class, with weights among its attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def model(prefix: str = "module.") -> OrderedDict[str, torch.Tensor]:
    """A state dict that every verb finds something to change in: a wrapper's prefix, weight norm, a slice, floats on
    another device."""
    names: OrderedDict[str, Any] = OrderedDict()
    names[f"{prefix}fc.weight_g"] = torch.rand(3, 1) + 1
    names[f"{prefix}fc.weight_v"] = torch.randn(3, 4)
    names[f"{prefix}fc.bias"] = torch.randn(1000)[10:13]
    names[f"{prefix}n"] = torch.tensor(3)
    names._metadata = OrderedDict({"": {"version": 1}, prefix.rstrip("."): {"version": 1}})  # type: ignore[attr-defined]
    return names


def training() -> dict[str, Any]:
    """A checkpoint with weights at every kind of place."""
    net = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(4)).sum().backward()
    optimizer.step()
    return {
        "state_dict": model(),
        "ema_state_dict": model(),
        "models": {"a/b": model(), "list": [model(), 5, (model(), "x")]},
        "held": Holder(weights=model(), epoch=3),
        "optimizer": optimizer.state_dict(),
        "epoch": 7,
        0: {"module.a.weight": torch.ones(2)},
    }


PLACES: dict[str, tuple[Any, ...]] = {
    "state_dict": ("state_dict",),
    "models": ("models",),
    "models/a~1b": ("models", "a/b"),
    "models/list/0": ("models", "list", 0),
    "models/list/2/0": ("models", "list", 2, 0),
    "held/weights": ("held", "weights"),
    "": (),
}

CHANGES: dict[str, Callable[..., Any]] = {
    "strip-module": ckptool.strip_module,
    "add-module": ckptool.add_module,
    "rename": lambda *args, **options: ckptool.rename(args[0], ["*.bias => *.offset"], *args[1:], **options),
    "translate": lambda file, *out, **options: ckptool.translate(
        file, ["*weight => *kernel : transpose"], *out, rest="keep", **options
    ),
    "remap": lambda *args, **options: ckptool.remap(*args, to="cuda:1", **options),
    "cast": lambda *args, **options: ckptool.cast(*args, dtype="bf16", **options),
    "edit": lambda *args, **options: ckptool.edit(*args, drop=["*.n"], **options),
    "slim": ckptool.slim,
    "bake": ckptool.bake,
}


def without(tree: Any, path: tuple[Any, ...]) -> Any:
    """The tree with nothing at a path."""
    if not path:
        return None
    made = copy.copy(tree)
    if isinstance(made, Holder):
        made.__dict__[path[0]] = without(made.__dict__[path[0]], path[1:])
    elif isinstance(made, tuple):
        return tuple(without(part, path[1:]) if number == path[0] else part for number, part in enumerate(made))
    else:
        made[path[0]] = without(made[path[0]], path[1:])
    return made


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for segment in path:
        tree = getattr(tree, segment) if isinstance(tree, Holder) else tree[segment]
    return tree


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return saved(training(), tmp_path_factory.mktemp("addresses") / "f.pt")


WAYS = [
    each
    for each in product(CHANGES, PLACES, ("out", "in_place", "dry_run", "extract"))
    if each[::2] != ("slim", "in_place")
]


@looped(("verb", "place", "way"), WAYS, here=1 / 3)
def test_a_part_is_changed_as_a_file_of_it_would_be_and_nothing_else(
    verb: str, place: str, way: str, original: Path, tmp_path: Path
) -> None:
    file, out, path = tmp_path / "f.pt", tmp_path / "out.pt", PLACES[place]
    file.write_bytes(original.read_bytes())
    before, change = load(file), CHANGES[verb]
    options: dict[str, Any] = {way: True} if way != "out" else {}
    try:
        change(saved(at(before, path), tmp_path / "part.pt"), tmp_path / "expected.pt")
    except CkptoolError as error:
        with pytest.raises(type(error)):
            change(f"{file}#{place}", None if way == "in_place" else out, **options)
        assert not out.exists() and file.read_bytes() == original.read_bytes()
        return
    expected = load(tmp_path / "expected.pt")
    done = change(f"{file}#{place}", None if way == "in_place" else out, **options)
    if way != "in_place":
        assert file.read_bytes() == original.read_bytes()
    if way == "dry_run":
        assert done.dry_run and not out.exists()
        return
    after = load(file if way == "in_place" else out)
    if way == "extract":
        assert_same_objects(expected, after)
        if path and verb != "remap":  # no object of their class is made anew; in memory tensors move to the device
            assert_same_objects(expected, change(before, at=place, extract=True), storages=False)
        return
    assert_same_objects(expected, at(after, path))
    assert_same_objects(without(before, path), without(after, path))
    if way == "out":  # `at` is the same
        change(file, tmp_path / "again.pt", at=place)
        assert (tmp_path / "again.pt").read_bytes() == out.read_bytes()


NOWHERE = product(CHANGES, ["nothing", "state_dict/nothing", "epoch/0", "models/list/9"], ["there is no"])
OF_KEYS = ("strip-module", "add-module", "rename", "cast", "bake")
NO_KEYS = product(OF_KEYS, ["epoch", "state_dict/module.n"], ["not a dictionary of tensors"])


@looped(("verb", "place", "says"), [*NOWHERE, *NO_KEYS])
def test_what_is_not_there_or_has_no_keys_is_refused(
    verb: str, place: str, says: str, original: Path, tmp_path: Path
) -> None:
    error = refused("usage", tmp_path, lambda: CHANGES[verb](f"{original}#{place}", tmp_path / "out.pt"), says)
    assert place in str(error) or says == "there is no"


def test_a_file_that_exists_under_the_whole_name_wins(tmp_path: Path) -> None:
    inner = {"b.pt": weights("module.a.w"), "c": weights("module.a.w")}
    saved(inner, tmp_path / "a")
    whole = saved(inner, tmp_path / "a#b.pt")
    ckptool.strip_module(whole, tmp_path / "out.pt")
    assert [list(part) for part in load(tmp_path / "out.pt").values()] == [["a.w"], ["a.w"]]


def test_extract_needs_a_part_and_a_new_file(original: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="optimizer is the state of an optimizer, not weights"):
        ckptool.cast(f"{original}#optimizer", tmp_path / "out.pt", dtype="bf16")
    with pytest.raises(UsageError, match="was given no address"):
        ckptool.strip_module(original, tmp_path / "out.pt", extract=True)
    with pytest.raises(UsageError, match="both extract=True and in_place=True"):
        ckptool.strip_module(f"{original}#state_dict", in_place=True, extract=True)
    with pytest.raises(TypeError, match="extract"):
        ckptool.convert(original, tmp_path / "out.pt", extract=True)  # type: ignore[call-arg]


def test_what_no_file_can_hold_is_refused_in_an_extracted_part_too(tmp_path: Path) -> None:
    tree = {"a": {"w": torch.ones(2), "f": lambda: 0}, "b": 1}
    for options in ({}, {"keep_unknown": True}):
        change = partial(ckptool.edit, tree, tmp_path / "out.pt", at="a", extract=True, set={"n": 1}, **options)
        refused("unsupported", tmp_path, change, "a function or class that cannot be imported by name at a/f")


def shared() -> dict[str, Any]:
    w = torch.randn(6)
    return {"a": {"module.x.w": w, "module.y.w": torch.randn(3)}, "b": {"module.x.w": w[:3], "module.n": 1}, "c": w}


@pytest.mark.parametrize(
    ("verb", "change"),
    [
        ("cast", CHANGES["cast"]),
        ("remap", CHANGES["remap"]),
        ("edit", lambda *args, **options: ckptool.edit(*args, set={"module.x.w": torch.ones(6)}, **options)),
    ],
)
def test_what_would_change_a_tensor_outside_is_refused(verb: str, change: Any, tmp_path: Path) -> None:
    file, out = saved(shared(), tmp_path / "f.pt"), tmp_path / "out.pt"
    says = r"a/module\.x\.w shares its storage with (b/module\.x\.w|c)"
    refused("conflict", tmp_path, lambda: change(f"{file}#a", out), says)
    change(f"{file}#a", out, extract=True)  # nothing is outside of that
    assert list(load(out)) == ["module.x.w", "module.y.w"]


@pytest.mark.parametrize("verb", ["cast", "remap", "slim", "strip-module"])
def test_a_part_goes_into_a_folder_as_its_library_loads_it(verb: str, tmp_path: Path) -> None:
    pipeline, out = pipeline_folder(tmp_path / "pipe"), f"{tmp_path / 'out'}/"
    (pipeline / "unet" / "config.json").write_text('{"_class_name": "UNet", "_diffusers_version": "0.34.0"}')
    CHANGES[verb](f"{pipeline}#unet", out, extract=True)
    assert sorted(os.listdir(out)) == ["config.json", "diffusion_pytorch_model.safetensors"]
    refused("unsupported", tmp_path, lambda: CHANGES[verb](pipeline, f"{tmp_path / 'all'}/"), "vae")
    weights = saved({"module.x.w": torch.randn(6)}, tmp_path / "weights.pt")
    CHANGES[verb](weights, f"{tmp_path / 'weights'}/")
    assert os.listdir(tmp_path / "weights") == ["model.safetensors"]


@pytest.mark.parametrize("verb", ["strip-module", "add-module", "slim"])
def test_ties_across_the_border_stay(verb: str, tmp_path: Path) -> None:
    file, out = saved(shared(), tmp_path / "f.pt"), tmp_path / "out.pt"
    CHANGES[verb](f"{file}#b", out)
    after = load(out)
    names = {"strip-module": "x.w", "add-module": "module.module.x.w", "slim": "module.x.w"}
    tied = (after["a"]["module.x.w"], after["b"][names[verb]], after["c"])
    assert len({tensor.untyped_storage().data_ptr() for tensor in tied}) == 1


def test_a_container_that_stands_elsewhere_too_changes_only_at_the_address(tmp_path: Path) -> None:
    both = weights("module.a.w")
    file = saved({"a": both, "b": both}, tmp_path / "f.pt")
    ckptool.strip_module(f"{file}#a", tmp_path / "out.pt")
    after = load(tmp_path / "out.pt")
    assert [list(part) for part in after.values()] == [["a.w"], ["module.a.w"]]
    assert after["a"]["a.w"].data_ptr() == after["b"]["module.a.w"].data_ptr()
    with pytest.raises(Conflict, match="shares its storage"):
        ckptool.cast(f"{file}#a", tmp_path / "cast.pt", dtype="bf16")


def test_what_holds_itself_is_refused(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"a": weights("module.a.w")}
    tree["a"]["up"] = tree
    with pytest.raises(UsageError, match="contains itself"):
        ckptool.strip_module(f"{saved(tree, tmp_path / 'f.pt')}#a", tmp_path / "out.pt")


def test_names_that_an_optimizer_outside_has_are_told(tmp_path: Path) -> None:
    state = {"module.w": {"step": torch.tensor(1.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": ["module.w"]}]}
    file = saved({"net": {"module.w": torch.ones(2)}, "optimizer": optimizer}, tmp_path / "f.pt")
    done = ckptool.strip_module(f"{file}#net", tmp_path / "out.pt")
    assert [note.code for note in done.notes] == ["old-names"] and "optimizer" in done.notes[0].message
    assert_same_objects(load(file)["optimizer"], load(tmp_path / "out.pt")["optimizer"])
    assert not ckptool.strip_module(file, tmp_path / "all.pt").notes
    assert list(load(tmp_path / "all.pt")["optimizer"]["state"]) == ["w"]
    for slot in ("module.w", 0):  # by its number, too, where more than names changes
        optimizer = {"state": {slot: state["module.w"]}, "param_groups": [{"lr": 0.1, "params": [slot]}]}
        file = saved({"net": {"module.w": torch.ones(2)}, "optimizer": optimizer}, tmp_path / "f.pt")
        done = ckptool.translate(f"{file}#net", "module.w => w : unsqueeze 0", tmp_path / "out.pt", overwrite=True)
        assert [note.code for note in done.notes] == ["old-names"]


@looped("seed", range(60), here=12)
def test_whatever_keeps_the_old_names_is_told(seed: int, tmp_path: Path) -> None:
    """Lists and tables of names beside the weights, as DeepSpeed keeps them; what torch loads of the output is searched
    for strings in full."""
    draw = random.Random(seed)
    old = [f"module.{draw.choice('ab')}.{number}" for number in range(draw.randint(1, 6))]

    def beside(depth: int = 0) -> Any:
        kinds = [lambda: draw.randint(0, 9), lambda: draw.choice([*old, "a.0", "module", "relu"]), lambda: None]
        if depth < 3:
            kinds += [lambda: [beside(depth + 1) for _ in range(draw.randint(0, 3))]]
            kinds += [lambda: {draw.choice([*old, "shape", 3]): beside(depth + 1) for _ in range(draw.randint(0, 3))}]
        return draw.choice(kinds)()

    facts = [beside() for _ in range(4)]
    file = saved({"net": weights(*old), "facts": facts}, tmp_path / "f.pt")
    notes = ckptool.strip_module(file, tmp_path / "out.pt", overwrite=True).notes
    after = repr(load(tmp_path / "out.pt")["facts"])
    assert after == repr(facts)
    assert {note.code for note in notes} == ({"old-names"} if any(f"'{name}'" in after for name in old) else set())
    named = {name for name in old if f"'{name}'" in after}
    assert not notes or any(name in notes[0].message for name in named)
    assert [*ckptool.doctor(file, fix=True, in_place=True).notes] == [*notes]


def test_every_verb_says_in_its_help_what_an_address_means(run: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    says = {
        Use.CHANGES: "FILE#ADDRESS changes only that part, and writes the whole file",
        Use.TAKES: "#ADDRESS for a part",
        Use.REFUSES: "not FILE#ADDRESS",
    }
    for name, verb in VERBS.items():
        if verb.address is None:
            assert name in ("train", "resume", "eval", "prove") or verb.group == "setup"
            continue
        text = " ".join(run(name, "--help").out.replace("│", " ").split())
        assert says[verb.address] in text, name
        assert ("--extract" in text) == (verb.address is Use.CHANGES), name
