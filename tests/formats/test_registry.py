"""One line for each container, with every fact about it; its code is imported when the first bytes ask for it."""

from __future__ import annotations

import base64
import gc
import io
import itertools
import json
import os
import subprocess
import tarfile
import warnings
import weakref
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch

import ckptool
from ckptool.checkpoint import Checkpoint, Computed, Storage, TensorEntry
from ckptool.checkpoint.blocks import Deferred
from ckptool.checkpoint.dtypes import by_name
from ckptool.errors import CkptoolError, Corrupt, NotACheckpoint, Truncated, Unsupported
from ckptool.formats import FORMATS, WRITERS, Format, read
from ckptool.formats.unrecognized import OtherProgram
from fixtures import make_old
from tests.support.cli import Run
from tests.support.errors import unreadable
from tests.support.files import torch_bytes, written
from tests.support.looped import looped
from tests.support.same import assert_same_tree
from tests.support.small_models import OTHER_MODELS


@looped("container", FORMATS, ids=lambda container: container.name)
def test_a_line_agrees_with_its_module(container: Format) -> None:
    code = import_module(f"ckptool.formats.{container.module}")
    is_another = container.name == "deepspeed-universal"  # of the folders that `deepspeed` reads
    assert is_another or container.name == code.NAME
    never = Format("", "").begins  # of what another format finds in its folder or file
    is_asked = (container.is_folder and container.holds != never.decode()) or container.endings
    is_asked = is_asked or container.begins != never
    assert callable(code.read) and (is_another or is_asked or not hasattr(code, "detect"))
    assert container.writable == hasattr(code, "write") and container.appendable == hasattr(code, "append")
    assert bool(container.suffixes) <= container.writable


class Zeros:
    """The bytes of a tensor, to which a weak reference can be had."""

    def __call__(self, offset: int, length: int) -> bytes:
        return bytes(length)


@pytest.mark.parametrize("container", WRITERS, ids=lambda container: container.name)
def test_a_plan_that_was_carried_out_holds_nothing(container: Format) -> None:
    """Else what was saved stays in memory until garbage is collected, which `Run` does not wait for."""
    values = Zeros()
    held = weakref.ref(values)
    entry = TensorEntry(Storage(Computed(64, values)), by_name("f32"), (4, 4), (4, 1))
    checkpoint = Checkpoint({"a": entry}, container.name, tensors_only=container.tensors_only)
    del values, entry
    gc.disable()
    try:
        plan = container.write(checkpoint)
        del checkpoint
        made = [[part.make() if isinstance(part, Deferred) else part for part in file] for file in plan.files.values()]
        assert sum(map(len, made)) and held() is not None
        del plan, made
        assert held() is None
    finally:
        gc.enable()


# Versions -------------------------------------------------------------------------------------------------------------


FIXTURES = Path(make_old.__file__).parent / "versions"
OLD = ("1.13", "2.0", "2.4")
KINDS = {"": "torch-zip", "-legacy": "torch-legacy", "-script": "torchscript"}


@pytest.fixture(scope="module")
def now(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same files by the torch of the tests."""
    folder = tmp_path_factory.mktemp("now")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_old.write_versions(folder, "now")
    return folder


@pytest.mark.parametrize("version", OLD)
@pytest.mark.parametrize("kind", KINDS)
def test_every_version_reads_alike(version: str, kind: str, now: Path) -> None:
    old, new = read(FIXTURES / f"torch-{version}{kind}.pt"), read(now / f"torch-now{kind}.pt")
    assert old.container == new.container == KINDS[kind]
    assert_same_tree(names_of(old.tree), names_of(new.tree))


def names_of(tree: dict[str, object]) -> object:
    """The tree; of a program only the state dict: which attributes its modules have differs from version to version."""
    return tree["state_dict"] if set(tree) == {"state_dict", "attributes"} else tree


# No checkpoint --------------------------------------------------------------------------------------------------------
# What is no checkpoint is named, with what to do: torch's other kinds of file.


CHECKPOINT = torch_bytes({"weight": torch.ones(2)})


def plain_tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("model/weights.bin")
        info.size = 4
        archive.addfile(info, io.BytesIO(b"abcd"))
    return out.getvalue()


def zipped(names: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in names.split():
            archive.writestr(name, b"{}")
    return out.getvalue()


OID = "sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
POINTER = f"version https://git-lfs.github.com/spec/v1\noid {OID}\nsize 12345\n".encode()
PAGES = b"<!DOCTYPE html>,<html>,  \n<HTML lang='en'>,<?xml version='1.0'?>,<Error><Code>AccessDenied".split(b",")
# What a file is told to be by its first bytes, and words of that.
TOLD: list[tuple[bytes, type[CkptoolError], tuple[str, ...]]] = [
    (b"", Truncated, ("is empty (0 bytes)",)),
    *((data, NotACheckpoint, ()) for data in (b"P", b"PK\x03", b"abc", b"\x01", b"\xff\xfe\xfd", b"\n")),
    *((bytes(size), Corrupt, (f"{min(size, 1 << 20):,}", f"{size:,}", "zero", "never written"))
        for size in (1, 3, 100, 5_000, 3 << 20)),
    (bytes(4096) + CHECKPOINT[4096:] + b"x", Corrupt, ("the first 4,096 of its",)),
    *((data, NotACheckpoint, ("git-lfs", OID, "size 12345", "git lfs pull"))
        for data in (POINTER, POINTER.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + POINTER)),
    *((page + b"<title>Sign in</title>", NotACheckpoint, ("web page", "login")) for page in PAGES),
    (json.dumps({"error": "Repository not found \x1b[31m"}).encode(), NotACheckpoint,
        ("server's answer: Repository not found", "Download")),
    *((data, NotACheckpoint, ("JSON",)) for data in (b"[1, 2, 3]", b'{"a": NaN}', b"{", b"{}", b"[" * 400)),
    (b"7z\xbc\xaf\x27\x1c\0\x04" + bytes(100), Unsupported, ("7-Zip", "scanners")),
    (b"Rar!\x1a\x07\x01\0" + bytes(100), Unsupported, ("RAR", "scanners")),
    *((data, OtherProgram, (name,)) for name, data in OTHER_MODELS.items()),
    (plain_tar(), Unsupported, ("tar archive", "tar tf")),
    # the first bytes of torch.onnx.export
    (b"\x08\x07\x12\x07pytorch\x1a\x031.9:\xba\x01\n\x16\n\x07input.1\x12\x016" + bytes(200), OtherProgram, ("ONNX",)),
    *((magic + bytes(200), NotACheckpoint, (name, "whatever its name says")) for magic, name in (
        (b"\x89PNG\r\n\x1a\n", "PNG"), (b"\x7fELF\x02\x01", "ELF"), (b"%PDF-1.7", "PDF"),
        (b"\xff\xd8\xff\xe0", "JPEG"), (b"MZ\x90\0", "Windows"))),
    *((zipped(names), NotACheckpoint, (word, "not a PyTorch checkpoint")) for names, word in (
        ("[Content_Types].xml word/document.xml", "Office document"), ("mimetype content.xml", "document"),
        ("META-INF/MANIFEST.MF a/B.class", "Java archive"), ("metadata.json config.json model.weights.h5", "Keras"),
        ("photo.jpg", "zip archive"))),
    (zipped("MAR-INF/MANIFEST.json resnet.pth handler.py"), Unsupported, ("TorchServe", "resnet.pth", "unzip")),
    (zipped("m/model.json m/tensors/0 m/version"), Unsupported, ("model.json",)),
    (b"\x80\x2a}.", Unsupported, ("unknown protocol 42",)),
    (b"\x80\x2a}x", NotACheckpoint, ("80 2a 7d",)),
]  # fmt: skip


@looped(("data", "kind", "words"), TOLD)
def test_what_is_no_checkpoint_is_named(data: bytes, kind: type[CkptoolError], words: Any, tmp_path: Path) -> None:
    path = written(data, tmp_path / "my model.pt")
    error = unreadable(path, kind, *words)
    if data[:2] == b"PK" and kind is NotACheckpoint and len(data) > 3:
        assert f"'{path}'" in error.fix


def test_models_beside_what_describes_them_are_told(tmp_path: Path) -> None:
    described = {"openvino_model.xml": "OpenVINO", "upscaler.param": "ncnn", "train.idx": "fairseq or Megatron"}
    for name, what in described.items():
        (tmp_path / name).touch()
        unreadable(written(bytes([1, 200]) * 20, (tmp_path / name).with_suffix(".bin")), OtherProgram, what)


def test_what_a_failed_save_leaves_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step_200.pt"
    with pytest.raises(AttributeError):  # torch closes the file as if it were whole
        torch.save({"model": torch.ones(2), "hook": lambda: None}, path)
    unreadable(path, Corrupt, "torch.save without a value", "cannot be pickled", "earlier checkpoint")
    torch.save({"model": torch.ones(2)}, tmp_path / "step_100.pt")
    assert ckptool.scan(tmp_path).latest_good == str(tmp_path / "step_100.pt")


@looped(
    ("form", "how"), itertools.product([torch_bytes, safetensors.torch.save], [base64.b64encode, base64.encodebytes])
)
def test_what_is_in_base64_is_told_and_a_shell_decodes_it(form: Any, how: Any, tmp_path: Path) -> None:
    data = form(torch.nn.Linear(64, 16).state_dict())
    file = written(how(data), tmp_path / "a file.pt")
    (found,) = ckptool.doctor(file).findings
    (fix,) = found.fixes
    subprocess.run(["sh", "-c", str(fix)], check=True, cwd=tmp_path)
    (out,) = (path for path in tmp_path.iterdir() if path != file)
    assert out.read_bytes() == data


def test_names_in_other_letters_are_no_sign_of_that(tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("é" * 300))
    for data in (out.getvalue(), safetensors.torch.save({"ü" * 50: torch.zeros(9)})[:-4]):
        assert "read as text" not in ckptool.doctor(written(data, tmp_path / "a.pt")).findings[0].what


def test_random_starts_never_reach_a_traceback(tmp_path: Path) -> None:
    chance = numpy.random.default_rng(1)
    starts = [*OTHER_MODELS.values(), CHECKPOINT[:64], plain_tar()[:300], b"{", b"\x80\x02", b"<"]
    for n in range(400):
        data = starts[n % len(starts)][: int(chance.integers(1, 64))] + chance.bytes(int(chance.integers(0, 600)))
        try:
            read(written(data, tmp_path / "model.pt"))
        except CkptoolError as error:
            assert error.what and "\x1b" not in str(error)


def test_no_command_is_told_for_packed_bytes_without_a_name() -> None:
    """Only what lies in a file can be given to `gzip` or `7z`."""
    for packed in (b"\x1f\x8b" + bytes(30), b"\xfd7zXZ\x00" + bytes(30), b"7z\xbc\xaf\x27\x1c" + bytes(30)):
        with pytest.raises(Unsupported) as raised:
            ckptool.open(io.BytesIO(packed))
        assert str(raised.value.fix) == "Unpack it first." and ">" not in str(raised.value.why)


@pytest.mark.parametrize(
    ("name", "what"), [("checkpoint_metadata.json", "nanotron"), (".snapshot_metadata", "snapshot")]
)
def test_folders_of_other_programs_are_named(name: str, what: str, tmp_path: Path, run: Run) -> None:
    (tmp_path / name).write_text("{}")
    told = run("inspect", str(tmp_path))
    assert told.code == 2 and "error[unsupported]" in told.err and what in told.err, told


def test_the_only_file_in_a_folder_is_named(tmp_path: Path, run: Run) -> None:
    torch.save({"model": {"a.weight": torch.ones(2)}}, tmp_path / "lit_model.pth")
    assert f"inspect {tmp_path}/lit_model.pth" in run("inspect", str(tmp_path)).err
    (tmp_path / "critic").mkdir()
    assert f"scan {tmp_path}" in run("inspect", str(tmp_path)).err


def test_a_model_in_the_cache_of_the_hub_is_named_with_a_revision(tmp_path: Path, run: Run) -> None:
    model = tmp_path / "models--org--m"
    for revision in ("abc", "def"):
        (model / "snapshots" / revision).mkdir(parents=True)
        written(safetensors.torch.save({"w": torch.ones(2)}), model / "snapshots" / revision / "model.safetensors")
    (model / "refs").mkdir()
    assert f"a revision of the model: ckptool inspect {model}/snapshots/def" in run("inspect", str(model)).err


# Long folders ---------------------------------------------------------------------------------------------------------
# A checkpoint is opened, changed and written without listing its folder, where there may be ten thousand others. (Bare
# weights may be one of several shards: the index is looked for, once.)


WORK: dict[str, Callable[[Path, Path], Any]] = {
    "inspect": lambda file, out: ckptool.inspect(file),
    "verify": lambda file, out: ckptool.verify(file),
    "doctor": lambda file, out: ckptool.doctor(file),
    "diff": lambda file, out: ckptool.diff(file, file),
    "spec": lambda file, out: ckptool.spec(file),
    "strip-module": lambda file, out: ckptool.strip_module(file, out),
    "cast": lambda file, out: ckptool.cast(file, out, dtype="bf16"),
    "convert": lambda file, out: ckptool.convert(file, out.with_suffix(".safetensors")),
    "average": lambda file, out: ckptool.average([file, file], out),
}


@pytest.mark.parametrize("verb", WORK)
def test_the_folder_of_a_file_is_not_listed(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "many").mkdir()
    torch.save({"state_dict": {"module.fc.weight": torch.ones(2, 2)}, "epoch": 3}, folder / "step_7.pt")
    listed, scan, list_names = list[str](), os.scandir, os.listdir
    monkeypatch.setattr(os, "scandir", lambda path=".": listed.append(str(path)) or scan(path))
    monkeypatch.setattr(os, "listdir", lambda path=".": listed.append(str(path)) or list_names(path))
    WORK[verb](folder / "step_7.pt", tmp_path / "out.pt")
    assert str(folder) not in listed
