"""Pickles that would run something, in files, through the verbs.

Callables named in these pickles are those of a decoy module that would leave a trace if they ran.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import ckptool
from ckptool.errors import UnsafeObject
from ckptool.pickles.calls import uses_of
from tests.support.decoys import CALL, MARKER, Decoy, opened_pickle
from tests.support.hostile_inputs import HOOKS, name, pickle_zip, program, state_pickle, storage, tensor, text
from tests.support.watched import LOOKING, Seen


def pops(value: bytes) -> bytes:
    """A dictionary with one entry; before it, a value that is made and thrown away."""
    return program(value + b"0}" + text("w") + tensor((4,), (1,)) + b"s")


# Rows 53 to 60 and 85: what would run. Each opens, is named, and is neither loaded nor written.

CALLS: dict[str, bytes] = {
    "53-global": state_pickle({"x": CALL}),
    "53-stack-global": program(b"\x8c\x0eckptool_marker\x8c\x03run\x93" + text("trace") + b"\x85R", 4),
    "53-inst": program(b"(" + text("trace") + b"ickptool_marker\nrun\n"),
    "53-obj": program(b"(" + MARKER + text("trace") + b"o"),
    "53-build": program(MARKER + b")R}" + text("a") + b"K\x01sb"),
    "53-nested-in-a-tensor-key": program(b"}" + CALL + tensor((4,), (1,)) + b"s"),
    "53-as-the-function-of-a-call": program(CALL + b")R"),
    "53-in-metadata": program(HOOKS + b"}" + text("_metadata") + CALL + b"sb"),
    "53-in-a-set": program(b"\x8f(" + CALL + b"\x90", 4),
    "53-as-an-argument": program(name("collections", "deque") + b"]" + CALL + b"a\x85R"),
    "54-dotted": state_pickle({"x": program(b"\x8c\x0eckptool_marker\x8c\x0crun.__call__\x93)R", 4)[2:-1]}),
    "54-dotted-torch": state_pickle({"x": name("torch", "_utils.os.system") + text("trace") + b"\x85R"}),
    "54-dotted-known": state_pickle({"x": name("collections", "OrderedDict.fromkeys") + b"]\x85R"}),
    "58-hooks": state_pickle({"x": name("torch._utils", "_rebuild_tensor_v2") + b"(" + storage()
        + b"K\x00K\x04\x85K\x01\x85\x89}K\x01"
                       + MARKER + b"stR"}),
    "58-hooks-called": state_pickle({"x": name("torch._utils", "_rebuild_tensor_v2") + b"(" + storage()
        + b"K\x00K\x04\x85K\x01\x85\x89"
                              + CALL + b"tR"}),
    "59-from-type": state_pickle({"x": name("torch._tensor", "_rebuild_from_type_v2") + b"(" + MARKER + name("torch", "Tensor")
                           + text("trace") + b"\x85}tR"}),
    "59-from-type-of-a-foreign-class": state_pickle({"x": name("torch._tensor", "_rebuild_from_type_v2") + b"("
                                              + name("torch._utils", "_rebuild_tensor_v2") + MARKER + b"(" + storage()
                                              + b"K\x00K\x04\x85K\x01\x85\x89" + HOOKS + b"t}tR"}),
    "60-pop": pops(CALL),
    "60-pop-mark": program(b"(" + CALL + b"1}" + text("w") + tensor((4,), (1,)) + b"s"),
    "60-memo": pops(CALL + b"q\x07"),
    "60-overwritten-memo": program(CALL + b"q\x000Nq\x000h\x00"),
    "60-swallowed-by-a-known-call": state_pickle({"x": name("collections", "OrderedDict") + b"((" + text("k") + CALL
        + b"lNl\x85R"}),
    "60-swallowed-by-a-set": state_pickle({"x": name("builtins", "frozenset") + b"](" + CALL + b"e\x85R"}),
    "85-codec": state_pickle({"x": name("_codecs", "encode") + text("trace") + text("rot13") + b"\x86R"}),
    "85-codec-computed": state_pickle({"x": name("_codecs", "encode") + text("trace") + CALL + b"\x86R"}),
    "85-decode": state_pickle({"x": name("_codecs", "decode") + b"C\x05trace" + text("unicode_escape") + b"\x86R"}),
    "getattr": state_pickle({"x": name("builtins", "getattr") + MARKER + text("__call__") + b"\x86R"}),
    "eval": state_pickle({"x": name("builtins", "eval") + text("__import__('ckptool_marker').run()") + b"\x85R"}),
    "map": state_pickle({"x": name("builtins", "list") + name("builtins", "map") + MARKER + b"](K\x01e\x86R\x85R"}),
    "apply": state_pickle({"x": name("functools", "partial") + MARKER + b"\x85R"}),
    "load-from-bytes-elsewhere": state_pickle({"x": name("torch.storage", "_load_from_file") + b"C\x05trace\x85R"}),
    "bit-generator": state_pickle({"x": name("numpy.random._pickle", "__generator_ctor") + MARKER + b"\x85R"}),
}  # fmt: skip


# Shown and kept, though they are not calls: nothing happens until somebody makes the class's object.
INERT: dict[str, bytes] = {
    "59-wrapper-of-a-foreign-class": state_pickle(
        {
            "x": name("torch._utils", "_rebuild_wrapper_subclass")
            + b"("
            + MARKER
            + name("torch", "float32")
            + b"K\x04\x85K\x01\x85K\x00"
            + name("torch", "strided")
            + text("cpu")
            + b"\x89tR"
        }
    ),
    "53-newobj": state_pickle({"x": MARKER + text("trace") + b"\x85\x81"}),
    "53-newobj-ex": state_pickle({"x": MARKER + text("trace") + b"\x85}\x92"}),
    "53-name-alone": state_pickle({"x": MARKER}),
    "57-build-of-a-device": state_pickle(
        {"x": name("torch", "device") + text("cpu") + b"\x85R}" + text("__class__") + MARKER + b"sb"}
    ),
    "57-build-of-a-list-subclass": state_pickle({"x": MARKER + b")\x81](K\x01K\x02eb"}),
    "57-slots-state": state_pickle({"x": MARKER + b")\x81N}" + text("__reduce__") + MARKER + b"s\x86b"}),
}


@pytest.mark.parametrize("title", CALLS)
def test_calls_are_shown_and_never_passed_on(title: str, see: Callable[..., Seen], tmp_path: Path) -> None:
    found = see(pickle_zip(CALLS[title]))
    codes = found.codes()
    assert all(codes[command] == "ok" for command in LOOKING), codes
    assert codes["convert to pt"] == "unsafe-global", codes
    checkpoint = opened_pickle(CALLS[title], tmp_path)
    assert list(uses_of(checkpoint))
    file = tmp_path / "input.pt"
    notes = [note.message for note in ckptool.inspect(file).notes if note.code == "unsafe-global"]
    assert len(notes) == 1 and "ckptool does not" in notes[0]
    for refused in (lambda: ckptool.load(file), lambda: ckptool.convert(file, tmp_path / "out.pt")):
        with pytest.raises(UnsafeObject):
            refused()
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("title", INERT)
def test_objects_of_foreign_classes_stay_inert(title: str, see: Callable[..., Seen], tmp_path: Path) -> None:
    found = see(pickle_zip(INERT[title]))
    assert all(found.codes()[command] == "ok" for command in LOOKING), found.codes()
    opened_pickle(INERT[title], tmp_path)
    if title != "57-build-of-a-device":
        with pytest.raises(UnsafeObject):
            ckptool.load(tmp_path / "input.pt")


def test_pythons_own_pickle_would_run_the_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle
    import sys

    found = Decoy(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    pickle.loads(program(CALL))
    sys.modules.pop("ckptool_marker")
    assert found.trace.exists()


@pytest.mark.parametrize(
    "pickle",
    [
        program(b"\x8c\x0eckptool_marker" + CALL + b"\x93)R", 4),
        program(text("ckptool_marker") + name("builtins", "str") + text("run") + b"\x85R\x93)R", 4),
        program(b"K\x01K\x02\x93", 4),
        program(b"](" + text("a") + b"e" + text("run") + b"\x93)R", 4),
    ],
    ids=["call", "str", "numbers", "list"],
)
def test_a_computed_name_is_refused(pickle: bytes, see: Callable[..., Seen]) -> None:
    found = see(pickle_zip(pickle), "inspect")
    assert found.steps[0].code in ("unsafe-global", "corrupt") and "name is computed" in found.steps[0].message


def test_discarded_calls_are_listed(tmp_path: Path) -> None:
    for title in ("60-pop", "60-pop-mark", "60-memo", "60-overwritten-memo"):
        calls = list(uses_of(opened_pickle(CALLS[title], tmp_path)))
        assert [use.name for use, _ in calls] == ["ckptool_marker.run"], title
        assert "ckptool_marker.run" in str(ckptool.inspect(tmp_path / "input.pt"))


INPUTS: dict[str, bytes | Callable[[], bytes]] = {
    f"row {title}": pickle_zip(pickle) for title, pickle in (CALLS | INERT).items()
}
