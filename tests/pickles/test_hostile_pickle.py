"""Pickles that nobody should send, in files, through the verbs.

What the machine itself does with each opcode is in `test_decode`, what would run in `test_hostile_calls`, what would
exhaust its reader in `test_hostile_bombs`; here is what a user sees of the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import ckptool
from ckptool.checkpoint.nodes import Object
from ckptool.errors import CkptoolError
from ckptool.formats import read
from tests.support.hostile_inputs import (
    HOOKS,
    name,
    opened_pickle,
    pickle_zip,
    program,
    state_pickle,
    storage,
    tensor,
    text,
)
from tests.support.hostile_pickles import REFUSED
from tests.support.looped import looped
from tests.support.same import assert_same_tree
from tests.support.watched import LOOKING, Seen

# Rows 56, 57, 61 to 69, 76, 77, 79 to 82: refused, in words. Each is a file of INPUTS too.


@looped("title", REFUSED)
def test_hostile_pickles_are_refused_in_words(title: str, see: Callable[..., Seen], tmp_path: Path) -> None:
    pickle, error = REFUSED[title]
    found = see(pickle_zip(pickle), "inspect", "show", "convert")
    codes = set(found.codes().values())
    assert len(codes) == 1 and codes < {"corrupt", "truncated", "limit-exceeded", "unsupported", "conflict",
                                        "ambiguous", "bad-tensor"}, found.codes()  # fmt: skip
    with pytest.raises(error) as caught:
        opened_pickle(pickle, tmp_path)
    assert str(tmp_path / "input.pt") in caught.value.what


@pytest.mark.parametrize(
    ("name_of", "arguments"),
    [
        ("_rebuild_tensor_v2", text("a") + b"\x85"),
        ("_rebuild_tensor_v2", b"(" + text("a") + b"K\x00K\x04\x85K\x01\x85\x89" + HOOKS + b"t"),
        ("_rebuild_tensor_v3", storage() + b"\x85"),
        ("_rebuild_parameter", text("a") + b"\x89N\x87"),
        ("_rebuild_parameter", tensor((4,), (1,)) + text("yes") + HOOKS + b"\x87"),
        ("_rebuild_qtensor", b")"),
        ("_rebuild_sparse_tensor", b"N\x85"),
        ("_rebuild_nested_tensor", b"NNN\x87"),
    ],
)
def test_wrong_arguments_make_no_tensor(
    name_of: str, arguments: bytes, see: Callable[..., Seen], tmp_path: Path
) -> None:
    """The call is shown as one; only torch could say what it makes."""
    pickle = state_pickle({"x": name("torch._utils", name_of) + arguments + b"R"})
    assert set(see(pickle_zip(pickle), *LOOKING).codes().values()) == {"ok"}
    found = opened_pickle(pickle, tmp_path)["x"]
    assert isinstance(found, Object) and found.name == f"torch._utils.{name_of}"
    with pytest.raises(CkptoolError):
        ckptool.load(tmp_path / "input.pt")


# What is odd and read all the same ------------------------------------------------------------------------------------


CYCLES: dict[str, bytes] = {
    "list": program(b"]q\x00h\x00a"),
    "dict": program(
        b"}q\x00("
        + text("a.weight")
        + tensor((4,), (1,))
        + text("a.bias")
        + tensor((4,), (1,))
        + text("me")
        + b"h\x00u"
    ),
    "tuple": program(b"]q\x00h\x00\x85q\x01ah\x01\x86"[:-1] + b"\x86"),
    "namespace": program(name("argparse", "Namespace") + b")\x81q\x00}" + text("me") + b"h\x00sb"),
    "metadata": program(HOOKS + b"q\x00}" + text("_metadata") + b"h\x00sb"),
}


@pytest.mark.parametrize("title", CYCLES)
def test_cycles_are_shown_and_kept(title: str, see: Callable[..., Seen], tmp_path: Path) -> None:
    codes = see(pickle_zip(CYCLES[title])).codes()
    assert {codes[command] for command in LOOKING} == {"ok"} and codes["convert to pt"] == "ok"
    checkpoint = opened_pickle(CYCLES[title], tmp_path)
    for out in ("out.pt", "all.safetensors"):
        ckptool.convert(tmp_path / "input.pt", tmp_path / out, all=out != "out.pt")
        assert_same_tree(checkpoint, read(tmp_path / out))


def test_of_cyclic_trees_only_the_weights_are_converted(tmp_path: Path) -> None:
    """There is no place for the rest: it is named, and left behind."""
    opened_pickle(CYCLES["dict"], tmp_path)
    done = ckptool.convert(tmp_path / "input.pt", tmp_path / "out.safetensors")
    assert list(read(tmp_path / "out.safetensors").tree) == ["a.weight", "a.bias"] and "me" in str(done)
    opened_pickle(CYCLES["list"], tmp_path)
    with pytest.raises(CkptoolError):
        ckptool.convert(tmp_path / "input.pt", tmp_path / "other.safetensors")


def test_control_characters_in_names_are_escaped(see: Callable[..., Seen], tmp_path: Path) -> None:
    keys = ["\x1b[31mred", "new\nline", "zero\0", "half\ud800", "turned\u202e", "\x9b31m", ""]
    pickle = state_pickle({key: tensor((4,), (1,)) for key in keys})
    found = see(pickle_zip(pickle))
    assert {found.codes()[command] for command in LOOKING} == {"ok"}
    assert list(opened_pickle(pickle, tmp_path).tree) == keys
    assert "\\x1b[31mred" in str(ckptool.inspect(tmp_path / "input.pt"))


def test_a_file_whose_keys_are_objects_is_the_same_as_itself(tmp_path: Path) -> None:
    """Found by fuzzing: such keys equal nothing but themselves; training frameworks use callbacks as keys."""
    made = name("models", "Callback") + b")\x81}" + text("n")
    for keys in ((b"K\x01", b"K\x02"), (b"K\x01", b"K\x01")):
        pickle = program(b"}(" + b"".join(made + key + b"sbK\x07" for key in keys) + b"u")
        opened_pickle(pickle, tmp_path)
        assert ckptool.diff(tmp_path / "input.pt", tmp_path / "input.pt").same
        (tmp_path / "other.pt").write_bytes(pickle_zip(pickle.replace(b"K\x01sb", b"K\x05sb")))
        assert not ckptool.diff(tmp_path / "input.pt", tmp_path / "other.pt").same
