"""Something unknown hidden in the use of something known: nothing passes it on, everything mentions it, nothing runs
it."""

from __future__ import annotations

import contextlib
import io
import itertools
import pickletools
import random
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptool
from ckptool.errors import CkptoolError, LimitExceeded, UnsafeObject
from ckptool.formats.nested_streams import BUILDERS
from ckptool.pickles import calls
from ckptool.pickles.decode import decode
from tests.support.errors import refused
from tests.support.hidden import (
    UNKNOWN,
    HiddenCall,
    HiddenEffect,
    combinations,
    fate,
    hidden_calls,
    hidden_effects,
    known_names,
)
from tests.support.hostile_inputs import integer, name, pickle_zip, program, tensor, text
from tests.support.looped import looped
from tests.support.processes import soon

DECOYS = ("ckptool_marker", "models", "omegaconf")

Verb = Callable[[Path, Path], Any]

VERBS: dict[str, Verb] = {
    "convert": lambda file, out: ckptool.convert(file, out),
    "convert --all": lambda file, out: ckptool.convert(file, out.with_suffix(".safetensors"), all=True),
    "strip-module, clean": lambda file, out: ckptool.strip_module(file, out),
    "add-module": lambda file, out: ckptool.add_module(file, out, at="state_dict"),
    "add-module --in-place": lambda file, _: ckptool.add_module(file, at="state_dict", in_place=True),
    "rename": lambda file, out: ckptool.rename(file, ["a.* => b.*"], out, at="state_dict"),
    "remap": lambda file, out: ckptool.remap(file, out, to="cuda:0"),
    "remap, clean": lambda file, out: ckptool.remap(file, out, to="cpu"),
    "remap --in-place": lambda file, _: ckptool.remap(file, to="cuda:0", in_place=True),
    "cast": lambda file, out: ckptool.cast(file, out, dtype="f16", at="state_dict"),
    "edit": lambda file, out: ckptool.edit(file, out, set={"epoch": 1}),
    "edit --in-place": lambda file, _: ckptool.edit(file, set={"epoch": 1}, in_place=True),
    "slim": lambda file, out: ckptool.slim(file, out),
    "bundle": lambda file, out: ckptool.bundle({"a": file, "b": file}, out),
    "average": lambda file, out: ckptool.average([file, file], out),
    "warm-start": lambda file, out: ckptool.warm_start(file, against=file, out=out),
    "save": lambda file, out: ckptool.save(ckptool.open(file), out),
}


class _Watch:
    """What the process imports, opens to write and starts while a verb works; the hook stays for the process, so it can
    be turned off."""

    events: list[str]

    def __init__(self) -> None:
        self.events, self.on = [], False
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.on and (
            event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn")
            or (event == "import" and str(args[0]).partition(".")[0] in DECOYS)
            or (event == "pickle.find_class")
        ):
            self.events.append(f"{event} {args[:1]}")


_WATCH = _Watch()


def check(case: HiddenCall, verb: str, folder: Path) -> None:
    """One case with one verb: refused, or written without what was hidden; mentioned; nothing ran."""
    folder.mkdir()
    file, out = folder / "in.pt", folder / "out.pt"
    content = pickle_zip(case.pickle)
    file.write_bytes(content)
    _WATCH.events, _WATCH.on = [], True
    try:
        try:
            VERBS[verb](file, out)
            passed = True
        except CkptoolError:
            passed = False
        mentioned = _mentions(file, case) if file.read_bytes() == content else True
    finally:
        _WATCH.on = False
    assert not _WATCH.events, (case.title, verb, _WATCH.events)
    assert mentioned, (case.title, verb)
    for written in folder.iterdir():
        if written != file or file.read_bytes() != content:
            assert passed, (case.title, verb, "refused, and wrote", written.name)
            assert not any(case.word in found for found in names_in(written)), (case.title, verb)


def _mentions(file: Path, case: HiddenCall) -> bool:
    """Whether `inspect` and `scan` name what is hidden, and `load` refuses; also where the file cannot be opened at
    all."""
    try:
        notes = [note.message for note in ckptool.inspect(file).notes if note.code == "unsafe-global"]
    except CkptoolError:
        with pytest.raises(CkptoolError):
            ckptool.scan(file)
        return True
    with pytest.raises(CkptoolError):
        ckptool.load(file)
    report = ckptool.scan(file)
    names = [call.name for row in report.files for call in row.calls]
    return bool(notes) and any(case.word in name for name in names) and report.findings > 0


def names_in(path: Path) -> Iterator[str]:
    """Every name in the pickles of an archive, as Python's own tool reads them; all texts, as those may become
    names."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        for record in archive.namelist():
            if record.endswith(".pkl"):
                texts: list[str] = []
                for opcode, argument, _ in pickletools.genops(archive.read(record)):
                    if opcode.name in ("GLOBAL", "INST"):
                        yield str(argument).replace(" ", ".")
                    elif opcode.name == "STACK_GLOBAL":
                        yield ".".join(texts[-2:])
                    if isinstance(argument, str):
                        texts.append(argument)


def sampled(count: int, seed: int) -> list[tuple[HiddenCall, str]]:
    """So many different combinations of a case and a verb."""
    verbs = itertools.cycle(VERBS)
    return [(case, next(verbs)) for case in itertools.islice(hidden_calls(random.Random(seed)), count)]


def sweep(chosen: list[tuple[HiddenCall, str]], folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Every combination in a folder of its own, with modules on the path that would leave a trace if they were
    imported."""
    for module in DECOYS:
        (folder / f"{module}.py").write_text(f"import pathlib\npathlib.Path({str(folder / 'trace')!r}).touch()\n")
    patch.syspath_prepend(folder)
    for number, (case, verb) in enumerate(chosen):
        check(case, verb, folder / str(number))
    assert not (folder / "trace").exists()


@pytest.mark.parametrize(
    ("count", "seed"), [(200, 5), *(pytest.param(400, 1_000 + seed, marks=pytest.mark.soak) for seed in range(10))]
)
def test_hidden_calls_are_not_passed_on(count: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep(sampled(count, seed), tmp_path, monkeypatch)


def test_every_known_name_can_be_among_them() -> None:
    assert len(known_names()) > 900 and combinations() > 400_000


# Pickles beside the checkpoint's own ----------------------------------------------------------------------------------


def _legacy(hidden: bytes) -> bytes:
    """A file of torch before 1.6, with something hidden in what it says about the machine."""
    stream = io.BytesIO()
    torch.save({"state_dict": {"a.weight": torch.ones(4)}}, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue().replace(b"u.\x80\x02}q\x00X\n", b"X\x01\x00\x00\x00x" + hidden + b"u.\x80\x02}q\x00X\n", 1)


def _array(hidden: bytes) -> bytes:
    """An array of objects, as numpy writes it with a pickle."""
    stream = io.BytesIO()
    np.save(stream, np.array([None], dtype=object), allow_pickle=True)
    return (
        stream.getvalue().replace(b"]\x94Na", b"]\x94" + hidden + b"a").replace(b"]q\x07Na", b"]q\x07" + hidden + b"a")
    )


@looped("what", UNKNOWN)
@pytest.mark.parametrize("make", [_legacy, _array])
def test_calls_in_other_pickles_of_a_file(what: str, make: Callable[[bytes], bytes], tmp_path: Path) -> None:
    hidden, word = UNKNOWN[what]
    file = tmp_path / ("in.npy" if make is _array else "in.pt")
    content = make(hidden)
    assert hidden in content
    file.write_bytes(content)
    try:
        report = ckptool.scan(file)
    except CkptoolError:
        report = None  # it cannot be opened at all
    assert report is None or any(word in call.name for call in report.files[0].calls)
    for verb in (
        lambda: ckptool.convert(file, tmp_path / "out.pt"),
        lambda: ckptool.remap(file, tmp_path / "out.pt", to="cpu"),
    ):
        with pytest.raises(CkptoolError):
            verb()
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_calls_in_the_table_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(4)}, checkpoint_id=str(tmp_path / "a.dcp"))
    assert not ckptool.scan(tmp_path).findings
    table = tmp_path / "a.dcp" / ".metadata"
    content = table.read_bytes()
    stop = content.rindex(b".")
    for hidden, word in UNKNOWN.values():
        table.write_bytes(content[:2] + hidden + b"0" + content[2:stop] + b".")
        if content[2:3] == b"\x95":  # in front of its frame
            table.write_bytes(content[:2] + hidden + b"0" + content[2:])
        report = ckptool.scan(tmp_path)
        assert report.findings and any(word in call.name for row in report.files for call in row.calls), word
        refused(CkptoolError, tmp_path, lambda: ckptool.convert(tmp_path / "a.dcp", tmp_path / "out.pt"))
        assert not (tmp_path / "out.pt").exists()


# Whatever stock torch runs, or is broken by, while it loads a file ----------------------------------------------------


def said(file: Path) -> bool:
    """Whether `scan` or opening it says something of a file."""
    try:
        return ckptool.scan(file).findings > 0
    except CkptoolError:
        return True


def passed_on(file: Path, out: Path) -> bool:
    """Whether a writer that has nothing to change, or one that has, passes it on without being told to."""
    for write in (lambda: ckptool.strip_module(file, out), lambda: ckptool.rename(file, ["w => v"], out)):
        try:
            write()
        except CkptoolError:
            continue
        out.unlink()
        return True
    return False


def check_effect(case: HiddenEffect, folder: Path) -> str:
    file, out = folder / "in.pt", folder / "out.pt"
    what = fate(case.content, folder)
    mentioned = said(file)
    if what:
        assert mentioned, (case.title, what)
        assert not passed_on(file, out), (case.title, what)
    if case.fine:
        assert not what, (case.title, what)
        assert not mentioned, (case.title, "is as the library writes it")
    return what or ("said" if mentioned else "quiet")


def sweep_effects(count: int, seed: int, folder: Path) -> Counter[str]:
    return Counter(check_effect(case, folder) for case in itertools.islice(hidden_effects(random.Random(seed)), count))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("count", "seed"), [(30, 7), *(pytest.param(200, 1_000 + seed, marks=pytest.mark.soak) for seed in range(10))]
)
def test_hidden_effects_are_said_and_not_passed_on(count: int, seed: int, tmp_path: Path) -> None:
    found = sweep_effects(count, seed, tmp_path)
    assert found["ran"] and found["quiet"] and found["said"] and len(found) > 3, found


# Known names that together call something: each is harmless, and one hands another what it calls ----------------------


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
    pickled = CALLERS[title](str(made))
    assert decode(program(pickled + b"0N", 4), lambda key: key, BUILDERS).discarded, "told, though it is thrown away"
    file = file_with(pickled, tmp_path)
    check_refused(file, tmp_path)
    assert not made.exists()
    with contextlib.suppress(Exception):
        torch.load(file, weights_only=False)
    assert made.exists()  # or it would be no example


@looped("title", COMPOSED)
def test_what_could_call_something_is_no_value(title: str, tmp_path: Path) -> None:
    check_refused(file_with(COMPOSED[title], tmp_path), tmp_path)


SHARED = {
    "arguments": name("torch.nn.parameter", "Parameter") + b"q\x00((" + b"N" * 30_000 + b"ttq\x0100]("
        + b"h\x00h\x01R" * 20_000,
    "arguments thrown away": name("torch", "device") + b"q\x00(" + b"N" * 30_000 + b"tq\x0100]("
        + b"h\x00h\x01R0" * 60_000,
    "parts of types": name("types", "GenericAlias") + b"q\x00((" + b"N" * 900 + b"ttq\x0100]("
        + b"h\x00h\x01R0" * 60_000,
}  # fmt: skip


@pytest.mark.parametrize("shared", SHARED)
def test_what_many_calls_share_is_not_looked_at_each_time(shared: str) -> None:
    with soon(6):  # some hundred without
        decoded = decode(program(SHARED[shared] + b"e", 4), lambda key: key, BUILDERS, file_bytes=2_000_000)
        assert sum(1 for _ in calls.uses([decoded.root, decoded.discarded])) >= 20_000


def _attributes(count: int) -> bytes:
    return b"}q\x00(" + b"".join(text(f"a{number}") + b"N" for number in range(count)) + b"u0"


def _fields(count: int) -> bytes:
    """numpy's types of so many fields in one byte each, of one state."""
    names = [text(f"a{number}") for number in range(count)]
    one = name("numpy", "dtype") + text("i1") + b"\x89\x88\x87Rq\x050"
    fields = b"".join(each + b"h\x05" + integer(number) + b"\x86" for number, each in enumerate(names))
    return (
        one
        + b"(K\x03"
        + text("|")
        + b"N("
        + b"".join(names)
        + b"t}("
        + fields
        + b"u"
        + integer(count)
        + (b"K\x01K\x10tq\x000" + name("numpy", "dtype") + b"q\x01" + text(f"V{count}") + b"\x89\x88\x87q\x0200")
    )


# What is judged by itself each time, made once; and an object that it is given to.
COUNTED = {
    "attributes of a layer": (
        _attributes(900) + name("torch.nn.modules.linear", "Linear") + b"q\x010", b"h\x01)\x81h\x00b"
    ),
    "attributes of a tensor": (
        _attributes(3_000) + name("torch._utils", "_rebuild_parameter_with_state") + b"q\x01(NNNh\x00tq\x0200",
        b"h\x01h\x02R",
    ),
    "fields of a type": (_fields(2_000), b"h\x01h\x02Rh\x00b"),
    "text of an array": (
        text("a" * (1 << 20)) + b"q\x000" + name("numpy", "dtype") + text("i1") + b"\x89\x88\x87R"
        + integer(1 << 20) + b"\x85q\x010q\x020(K\x01h\x01h\x02\x89h\x00tq\x000"
        + name("numpy.core.multiarray", "_reconstruct") + b"q\x01(" + name("numpy", "ndarray")
        + b"K\x00\x85C\x01btq\x0200",
        b"h\x01h\x02Rh\x00b",
    ),
}  # fmt: skip


@pytest.mark.parametrize("shared", COUNTED)
def test_what_many_objects_share_is_counted(shared: str) -> None:
    made, each = COUNTED[shared]
    with soon(6):  # minutes, and hours for a megabyte
        few = decode(program(made + b"](" + each * 3 + b"e", 4), lambda key: key, BUILDERS)
        assert len(few.root) == 3 and (shared == "attributes of a tensor" or calls.is_inert(few.root))
        with pytest.raises(LimitExceeded, match="share parts"):
            decode(program(made + b"](" + each * 30_000 + b"e", 4), lambda key: key, BUILDERS)


@pytest.mark.filterwarnings("ignore")
def test_arrays_of_objects_in_fields_are_harmless(tmp_path: Path) -> None:
    arrays = [np.array([1, "a"], object), np.zeros(2, [("a", "O"), ("b", "i4")]), np.zeros(2, [("a", [("c", "O", 2)])])]
    for protocol in (2, 4):
        torch.save({"w": torch.ones(1), "x": arrays}, tmp_path / "in.pt", pickle_protocol=protocol)
        assert not ckptool.scan(tmp_path / "in.pt").findings
