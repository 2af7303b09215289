"""Plain pickles of torch before 0.4, whose storages are lists of numbers, and keys that
are given twice: the last value counts, as in Python."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save, save_file

import ckptool
from ckptool.checkpoint import InlineBytes
from ckptool.checkpoint.files import Source
from ckptool.errors import (
    Ambiguous,
    CkptoolError,
    Conflict,
    Corrupt,
    LimitExceeded,
    NotACheckpoint,
    Truncated,
    Unsupported,
)
from ckptool.formats.nested_streams import BUILDERS
from ckptool.pickles.decode import REPEATED_KEY, decode, no_storage, reaches_a_call
from tests.support.cli import Run
from tests.support.errors import unreadable
from tests.support.looped import looped

KINDS = ("Double", "Float", "Half", "Long", "Int", "Short", "Char", "Byte")


class Storage:
    def __init__(self, kind: str, values: list[float]) -> None:
        self.made = getattr(torch, f"{kind}Storage"), (values,)

    def __reduce__(self) -> Any:
        return self.made


class Tensor:
    def __init__(self, storage: Storage, *view: Any) -> None:
        self.made = torch._utils._rebuild_tensor, (storage, *view)

    def __reduce__(self) -> Any:
        return self.made


def saved_plain(seed: int) -> dict[str, Tensor]:
    chosen = random.Random(seed)
    tensors = {}
    for kind in KINDS:
        rows, columns = chosen.randint(1, 5), chosen.randint(1, 5)
        low = 0 if kind == "Byte" else -100
        whole = kind not in ("Double", "Float", "Half")
        values = [chosen.randint(low, 100) if whole else chosen.uniform(-9, 9) for _ in range(rows * columns)]
        storage = Storage(kind, values)  # type: ignore[arg-type]
        tensors[f"{kind}.weight"] = Tensor(storage, 0, (rows, columns), (columns, 1))
        tensors[f"{kind}.turned"] = Tensor(storage, 0, (columns, rows), (1, columns))
        tensors[f"{kind}.row"] = Tensor(storage, (rows - 1) * columns, (columns,), (1,))
    return tensors


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("protocol", [0, 1, 2])
def test_every_tensor_is_read_as_torch_makes_it(protocol: int, tmp_path: Path) -> None:
    file, out = tmp_path / "old.pkl", tmp_path / "new.pt"
    for seed in range(20):
        data = pickle.dumps({"model": saved_plain(seed), "epoch": 3}, protocol)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = pickle.loads(data)["model"]
        file.write_bytes(data)
        assert ckptool.verify(file).tensors == len(expected) == 3 * len(KINDS)
        ckptool.convert(file, out, overwrite=True)
        found = torch.load(out)["model"]
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key].dtype is value.dtype and found[key].stride() == value.stride(), key
            assert torch.equal(found[key], value), key
        first, second = (found[f"Float.{name}"].untyped_storage().data_ptr() for name in ("weight", "turned"))
        assert first == second


@pytest.mark.parametrize("values", [["x"], [None], [300], [1 << 70]])
def test_what_is_no_list_of_numbers_stays_a_call(values: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "a.pkl"
    file.write_bytes(pickle.dumps({"w": Tensor(Storage("Byte", values), 0, (1,), (1,))}, 2))
    assert not ckptool.inspect(file).tensors


# Keys that are repeated -----------------------------------------------------------------------------------------------


KEYS: list[Any] = ["a", "b", 0, 1, True, 1.0, (1, "a"), None]
VALUES_OF_KEYS: list[Any] = [1, 1.0, "x", [1, 2], {"a": [1]}, None, (1,), b"x"]


def part(value: Any) -> bytes:
    return pickle.dumps(value, 2)[2:-1].replace(b"q\0", b"").replace(b"q\1", b"")


def pickled(items: list[tuple[Any, Any]], batches: bool) -> bytes:
    pairs = [part(key) + part(value) for key, value in items]
    if batches:
        return b"\x80\x02}(" + b"".join(pairs) + b"u."
    return b"\x80\x02}" + b"".join(pair + b"s" for pair in pairs) + b"."


def test_the_last_value_counts_as_in_python_and_is_noted_where_they_differ() -> None:
    draw = random.Random(3)
    for case in range(400):
        items = [(draw.choice(KEYS), draw.choice(VALUES_OF_KEYS)) for _ in range(draw.randrange(7))]
        data = pickled(items, batches=bool(case % 2))
        found = decode(data, no_storage, BUILDERS)
        assert repr(found.root) == repr(pickle.loads(data)), items
        seen: dict[Any, str] = {}
        differs = False
        for key, value in items:
            differs |= seen.get(key, repr(value)) != repr(value)
            seen[key] = repr(value)
        assert [note.code for note in found.notes] == [REPEATED_KEY] * differs


def test_a_value_that_was_replaced_is_still_judged(tmp_path: Path) -> None:
    path = tmp_path / "a.pkl"
    path.write_bytes(b"\x80\x02}(X\1\0\0\0acposix\nsystem\nX\2\0\0\0id\x85RX\1\0\0\0aK\1u.")
    assert "posix.system" in str(ckptool.scan(path).to_dict())
    assert "repeated-key" in {note.code for note in ckptool.inspect(path).notes}


def test_a_file_with_equal_values_is_written_and_one_with_two_is_not(tmp_path: Path) -> None:
    """As dill fills a function's globals twice; with two tensors one would be lost."""
    for same in (True, False):
        stream = io.BytesIO()
        weights = torch.arange(4.0)
        torch.save({"w.weight": weights, "v.weight": weights if same else weights + 1}, stream)
        path, out = tmp_path / f"{same}.pt", tmp_path / f"{same}.safetensors"
        path.write_bytes(_as_one_dictionary(stream.getvalue()))
        loaded = torch.load(path, weights_only=True)
        assert loaded["w.weight"].tolist() == (weights if same else weights + 1).tolist()
        assert ckptool.load(path)["w.weight"].tolist() == loaded["w.weight"].tolist()
        if same:
            ckptool.convert(path, out=out)
            assert out.exists()
        else:
            with pytest.raises(Conflict, match="given twice"):
                ckptool.convert(path, out=out)
            with pytest.raises(Conflict, match="given twice"):
                ckptool.rename(path, ["w.weight => v.weight"], in_place=True)
            assert not out.exists()


def _as_one_dictionary(content: bytes) -> bytes:
    """A file of which the second key is made the first."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info).replace(b"v.weight", b"w.weight"))
    return made.getvalue()


# Archives -------------------------------------------------------------------------------------------------------------
# Archives of torch files: zips as stable-baselines3 writes them (a real one lies in fixtures/engines), tars as NeMo
# does. The judges: zipfile and tarfile, which unpack them, and torch, which loads what they unpacked.


WEIGHTS = {"fc.weight": torch.arange(6.0).reshape(2, 3), "fc.bias": torch.ones(2)}


def saved(value: Any, **how: Any) -> bytes:
    torch.save(value, buffer := io.BytesIO(), **how)
    return buffer.getvalue()


def zipped(path: Path, files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def in_tar(path: Path, files: dict[str, bytes], mode: Any = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


POLICY = {
    "data": b'{"n_steps": 8, "policy_class": {":type:": "x", ":serialized:": "gAWVOwAAAA=="}}',
    "policy.pth": saved(WEIGHTS),
    "policy.optimizer.pth": saved({"state": {}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}),
    "pytorch_variables.pth": saved({}),
    "system_info.txt": b"- OS: Linux",
}


def test_a_policy_is_one_checkpoint_of_its_files(tmp_path: Path, run: Run) -> None:
    path = zipped(tmp_path / "policy.zip", POLICY)
    found = ckptool.open(path)
    assert list(found) == list(POLICY) and found.container == "archive"
    assert found["data"]["n_steps"] == 8 and found["system_info.txt"] == "- OS: Linux"
    assert "embedded-pickles" in [note.code for note in found.notes]
    for address, out in (("#policy.pth", "a.pt"), ("", "a.safetensors"), ("#policy.pth", "b.safetensors")):
        done = run("convert", f"{path}{address}", "-o", str(tmp_path / out))
        assert done.code == 0, done
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert all(torch.equal(loaded[name], value) for name, value in WEIGHTS.items())
    assert run("diff", str(tmp_path / "a.safetensors"), str(tmp_path / "a.pt")).code == 0
    assert run("show", f"{path}#policy.pth/fc.bias").code == 0
    for verb in ("inspect", "verify", "doctor", "scan"):
        assert run(verb, str(path)).code == 0, verb


def test_files_in_folders_have_addresses(tmp_path: Path, run: Run) -> None:
    path = zipped(
        tmp_path / "run.zip", {"a/b/model.pth": saved(WEIGHTS), "a/notes.txt": b"x", "a/image.png": b"\x89\0"}
    )
    found = ckptool.open(path)
    assert list(found["a"]) == ["b", "notes.txt"]
    assert [note.code for note in found.notes] == ["other-records"] and "a/image.png" in found.notes[0].message
    assert run("convert", f"{path}#a/b/model.pth", "-o", str(tmp_path / "x.pt")).code == 0


def test_older_files_and_safetensors_are_read_in_place(tmp_path: Path) -> None:
    legacy = saved(WEIGHTS, _use_new_zipfile_serialization=False)
    path = zipped(
        tmp_path / "a.zip", {"hf/config.json": b"{}", "hf/model.safetensors": save(WEIGHTS), "old.pth": legacy}
    )
    found = ckptool.open(path)
    for state in (found["hf"]["model.safetensors"], found["old.pth"]):
        assert state["fc.weight"].bytes() == WEIGHTS["fc.weight"].numpy().tobytes()


def test_damage_to_a_file_inside_is_noticed(tmp_path: Path, run: Run) -> None:
    path = zipped(tmp_path / "policy.zip", POLICY)
    data = bytearray(path.read_bytes())
    data[data.index(WEIGHTS["fc.weight"].numpy().tobytes()) + 5] ^= 1
    path.write_bytes(data)
    done = run("verify", str(path))
    assert done.code == 1 and "fc.weight" in done.out, done


@pytest.mark.parametrize("mode", ["w:", "w:gz"])
def test_a_nemo_file(tmp_path: Path, run: Run, mode: str) -> None:
    files = {"./model_config.yaml": b"a: 1\n", "./model_weights.ckpt": saved(WEIGHTS)}
    path = in_tar(tmp_path / "model.nemo", files, mode)
    if mode == "w:gz":
        unreadable(path, Unsupported, "gzip", "gzip -dc")
        return
    found = ckptool.open(path)
    assert found["model_config.yaml"] == "a: 1\n"
    done = run("convert", str(path), "-o", str(tmp_path / "a.safetensors"))
    assert done.code == 0 and run("verify", str(path)).code == 0, done
    rows = json.loads(run("scan", str(tmp_path), "--json").out)["files"]
    assert [Path(row["path"]).name for row in rows] == ["a.safetensors", "model.nemo"]
    path.write_bytes(path.read_bytes() + b"more" * 128)
    unreadable(path, Ambiguous, "after its end")


def test_a_folder_of_dcp_inside_is_said(tmp_path: Path) -> None:
    path = in_tar(tmp_path / "m.nemo", {"./model_weights/__0_0.distcp": b"x", "./model_weights/.metadata": b"y"}, "w:")
    unreadable(path, Unsupported, "a folder of torch.distributed", "tar xkf")


def test_links_in_a_tar_are_said(tmp_path: Path) -> None:
    path = in_tar(tmp_path / "m.nemo", {"model_weights.ckpt": saved(WEIGHTS)}, "w:")
    with tarfile.open(path, "a") as archive:
        info = tarfile.TarInfo("x")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    unreadable(path, Unsupported, "a symbolic link")


# Hidden contents ---------------------------------------------------------------------------------------------------


def hostile_zip(path: Path, names: list[str]) -> Path:
    """A zip of equal torch files under these names, which may repeat."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, saved(WEIGHTS))
    return path


@pytest.mark.filterwarnings("ignore:Duplicate name")
@looped(
    ("names", "kind"),
    [
        (["a.pth", "a.pth"], Ambiguous),
        (["a.pth", "A.pth"], Ambiguous),
        (["a.pth", "./a.pth"], CkptoolError),
        (["a.pth", "a.pth/b.pth"], Ambiguous),
        (["../a.pth", "b.pth"], Corrupt),
        (["a/../../b.pth", "b.pth"], Corrupt),
        (["/etc/a.pth", "b.pth"], Corrupt),
        (["a//b.pth"], Corrupt),
        (["a.pth", "/".join("a" * 30_000) + ".pth"], LimitExceeded),  # each folder would be looked up by its whole name
        (["C:a.pth"], Corrupt),
        (["policy.pth", "archive/data.pkl"], Ambiguous),
        (["policy.pth", "archive/DATA.pkl"], Ambiguous),
        (["archive/data.pkl", "policy.pth"], CkptoolError),
        (["policy.pth", "code/constants.pkl"], CkptoolError),
    ],
)
def test_a_zip_that_could_be_read_in_two_ways_is_refused(
    tmp_path: Path, names: list[str], kind: type[CkptoolError]
) -> None:
    unreadable(hostile_zip(tmp_path / "h.zip", names), kind)


def test_nothing_is_inflated(tmp_path: Path) -> None:
    path = zipped(tmp_path / "b.zip", {"policy.pth": bytes(64 << 20)}, zipfile.ZIP_DEFLATED)
    unreadable(path, Unsupported, "policy.pth is compressed", "unzip")


def test_a_file_that_is_cut_or_none_is_named_with_its_place(tmp_path: Path) -> None:
    unreadable(zipped(tmp_path / "a.zip", {"policy.pth": saved(WEIGHTS)[:200]}), Truncated, "policy.pth")
    unreadable(zipped(tmp_path / "b.zip", {"policy.pth": b"hello"}), Unsupported, "policy.pth", "unzip")
    unreadable(zipped(tmp_path / "c.zip", {"x.txt": b"x", "y.png": b"y"}), NotACheckpoint, "zip archive")


# In disguise ----------------------------------------------------------------------------------------------------------
# Files of other formats, and without one, that stock `torch.load` runs as pickles from their first byte.


PROGRAM = b"cposix\nmkdir\n(V%b\ntR0"
# What stands before a program: values that are dropped again.
VALUES = (b"N0", b"K\x010", b"\x8c\x01a0", b"Vtext\n0", b"I7\n0", b")0", b"}0", b"\x880", b"G\0\0\0\0\0\0\0\0000",
          b"\x95\2\0\0\0\0\0\0\0N0", b"(lp0\n0", b"\x8a\1\0010", b"C\2ab0", b"X\1\0\0\0a0")  # fmt: skip


def runs(path: Path, mark: Path, *, as_stream: bool = False) -> bool:
    """Whether stock torch runs the program of the file, in a child."""
    child = os.fork()
    if not child:
        try:
            torch.load(io.BytesIO(path.read_bytes()) if as_stream else path, weights_only=False)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return mark.exists()


def disguised(folder: Path, dice: random.Random) -> Iterator[tuple[Path, Path, bool]]:
    """Each kind: a file, what its program makes, and whether torch only runs it from a stream."""
    for number, value in enumerate(VALUES):
        mark = folder / f"ran-{number}"
        head = b"".join(dice.choices(VALUES, k=dice.randrange(3))) + value
        path = folder / f"{number}.dat"
        path.write_bytes(head + PROGRAM % os.fsencode(mark) + b".")
        yield path, mark, False
    for number in range(3):  # V takes in the header of a safetensors file
        mark = folder / f"ran-safetensors-{number}"
        data = b"\n" + b"0" + PROGRAM % os.fsencode(mark)
        data = data.ljust(-(-len(data) // 4) * 4, b"\0")
        size = 0x56 + 256 * dice.randrange(1, 4)
        table = json.dumps({"w": {"dtype": "F32", "shape": [len(data) // 4], "data_offsets": [0, len(data)]}})
        path = folder / f"{number}.bin"
        path.write_bytes(struct.pack("<Q", size) + table.encode().ljust(size) + data)
        yield path, mark, False
    os.mkdir(short := Path("/tmp") / f"ckptool-{os.getpid()}")
    path, mark = folder / "old.tar", short / "t"
    with tarfile.open(path, "w") as tar:  # the name of its first member is a program
        for name in ((PROGRAM % os.fsencode(mark)).decode(), "storages", "tensors", "pickle"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    yield path, mark, True


def test_what_torch_runs_is_said(tmp_path: Path, run: Run) -> None:
    for path, mark, as_stream in disguised(tmp_path, random.Random(4)):
        assert runs(path, mark, as_stream=as_stream), path
        mark.rmdir()
        if mark.parent != tmp_path:
            mark.parent.rmdir()
        scanned = run("scan", path)
        assert scanned.code in (1, 2) and "nothing in it" not in scanned.out, path
        with pytest.raises(CkptoolError):
            ckptool.convert(path, tmp_path / "out.safetensors")
        assert not mark.exists()


def test_beside_weights_they_are_seen_whatever_they_are_called(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    for path, _, _ in disguised(tmp_path, random.Random(5)):
        if path.suffix == ".dat":
            found = ckptool.scan(tmp_path)
            (row,) = [row for row in found.files if row.path.endswith(path.name)]
            assert row.state != "good", row
        path.unlink()
    (Path("/tmp") / f"ckptool-{os.getpid()}").rmdir()


class Caller(pickle.Unpickler):
    """Python's own machine; what a program names is found, and calling it is kept."""

    called = False

    def find_class(self, module: str, name: str) -> Any:
        def call(*_: Any, **__: Any) -> None:
            self.called = True

        return type("Named", (), {"__new__": call, "__setstate__": call})

    def persistent_load(self, pid: Any) -> Any:
        return None


class InMemory(InlineBytes):
    """A file's bytes, of its size."""

    size = InlineBytes.length


PARTS = (*VALUES, b"cos\nsystem\n", b"\x8c\2os\x8c\6system\x93", b"(ios\nsystem\n", b"\x85", b"\x94", b"q\0", b"h\0",
         b"\x8f", b"\x90", b"\x81", b"\x92", *(bytes([each]) for each in b"()Rob}suea02tQ"))  # fmt: skip


def test_a_call_that_pickle_makes_is_reached(tmp_path: Path) -> None:
    """Random programs, some with random bytes in them: none is walked without an end, and no call is overlooked."""
    dice, calls = random.Random(6), 0
    for _ in range(4000):
        parts = dice.choices(PARTS, k=dice.randrange(1, 14))
        if dice.random() < 0.3:
            parts.insert(dice.randrange(len(parts)), dice.randbytes(dice.randrange(1, 4)))
        program = b"".join(parts) + b"."
        machine = Caller(io.BytesIO(program))
        with contextlib.suppress(Exception):
            machine.load()
        calls += machine.called
        assert reaches_a_call(cast(Source, InMemory(program))) >= machine.called, program
    assert calls > 100
