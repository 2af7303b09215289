"""What is no checkpoint is named, with what to do: torch's other kinds of file."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import socket
import struct
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import ckptool
from ckptool.cli import main
from ckptool.errors import (
    BrokenLink,
    CkptoolError,
    Corrupt,
    FileMissing,
    FileProblem,
    NotACheckpoint,
    Truncated,
    Unsupported,
    UsageError,
)
from ckptool.formats import read
from tests.support.errors import unreadable
from tests.support.files import torch_bytes, written
from tests.support.looped import looped
from tests.support.zips import with_record

CHECKPOINT = torch_bytes({"weight": torch.ones(2)})


def test_an_empty_file_is_truncated(tmp_path: Path) -> None:
    unreadable(written(b"", tmp_path / "model.pt"), Truncated, "is empty (0 bytes)")


@pytest.mark.parametrize(
    "data", [b"P", b"PK\x03", b"\x80", b"\x80\x02", b"\x80\x02}", b"abc", b"\x01", b"\xff\xfe\xfd", b"\n"]
)
def test_a_few_bytes_are_no_checkpoint(data: bytes, tmp_path: Path) -> None:
    path = written(data, tmp_path / "model.pt")
    with pytest.raises((NotACheckpoint, Truncated, Corrupt)) as caught:
        read(path)
    assert type(caught.value) is NotACheckpoint or data[:1] == b"\x80"


@pytest.mark.parametrize("size", [1, 3, 100, 5_000, 3 << 20])
def test_a_file_of_zeros_was_never_written(size: int, tmp_path: Path) -> None:
    error = unreadable(written(bytes(size), tmp_path / "model.pt"), Corrupt, "zero", "never written")
    assert f"{min(size, 1 << 20):,}" in error.what and f"{size:,}" in error.what


def test_zeros_at_the_start_are_counted(tmp_path: Path) -> None:
    unreadable(
        written(bytes(4096) + CHECKPOINT[4096:] + b"x", tmp_path / "model.pt"), Corrupt, "the first 4,096 of its"
    )


def test_a_git_lfs_pointer_says_how_to_fetch_the_file(tmp_path: Path) -> None:
    oid = "sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
    pointer = f"version https://git-lfs.github.com/spec/v1\noid {oid}\nsize 12345\n".encode()
    for data in (pointer, pointer.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + pointer):
        unreadable(written(data, tmp_path / "model.pt"), NotACheckpoint, "git-lfs", oid, "size 12345", "git lfs pull")


@pytest.mark.parametrize(
    "start", ["<!DOCTYPE html>", "<html>", "  \n<HTML lang='en'>", "<?xml version='1.0'?>", "<Error><Code>AccessDenied"]
)
def test_a_web_page_says_that_a_login_is_likely(start: str, tmp_path: Path) -> None:
    unreadable(
        written(f"{start}<title>Sign in</title>".encode(), tmp_path / "model.pt"), NotACheckpoint, "web page", "login"
    )


def test_a_servers_answer_is_quoted_escaped(tmp_path: Path) -> None:
    answer = json.dumps({"error": "Repository not found \x1b[31m"}).encode()
    unreadable(
        written(answer, tmp_path / "model.bin"), NotACheckpoint, "server's answer: Repository not found", "Download"
    )


def test_a_configuration_points_to_the_model_beside_it(tmp_path: Path) -> None:
    config = written(json.dumps({"architectures": ["Bert"]}, indent=2).encode(), tmp_path / "config.json")
    unreadable(config, NotACheckpoint, "JSON", "there is none")
    written(CHECKPOINT, tmp_path / "my model.bin")
    error = unreadable(config, NotACheckpoint, "JSON", "my model.bin")
    assert f"'{tmp_path}/my model.bin'" in error.fix


def test_other_json_is_named_as_such(tmp_path: Path) -> None:
    for data in (b"[1, 2, 3]", b'{"a": NaN}', b"{", b"{}", b"[" * 400):
        unreadable(written(data, tmp_path / "model.json"), NotACheckpoint, "JSON")


def zstd(data: bytes) -> bytes:
    """One raw block: enough of the format for the program to unpack it."""
    return b"\x28\xb5\x2f\xfd\x20" + bytes([len(data)]) + struct.pack("<I", len(data) << 3 | 1)[:3] + data


WRAPPED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "gzip": (gzip.compress, ".gz"),
    "bzip2": (bz2.compress, ".bz2"),
    "xz": (lzma.compress, ".xz"),
    "zstd": (lambda data: zstd(data[:200]), ".zst"),
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("suffixed", [True, False])
def test_a_compressed_file_says_how_to_decompress_it(name: str, suffixed: bool, tmp_path: Path) -> None:
    compress, suffix = WRAPPED[name]
    path = written(compress(CHECKPOINT), tmp_path / f"my model.pt{suffix if suffixed else ''}")
    error = unreadable(path, Unsupported, f"compressed with {name}")
    command = error.fix.partition(": ")[2]
    assert command.startswith(f"{name} -dc ")
    if name == "gzip":  # the command works as it stands
        subprocess.run(command, shell=True, check=True)
        out = tmp_path / ("my model.pt" if suffixed else "my model.pt.unpacked")
        assert out.read_bytes() == CHECKPOINT


@pytest.mark.parametrize(("magic", "name"), [(b"7z\xbc\xaf\x27\x1c\0\x04", "7-Zip"), (b"Rar!\x1a\x07\x01\0", "RAR")])
def test_other_archives_are_named_and_warned_of(magic: bytes, name: str, tmp_path: Path) -> None:
    unreadable(written(magic + bytes(100), tmp_path / "model.pt"), Unsupported, name, "scanners")


def varint_text(field: int, text: bytes) -> bytes:
    return bytes([field << 3 | 2, len(text)]) + text


OTHER_MODELS = {
    "GGUF": b"GGUF\x03\0\0\0" + bytes(16),
    "GGML": b"tjgg\x03\0\0\0" + bytes(16),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "ONNX": b"\x08\x08" + varint_text(2, b"pytorch") + varint_text(3, b"2.13.0") + b"\x3a\x80\x01\x0a",
    "SavedModel": b"\x08\x01\x12\xb4\x0a\x0a\x20" + bytes(60),
    "TensorFlow graph": varint_text(1, varint_text(1, b"input") + varint_text(2, b"Placeholder")),
    "TensorFlow checkpoint": bytes(100) + b"\x01" * 40 + bytes.fromhex("57fb808b247547db"),
    "TensorFlow Lite": b"\x1c\0\0\0TFL3" + bytes(40),
    "ExecuTorch": b"\x38\0\0\0ET12" + bytes(40),
    "MXNet": struct.pack("<QQ", 0x112, 0) + bytes(20),
    "preview archive": b"PYTORCH1" + bytes(56),
    "object of Lua Torch": struct.pack("<iii", 4, 1, 3) + b"V 1" + struct.pack("<i", 14) + b"nn.Sequential\0",
    "table of Lua Torch": struct.pack("<iii", 3, 1, 2) + bytes(20),
    "spaCy": b"\x84\xa5nodes\xdc\0\x10" + bytes(20),
    "Flax": b"\x81\xa6params\x82\xa6kernel" + bytes(20),
    "TVM": struct.pack("<QQQ", 0xF7E58D4F05049CB7, 0, 1) + bytes(20),
    "fastText": struct.pack("<ii", 793712314, 12) + bytes(20),
    "Core ML": struct.pack("<II", 1, 2).ljust(64, b"\0") + struct.pack("<II", 0xDEADBEEF, 1) + bytes(60),
    "fairseq or Megatron": b"MMIDIDX\0\0" + bytes(20),
    "tar archive": b"",
}


def plain_tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("model/weights.bin")
        info.size = 4
        archive.addfile(info, io.BytesIO(b"abcd"))
    return out.getvalue()


@looped("name", OTHER_MODELS)
def test_models_of_other_programs_are_named(name: str, tmp_path: Path) -> None:
    data = OTHER_MODELS[name] or plain_tar()
    if name == "TensorFlow checkpoint":
        data = b"\0\x05" + data[2:]
    unreadable(written(data, tmp_path / "model.pth"), Unsupported, name)


def test_the_data_of_a_data_set_is_told_by_the_index_beside_it(tmp_path: Path) -> None:
    (tmp_path / "train.idx").write_bytes(b"MMIDIDX\0\0")
    unreadable(written(bytes([1, 200]) * 20, tmp_path / "train.bin"), Unsupported, "fairseq or Megatron")


def test_npz_and_npy_files_are_read(tmp_path: Path) -> None:
    numpy.save(tmp_path / "a.npy", numpy.arange(3))
    numpy.savez(tmp_path / "a.npz", x=numpy.arange(3))
    assert {read(tmp_path / name).container for name in ("a.npy", "a.npz")} == {"npy", "npz"}


def test_onnx_as_torch_writes_it_is_named(tmp_path: Path) -> None:
    # the first bytes of torch.onnx.export
    header = b"\x08\x07\x12\x07pytorch\x1a\x031.9:\xba\x01\n\x16\n\x07input.1\x12\x016"
    unreadable(written(header + bytes(200), tmp_path / "model.onnx"), Unsupported, "ONNX")


@pytest.mark.parametrize(
    ("magic", "name"),
    [
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"\x7fELF\x02\x01", "ELF"),
        (b"%PDF-1.7", "PDF"),
        (b"\xff\xd8\xff\xe0", "JPEG"),
        (b"MZ\x90\0", "Windows"),
    ],
)
def test_other_files_are_named_whatever_their_suffix(magic: bytes, name: str, tmp_path: Path) -> None:
    unreadable(written(magic + bytes(200), tmp_path / "model.pt"), NotACheckpoint, name, "whatever its name says")


def zipped(path: Path, names: list[str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"{}")
    return path


@pytest.mark.parametrize(
    ("names", "word"),
    [
        (["[Content_Types].xml", "word/document.xml"], "Office document"),
        (["META-INF/MANIFEST.MF", "a/B.class"], "Java archive"),
        (["metadata.json", "config.json", "model.weights.h5"], "Keras"),
        (["mimetype", "content.xml"], "document"),
        (["photo.jpg"], "zip archive"),
    ],
)
def test_an_ordinary_zip_is_no_checkpoint(names: list[str], word: str, tmp_path: Path) -> None:
    error = unreadable(zipped(tmp_path / "my model.pt", names), NotACheckpoint, word, "not a PyTorch checkpoint")
    assert f"'{tmp_path}/my model.pt'" in error.fix


def test_a_torchserve_archive_says_which_file_to_unzip(tmp_path: Path) -> None:
    path = zipped(tmp_path / "model.mar", ["MAR-INF/MANIFEST.json", "resnet.pth", "handler.py"])
    unreadable(path, Unsupported, "TorchServe", "resnet.pth", "unzip")


def test_the_first_torchscript_format_is_unsupported(tmp_path: Path) -> None:
    unreadable(zipped(tmp_path / "model.pt", ["m/model.json", "m/tensors/0", "m/version"]), Unsupported, "model.json")


class Simple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)  # type: ignore[no-any-return]


@pytest.mark.soak  # six seconds, of which torch takes all
@pytest.mark.filterwarnings("ignore")
def test_a_torch_export_program_is_unsupported(tmp_path: Path) -> None:
    program = torch.export.export(Simple(), (torch.ones(1, 3),))
    torch.export.save(program, str(tmp_path / "model.pt2"))
    unreadable(tmp_path / "model.pt2", Unsupported, "torch.export", ".state_dict")


NEW_EXPORT = (
    "data/weights/weight_0 models/model.json data/sample_inputs/model.pt archive_format archive_version byteorder"
    " .data/version"
)
OLD_EXPORT = "serialized_exported_program.json serialized_state_dict.pt serialized_constants.pt version"


@pytest.mark.parametrize(
    "names", [[f"m/{name}" for name in NEW_EXPORT.split()], OLD_EXPORT.split()], ids=["new", "old"]
)
def test_every_layout_of_torch_export_is_recognized(names: list[str], tmp_path: Path) -> None:
    unreadable(zipped(tmp_path / "model.pt2", names), Unsupported, "torch.export", ".state_dict")


@pytest.mark.filterwarnings("ignore")
def test_a_torch_package_is_unsupported(tmp_path: Path) -> None:
    from torch.package import PackageExporter

    with PackageExporter(str(tmp_path / "model.pt")) as package:
        package.extern("**")
        package.save_pickle("weights", "model.pkl", {"weight": torch.ones(2)})
    unreadable(tmp_path / "model.pt", Unsupported, "torch.package", "source code")
    named = with_record(tmp_path / "model.pt", tmp_path / "named.pt", "model/data.pkl", b"\x80\x02}.")
    unreadable(named, Unsupported, "torch.package")


def test_pipes_sockets_and_devices_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for path in (tmp_path / "fifo", tmp_path / "socket", Path("/dev/zero"), Path("/dev/null")):
            unreadable(path, UsageError, "not a regular file")


def test_a_terminal_is_refused() -> None:
    master, slave = os.openpty()
    try:
        unreadable(Path(os.ttyname(slave)), UsageError, "not a regular file")
    finally:
        os.close(master)
        os.close(slave)


def test_links_that_loop_or_dangle_and_impossible_names_are_told(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    unreadable(tmp_path / "loop", FileProblem, "leads to itself")
    unreadable(tmp_path / "dangling", BrokenLink, "it is a link to", "is not there")
    unreadable(tmp_path / "no\nsuch\x1b[31m.pt", FileMissing, r"no\nsuch\x1b[31m.pt")
    unreadable(tmp_path / ("x" * 300), FileProblem, "longer than this file system")
    unreadable(Path(f"{tmp_path}/nul\0l"), FileProblem)
    path = written(CHECKPOINT, tmp_path / "with\nnewline \x1b[0m.pt")
    assert "\x1b" not in str(ckptool.inspect(path)) and r"with\nnewline \x1b[0m.pt" in str(ckptool.inspect(path))


def test_a_right_magic_with_a_wrong_sequel_is_refused(tmp_path: Path) -> None:
    legacy = torch_bytes({"weight": torch.ones(2)}, _use_new_zipfile_serialization=False)
    noise = numpy.random.default_rng(0).bytes(2000)
    for data in (
        b"PK\x03\x04" + noise,
        b"PK\x03\x04",
        b"PK\x05\x06" + noise,
        legacy[:15],
        legacy[:14] + noise,
        b"\x80\x02" + noise,
        b"PYTORCH1",
        b"\x93NUMPY" + noise,
        b"\x93NUMPY",
        struct.pack("<Q", 100) + b"{" + noise,
    ):
        with pytest.raises(CkptoolError):
            read(written(data, tmp_path / "model.pt"))


def test_a_pickle_of_an_unknown_protocol_is_refused(tmp_path: Path) -> None:
    unreadable(written(b"\x80\x2a}.", tmp_path / "model.pkl"), Unsupported, "unknown protocol 42")
    unreadable(written(b"\x80\x2a}x", tmp_path / "model.pkl"), NotACheckpoint, "80 2a 7d")


def test_random_starts_never_reach_a_traceback(tmp_path: Path) -> None:
    chance = numpy.random.default_rng(1)
    starts = [value for value in OTHER_MODELS.values() if value] + [
        CHECKPOINT[:64],
        plain_tar()[:300],
        b"{",
        b"\x80\x02",
        b"<",
    ]
    for n in range(400):
        data = starts[n % len(starts)][: int(chance.integers(1, 64))] + chance.bytes(int(chance.integers(0, 600)))
        try:
            read(written(data, tmp_path / "model.pt"))
        except CkptoolError as error:
            assert error.what and "\x1b" not in str(error)


@pytest.mark.parametrize("name", ["gzip", "ONNX", "html", "zeros"])
def test_the_command_line_says_it_and_exits_with_two(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"gzip": gzip.compress(b"x"), "ONNX": OTHER_MODELS["ONNX"], "html": b"<html>", "zeros": bytes(9)}[name]
    assert main(["inspect", str(written(data, tmp_path / "model.pt"))]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error[") and "Traceback" not in err
