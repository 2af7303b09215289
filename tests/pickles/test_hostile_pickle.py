"""Pickles that nobody should send, in files, through the verbs.

What the machine itself does with each opcode is in `test_decode`, what would run in `test_hostile_calls`, what would
exhaust its reader in `test_hostile_bombs`; here is what a user sees of the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.checkpoint.nodes import Object
from ckptool.errors import CkptoolError, Conflict, Corrupt, LimitExceeded, Truncated, Unsupported
from ckptool.formats import read
from tests.support.decoys import CALL, MARKER, opened_pickle
from tests.support.files import load, torch_bytes
from tests.support.hostile_inputs import HOOKS, name, pickle_zip, program, state_pickle, storage, tensor, text
from tests.support.same import assert_same_tree
from tests.support.watched import LOOKING, Seen

# Rows 56, 57, 61 to 69, 76, 77, 79 to 82: refused, in words. Each is a file of INPUTS too.

LONG = b"1" * 1_000_000


REFUSED: dict[str, tuple[bytes, type[CkptoolError]]] = {
    "57-ordered-dict-with-numbers": (program(HOOKS + b"}K\x01Nsb"), Corrupt),
    "57-ordered-dict-with-a-list": (program(HOOKS + b"](K\x01eb"), Corrupt),
    "57-build-of-a-parameter": (state_pickle({"x": name("torch.nn.parameter", "Parameter") + b")\x81}" + text("data") + CALL
        + b"sb"}), Corrupt),
    "57-state-of-a-tensor": (program(tensor((4,), (1,)) + b"}" + text("a") + b"K\x01sb"), Corrupt),
    "57-state-of-a-storage": (program(storage() + b"}" + text("a") + b"K\x01sb"), Corrupt),
    "57-state-of-a-parameter": (program(name("torch._utils", "_rebuild_parameter") + tensor((4,), (1,)) + b"\x88"
        + HOOKS + b"\x87R}b"),
                                Corrupt),
    "61-setitem-on-a-tensor": (program(tensor((4,), (1,)) + b"K\x00K\x01s"), Corrupt),
    "61-setitems-on-a-tensor": (program(tensor((4,), (1,)) + b"(K\x00K\x01u"), Corrupt),
    "61-append-on-a-tensor": (program(tensor((4,), (1,)) + b"Na"), Corrupt),
    "61-setitem-on-a-storage": (program(storage() + b"K\x00K\x01s"), Corrupt),
    "61-setitem-on-a-list": (program(b"]K\x00K\x01s"), Corrupt),
    "61-setitem-on-a-text": (program(text("a") + b"K\x00K\x01s"), Corrupt),
    "61-append-on-a-dict": (program(b"}Na"), Corrupt),
    "61-append-on-an-ordered-dict": (program(HOOKS + b"Na"), Corrupt),
    "61-add-to-a-dict": (program(b"}(N\x90", 4), Corrupt),
    "61-build-on-an-int": (program(b"K\x01}b"), Corrupt),
    "61-build-on-a-list": (program(b"]}b"), Corrupt),
    "61-build-on-a-name": (program(name("torch", "float32") + b"}b"), Corrupt),
    "61-setitem-on-a-name": (program(name("torch", "float32") + b"K\x01Ns"), Corrupt),
    "62-underflow": (program(b"\x86"), Corrupt),
    "62-no-mark": (program(b"K\x01t"), Corrupt),
    "62-stop-alone": (b".", Corrupt),
    "62-empty": (b"", Truncated),
    "62-no-stop": (b"\x80\x02N", Truncated),
    "62-setitem-of-nothing": (program(b"s"), Corrupt),
    "63-two-values": (program(b"NN"), Corrupt),
    "63-a-mark": (program(b"(N"), Corrupt),
    "64-bytes-after-stop": (program(b"N") + b"\0", CkptoolError),
    "64-second-pickle": (program(b"N") + program(CALL), CkptoolError),
    "65-undefined": (program(b"h\x07"), Corrupt),
    "65-undefined-long": (program(b"j\xff\xff\xff\xff"), Corrupt),
    "65-negative": (program(b"Np-1\ng-2\n"), Corrupt),
    "67-text": (program(b"X\xf0\xff\xff\x030123456789"), CkptoolError),
    "67-text-of-4-gb": (program(b"X\xf0\xff\xff\xff0123456789"), LimitExceeded),
    "67-bytes": (program(b"B\xf0\xff\xff\xff0123456789"), Truncated),
    "67-bytes8": (program(b"\x8e" + b"\xff" * 7 + b"\x7f"), Truncated),
    "67-bytes8-of-2-64": (program(b"\x8e" + b"\xff" * 8), Truncated),
    "67-bytearray8": (program(b"\x96" + b"\xff" * 7 + b"\x00", 5), Truncated),
    "67-text8": (program(b"\x8d" + b"\xff" * 8, 4), LimitExceeded),
    "68-binstring": (program(b"T\xff\xff\xff\xff"), Corrupt),
    "68-long4": (program(b"\x8b\xff\xff\xff\xff"), Corrupt),
    "69-long1-of-255-bytes": (program(b"\x8a\xff" + b"\x01" * 254), CkptoolError),
    "69-long4-of-2-31": (program(b"\x8b\xff\xff\xff\x7f"), LimitExceeded),
    "69-long4-of-5000-bits": (program(b"\x8b\x80\x02\0\0" + b"\1" * 640), LimitExceeded),
    "69-long-of-a-million-digits": (program(b"L" + LONG + b"L\n"), CkptoolError),
    "69-int-of-a-million-digits": (program(b"I" + LONG + b"\n"), CkptoolError),
    "69-put-of-a-million-digits": (program(b"Np" + LONG + b"\n"), CkptoolError),
    "69-float-of-a-million-digits": (program(b"F" + LONG + b"e\n"), CkptoolError),
    "76-list-as-key": (program(b"}]Ns"), Corrupt),
    "76-dict-in-a-tuple-as-key": (program(b"}}\x85Ns"), Corrupt),
    "76-set-as-key": (program(b"}\x8fNs", 4), Corrupt),
    "76-nan-as-key": (program(b"}G\x7f\xf8\0\0\0\0\0\0Ns"), Corrupt),
    "76-nan-in-a-tuple": (program(b"}G\x7f\xf8\0\0\0\0\0\0\x85Ns"), Corrupt),
    "76-key-twice": (program(b"}(K\x01NK\x01\x88u"), Conflict),
    "76-one-and-true": (program(b"}(K\x01N\x88Nu"), Conflict),
    "77-protocol-6": (program(b"N", 6), Unsupported),
    "77-protocol-42": (program(b"N", 42), Unsupported),
    "77-protocol-42-later": (program(b"N0\x80\x2aN"), Unsupported),
    "80-ext1": (program(b"\x82\x01"), Unsupported),
    "80-ext2": (program(b"\x83\x01\0"), Unsupported),
    "80-ext4": (program(b"\x84\x01\0\0\0"), Unsupported),
    "80-next-buffer": (program(b"\x97", 5), Unsupported),
    "80-readonly-buffer": (program(b"N\x98", 5), Unsupported),
    "81-name-not-utf-8": (program(b"ca\xff\nb\n"), Corrupt),
    "81-name-with-a-zero": (program(name("torch\0", "float32")), Corrupt),
    "81-name-with-an-escape": (program(name("torch", "\x1b[31mfloat32")), Corrupt),
    "81-name-with-a-line-break": (program(b"\x8c\x05tor\nc\x8c\x01a\x93", 4), Corrupt),
    "81-name-with-half-a-pair": (program(b"\x8c\x03\xed\xa0\x80\x8c\x01a\x93", 4), Corrupt),
    "81-text-not-utf-8": (program(b"X\1\0\0\0\xff"), Corrupt),
    "82-persid": (program(b"P0\n"), Corrupt),
    "82-number": (program(b"K\x01Q"), Corrupt),
    "82-none": (program(b"NQ"), Corrupt),
    "82-short": (program(b"(" + text("storage") + b"tQ"), Corrupt),
    "82-long": (program(b"(" + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu")
        + b"K\x04NNtQ"), Corrupt),
    "82-module": (program(b"(" + text("module") + MARKER + text("a.py") + text("import os") + b"tQ"), Corrupt),
    "82-call-as-key": (program(b"(" + text("storage") + name("torch", "FloatStorage") + CALL + text("cpu")
        + b"K\x04tQ"), Corrupt),
    "82-call-as-type": (program(b"(" + text("storage") + CALL + text("0") + text("cpu") + b"K\x04tQ"), CkptoolError),
    "82-foreign-type": (program(b"(" + text("storage") + MARKER + text("0") + text("cpu") + b"K\x04tQ"), Unsupported),
}  # fmt: skip


@pytest.mark.parametrize("title", REFUSED)
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


def test_a_far_memo_index_is_an_index_like_any_other(see: Callable[..., Seen], tmp_path: Path) -> None:
    pickle = program(b"]r\xfe\xff\xff\xffp99999999999999999999\nj\xfe\xff\xff\xff\x86")
    assert set(see(pickle_zip(pickle), *LOOKING).codes().values()) == {"ok"}
    first, second = opened_pickle(pickle, tmp_path).tree
    assert first is second


def test_a_memo_slot_can_be_used_again(tmp_path: Path) -> None:
    tree = opened_pickle(program(b"(K\x01q\x00K\x02q\x00h\x00t"), tmp_path).tree
    assert tree == (1, 2, 2)


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


@pytest.mark.parametrize(
    "pickle",
    [program(b"N", protocol) for protocol in range(6)]
    + [b"N.", b"\x80\x02\x80\x04N.", b"N0\x80\x02N.", b"\x80\x02N0\x80\x05N."],
)
def test_any_protocol_is_read_anywhere(pickle: bytes, tmp_path: Path) -> None:
    assert opened_pickle(pickle, tmp_path).tree is None


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_writes_with_any_protocol_is_read(protocol: int, tmp_path: Path) -> None:
    value = {
        "w": torch.ones(2),
        "set": {1},
        "bytes": b"ab",
        "array": bytearray(b"cd"),
        "long": "x" * 70_000,
        "n": 1 << 70,
    }
    file = tmp_path / "input.pt"
    file.write_bytes(torch_bytes(value, pickle_protocol=protocol))
    found = read(file).tree
    assert found["w"].numpy().tolist() == [1, 1] and found["set"].items == [1]
    assert {key: found[key] for key in value if key not in ("w", "set")} == {
        key: item for key, item in value.items() if key not in ("w", "set")
    }
    ckptool.convert(file, tmp_path / "out.pt")
    assert torch.equal(load(tmp_path / "out.pt")["w"], value["w"])  # protocol 2: every torch reads it


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


INPUTS: dict[str, bytes | Callable[[], bytes]] = {
    f"row {title}": pickle_zip(pickle) for title, (pickle, _) in REFUSED.items()
}
