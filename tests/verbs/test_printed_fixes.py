"""For every code of a note, and of an error that names a command: the command is printed, a shell reads it, and it
runs."""

from __future__ import annotations

import ast
import json
import os
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptool
from ckptool.analysis.findings import Chain
from ckptool.errors import CkptoolError, Text
from fixtures import lab
from fixtures.make import make
from fixtures.torch_tar import save_tar
from tests.support.engine_cases import ROOT
from tests.support.lab_trial import run_line
from tests.support.looped import looped

SOURCE = Path(ckptool.__file__).parent


def zipped(path: Path, name: str, content: bytes = b"x" * 200_000, mode: int = 0) -> None:
    """A torch zip with one more record."""
    torch.save(lab.state(), path)
    with zipfile.ZipFile(path, "a") as archive:
        entry = zipfile.ZipInfo(name)
        entry.create_system, entry.external_attr = 3, mode << 16
        archive.writestr(entry, content)


def legacy(path: Path, more: bytes = b"") -> None:
    torch.save(lab.state(), path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes() + more)


def edited(path: Path) -> None:
    torch.save(lab.prefixed("module."), path)
    ckptool.strip_module(path, in_place=True)


def with_unknown_field(path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "more": 1}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))


def quantized(path: Path) -> None:
    torch.save({"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(1)}, path)


def frozen(path: Path) -> None:
    torch.jit.freeze(torch.jit.script(lab.model().eval())).save(str(path))


def tar(path: Path) -> None:
    save_tar(dict(lab.state()), path)
    path.write_bytes(path.read_bytes() + bytes(511) + b"x")


def numpy_pickle(path: Path) -> None:
    lab.SPECIMENS["detectron2.pkl"].make(path)


NOTES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "prefix-module": ("a.pt", lab.SPECIMENS["dp.pt"].make),
    "prefix-compiled": ("a.pt", lab.SPECIMENS["compiled.pt"].make),
    "cuda-location": ("a.pt", lab.SPECIMENS["on_cuda0.pt"].make),
    "device-location": ("a.pt", lab.SPECIMENS["on_mps.pt"].make),
    "wasted-storage": ("a.pt", lab.SPECIMENS["healthy_whole_storage.pt"].make),
    "pickle-protocol": ("a.pt", lab.SPECIMENS["protocol4.pt"].make),
    "big-endian": ("big_endian.pt", lambda path: make("big_endian.pt", path.parent)),
    "deflated": ("rezipped_deflated.pt", lambda path: make("rezipped_deflated.pt", path.parent)),
    "no-checksums": ("a.pt", legacy),
    "trailing-bytes": ("a.pt", lambda path: legacy(path, b"123456")),
    "trailing-bytes of a tar": ("a.pt", tar),
    "unused-record": ("a.pt", lambda path: zipped(path, "a/data/99")),
    "symlink-records": ("a.pt", lambda path: zipped(path, "a/link", b"x", 0o120777)),
    "superseded-pickle": ("a.pt", edited),
    "unknown-fields": ("a.safetensors", with_unknown_field),
    "numpy-weights": ("a.pkl", numpy_pickle),
    "quantized": ("a.pt", quantized),
    "torchscript": ("a.jit", lab.SPECIMENS["script.pt"].make),
    "no-state-dict": ("a.jit", frozen),
    "pieces-not-read": ("a", lambda path: shutil.copytree(ROOT / "hf-consolidated" / "checkpoint", path)),
}
# Made by hand in the tests of what they are about: a nested class in an old pickle, a part of a checkpoint; of `verify`
# and `convert`.
ELSEWHERE = {"nested-name", "unused-bytes", "part", "recover", "whole-module"}


def codes_with_commands() -> set[str]:
    """The codes of all notes in the program that come with a command."""
    found: set[str] = set()
    for text in (path.read_text() for path in SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(text)) if "Note(" in text else ():
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "Note"
                and len(node.args) > 2
            ):
                found |= {part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)}
    return {code for code in found if isinstance(code, str) and code != "cuda"}


def test_every_note_with_a_command_is_tried() -> None:
    assert codes_with_commands() - ELSEWHERE <= set(NOTES)


@pytest.mark.filterwarnings("ignore")
@looped("code", NOTES)
def test_the_commands_of_a_note_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (name, write), code = NOTES[code], code.partition(" ")[0]
    write(Path(name).absolute())
    notes = ckptool.inspect(name).notes
    fixes = {note.code: note.fix for note in notes if note.fix}
    if code not in fixes:  # another note has the very command
        assert code in {note.code for note in notes}
    assert fixes and all(run_line(str(fix)) == 0 for fix in fixes.values()), fixes
    outputs = [fix[fix.index("-o") + 1] for fix in fixes.values() if "-o" in fix]
    if outputs and code not in ("numpy-weights", "no-checksums"):
        assert code not in {note.code for note in ckptool.inspect(outputs[-1]).notes}


# Errors --------------------------------------------------------------------------------------------------------------


def two_models(folder: Path) -> str:
    torch.save({"G": lab.state(), "D": lab.state()}, folder / "it's.pt")
    return "it's.pt"


def file_of(name: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        lab.make(name, folder)
        return name

    return write


def no_weights(folder: Path) -> str:
    torch.save({"epoch": [1, 2]}, folder / "two words.pt")
    return "two words.pt"


def arrays(folder: Path) -> str:
    np.savez(folder / "a.npz", a=np.zeros(2))
    torch.save({"model": {"a.weight": np.zeros(2)}}, folder / "arrays.pt")
    return "arrays.pt"


def cut(folder: Path) -> str:
    torch.save(lab.state(), folder / "cut.pt")
    os.truncate(folder / "cut.pt", (folder / "cut.pt").stat().st_size - 30)
    return "cut.pt"


def whole(folder: Path) -> str:
    torch.save(lab.model(), folder / "whole.pt")
    return "whole.pt"


ERRORS: list[tuple[str, Callable[[Path], str], Callable[[str], Any]]] = [
    ("usage", no_weights, lambda file: ckptool.strip_module(file, "o.pt")),
    ("usage", arrays, lambda file: ckptool.strip_module(file, "o.pt")),
    ("usage", whole, lambda file: ckptool.strip_module(file, "o.pt")),
    ("unsafe-global", whole, lambda file: ckptool.load(file)),
    ("truncated", cut, ckptool.inspect),
    ("truncated", file_of("cut.safetensors"), ckptool.inspect),
    ("unsupported", file_of("compressed.pt.gz"), ckptool.inspect),
    ("not-a-checkpoint", file_of("run"), ckptool.inspect),
    ("broken-link", file_of("link.pt"), ckptool.inspect),
    ("io", lambda folder: "missing.pt", ckptool.inspect),
    ("unsupported", file_of("script.pt"), lambda file: ckptool.cast(file, "o.pt", dtype="bf16")),
    ("io", file_of("healthy.pt"), lambda file: ckptool.convert(file, "new/folder/o.pt")),
]


@pytest.mark.filterwarnings("ignore")
@looped(("code", "write", "attempt"), ERRORS)
def test_the_commands_of_an_error_run(
    code: str,
    write: Callable[[Path], str],
    attempt: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path)
    with pytest.raises(CkptoolError) as caught:
        attempt(file)
    error = caught.value
    assert error.code == code and isinstance(error.fix, Text) and error.fix.commands, (error.code, str(error))
    chain = Chain(file)
    for each in error.fix.commands:
        line = str(chain.fill(each))
        assert run_line(line) == (1 if "recover" in line and "cut.safetensors" in line else 0) or each[1] == "scan", (
            line
        )


def test_the_one_of_several_that_is_named_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = two_models(tmp_path)
    with pytest.raises(CkptoolError) as caught:
        ckptool.convert(file, "o.safetensors")
    assert run_line(f"ckptool inspect {caught.value.fix.removeprefix('Name it: ')}") == 0
