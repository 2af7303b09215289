"""Known names that together call something: each is harmless, and one hands another what it calls.

torch is the judge: loading such a file makes a file of its own, by `torch.from_file`, which is a function of torch like
`torch.relu`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import ckptool
from ckptool.errors import UnsafeObject
from ckptool.formats.nested_streams import BUILDERS
from ckptool.pickles import calls
from ckptool.pickles.decode import decode
from tests.support.hostile_inputs import integer, name, pickle_zip, program, tensor, text
from tests.support.looped import looped
from tests.support.processes import soon

ORDERED = name("collections", "OrderedDict") + b")R"
FROM_FILE = name("builtins", "getattr") + name("torch._C", "_VariableFunctionsClass") + text("from_file") + b"\x86R"


def applied(path: str, function: bytes = FROM_FILE) -> bytes:
    """A `functools.partial` of a harmless function, whose state puts another in its place."""
    given = b"(" + text(path) + b"\x88" + integer(8) + b"t"
    return name("functools", "partial") + name("builtins", "len") + b"\x85R(" + function + given + b"}}tb"


def namespace(attribute: str, value: bytes) -> bytes:
    return name("argparse", "Namespace") + b")\x81}" + text(attribute) + value + b"sb"


def _item_of_attribute(path: str) -> bytes:
    made_when_missing = name("collections", "defaultdict") + applied(path) + b"\x85R"
    module = name("torch.nn.modules.linear", "Identity") + b")\x81}" + text("_x") + made_when_missing + b"sb"
    attribute = name("builtins", "getattr") + module + text("_x") + b"\x86R"
    return name("_operator", "getitem") + attribute + text("k") + b"\x86R"


def _truth() -> bytes:
    return name("builtins", "bool") + text("1") + b"\x85R"


# What calls -> the pickle of it, which makes a file at the path.
CALLERS: dict[str, Callable[[str], bytes]] = {
    "a parameter of an object that has a method": lambda path: (
        name("torch._utils", "_rebuild_parameter") + namespace("detach", applied(path)) + b"\x88" + ORDERED + b"\x87R"
    ),
    "a parameter made directly": lambda path: (
        name("torch.nn.parameter", "Parameter") + namespace("detach", applied(path)) + b"\x85R"
    ),
    "an item of an attribute": _item_of_attribute,
    "a dictionary with keys of its own": lambda path: (
        name("collections", "Counter") + ORDERED + b"}" + text("keys") + applied(path) + b"sb\x85R"
    ),
}


# The same without a file: what is written nowhere, and would call something all the same.
COMPOSED: dict[str, bytes] = {
    "a partial of a rebuild function": name("functools", "partial") + name("torch._utils", "_rebuild_tensor")
        + b"\x85R",
    "a partial of a partial": name("functools", "partial") + name("functools", "partial") + b"\x85R",
    "a partial of an object": name("functools", "partial") + name("builtins", "len") + namespace("a", b"N") + b"\x86R",
    "a partial of another function": applied("x", name("builtins", "type")),
    "a function that makes files": FROM_FILE,
    "reduce of any function": name("functools", "reduce") + name("builtins", "abs") + b"](" + text("a") + b"e\x86R",
    "reduce of a partial": name("functools", "reduce") + applied("x") + b"](" + text("a") + _truth() + b"e\x86R",
    "classes made": name("builtins", "type") + text("X") + b")}\x87R",
    "the class of classes": name("builtins", "type"),
    "a type that is evaluated": name("_operator", "getitem") + name("typing", "Optional") + text("f()") + b"\x86R",
    "a mesh that connects": name("torch.distributed.device_mesh", "DeviceMesh") + text("cpu") + b"](K\x00e\x86R",
    "a codec by its name": name("builtins", "str") + b"C\x01a" + text("idna") + b"\x86R",
    "a codec of bytes": name("builtins", "bytes") + namespace("a", b"N") + text("idna") + b"\x86R",
    "a tensor of an object": name("torch._utils", "_rebuild_device_tensor_from_cpu_tensor") + b"("
    + namespace("to", name("builtins", "len")) + b"NN\x89tR",
    "arguments of a tensor": name("torch._tensor", "_rebuild_from_type_v2") + b"("
        + name("torch._utils", "_rebuild_tensor")
    + name("torch", "Tensor") + b"(" + namespace("dtype", b"N") + b"t}tR",
}  # fmt: skip


def file_with(hidden: bytes, folder: Path) -> Path:
    weights = ORDERED + text("a.weight") + tensor((4,), (1,)) + b"s"
    path = folder / "in.pt"
    path.write_bytes(pickle_zip(program(b"}(" + text("state_dict") + weights + text("x") + hidden + b"u", 4)))
    return path


def check_refused(file: Path, folder: Path) -> None:
    assert ckptool.scan(file).findings
    assert [note for note in ckptool.inspect(file).notes if note.code == "unsafe-global"]
    with pytest.raises(UnsafeObject):
        ckptool.strip_module(file, folder / "out.pt")
    with pytest.raises(UnsafeObject):
        ckptool.convert(file, folder / "out.pt")
    assert not (folder / "out.pt").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", CALLERS)
def test_known_names_that_call_something_together_are_refused(title: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    file = file_with(CALLERS[title](str(made)), tmp_path)
    check_refused(file, tmp_path)
    assert not made.exists()
    with contextlib.suppress(Exception):
        torch.load(file, weights_only=False)
    assert made.exists()  # or it would be no example


@looped("title", COMPOSED)
def test_what_could_call_something_is_no_value(title: str, tmp_path: Path) -> None:
    check_refused(file_with(COMPOSED[title], tmp_path), tmp_path)


@pytest.mark.parametrize("title", CALLERS)
def test_what_was_called_and_thrown_away_is_told(title: str) -> None:
    check_told_though_thrown_away(CALLERS[title]("made"))


def check_told_though_thrown_away(pickled: bytes) -> None:
    thrown_away = program(pickled + b"0N", 4)
    assert decode(thrown_away, lambda key: key, BUILDERS).discarded


SHARED = {
    "arguments": name("torch.nn.parameter", "Parameter") + b"q\x00((" + b"N" * 30_000 + b"ttq\x0100]("
        + b"h\x00h\x01R" * 20_000,
    "arguments thrown away": name("torch", "device") + b"q\x00(" + b"N" * 30_000 + b"tq\x0100]("
        + b"h\x00h\x01R0" * 60_000,
    "parts of types": name("types", "GenericAlias") + b"q\x00((" + b"N" * 900 + b"ttq\x0100]("
        + b"h\x00h\x01R0" * 60_000,
    "a state": name("models", "Net") + b"q\x00}(" + b"".join(integer(n) + b"N" for n in range(30_000)) + b"uq\x0100]("
    + b"h\x00)\x81h\x01b" * 20_000,
    "slots": name("models", "Net") + b"q\x00N}(" + b"".join(text(str(n)) + b"N" for n in range(30_000))
        + b"u\x86q\x0100]("
    + b"h\x00)\x81h\x01b" * 20_000,
}  # fmt: skip


@pytest.mark.parametrize("shared", SHARED)
def test_what_many_calls_share_is_not_looked_at_each_time(shared: str) -> None:
    with soon(6):  # some hundred without
        decoded = decode(program(SHARED[shared] + b"e", 4), lambda key: key, BUILDERS, file_bytes=2_000_000)
        assert sum(1 for _ in calls.uses([decoded.root, decoded.discarded])) >= 20_000


@pytest.mark.filterwarnings("ignore")
def test_arrays_of_objects_in_fields_are_harmless(tmp_path: Path) -> None:
    arrays = [np.array([1, "a"], object), np.zeros(2, [("a", "O"), ("b", "i4")]), np.zeros(2, [("a", [("c", "O", 2)])])]
    for protocol in (2, 4):
        torch.save({"w": torch.ones(1), "x": arrays}, tmp_path / "in.pt", pickle_protocol=protocol)
        assert not ckptool.scan(tmp_path / "in.pt").findings
