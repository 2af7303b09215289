"""`bundle` refuses what it cannot write whole, and leaves everything as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import (
    CkptoolError,
    Conflict,
    FileChanged,
    FileProblem,
    OutputExists,
    UnsafeObject,
    Unsupported,
    UsageError,
)
from ckptool.formats import read
from fixtures.traps import TRAPS
from tests.support.bundles import GAN
from tests.support.errors import three_parts

BAD_NAMES = {
    "climbs": "../../x",
    "absolute": "/abs",
    "device": "CON",
    "device-with-suffix": "nul.tar",
    "printer": "Lpt1",
    "folder": "a/",
    "backslash": "a\\b",
    "dot": ".",
    "dots": "..",
    "trailing-dot": "a.",
    "blank": " a",
    "empty": "",
    "drive": "C:x",
    "stream": "a:b",
    "nul": "a\0b",
    "escape": "\x1b[31m",
    "bidi": "a\u202eb",
    "line": "a\nb",
    "surrogate": "a\ud800",
    "long": "x" * 300,
    "dash": "-rf",
}


@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES)
def test_member_names_that_cannot_be_files_are_a_conflict(gan_files: Path, name: str) -> None:
    for files_of, values in (({"a": "ema.pt", name: "G.pt"}, {}), ({"a": "ema.pt"}, {name: 1})):
        with pytest.raises(Conflict, match="a member cannot be called") as caught:
            ckptool.bundle(files_of, "out.pt", values=values)
        three_parts(caught.value)
        assert not any(not c.isprintable() for c in str(caught.value).replace("\n", ""))
    assert not Path("out.pt").exists()
    ckptool.bundle({"a": "ema.pt", "b": "G.pt"}, "two.pt")
    with pytest.raises(Conflict, match="a member cannot be called"):
        ckptool.bundle(file="two.pt", out="out.pt", rename={"a": name})
    assert not Path("out.pt").exists()


TWINS = {
    "case": ("model", "Model"),
    "normal-forms": ("caf\u00e9", "cafe\u0301"),
    "compatible-forms": ("\ufb01x", "fix"),
    "sharp-s": ("stra\u00dfe", "STRASSE"),
}


@pytest.mark.parametrize("pair", TWINS.values(), ids=TWINS)
def test_member_names_that_are_one_file_somewhere_are_a_conflict(gan_files: Path, pair: tuple[str, str]) -> None:
    one, other = pair
    with pytest.raises(Conflict, match="are one name where"):
        ckptool.bundle({one: "G.pt", other: "ema.pt"}, "out.pt")
    with pytest.raises(Conflict, match="are one name where"):
        ckptool.bundle({one: "G.pt"}, "out.pt", values={other: 1})
    ckptool.bundle({one: "G.pt", "b": "ema.pt"}, "two.pt")
    changes: tuple[dict[str, Any], ...] = ({"rename": {"b": other}}, {"values": {other: 1}})
    for change in changes:
        with pytest.raises(Conflict, match="are one name where"):
            ckptool.bundle(file="two.pt", out="out.pt", **change)
    assert not Path("out.pt").exists()
    ckptool.bundle(file="two.pt", out="out.pt", rename={one: other})  # its own other form is free


REFUSED: dict[str, tuple[Callable[[], Any], type[CkptoolError], str]] = {
    "nothing": (lambda: ckptool.bundle({}, "out.pt"), UsageError, "no members"),
    "no-output": (lambda: ckptool.bundle(GAN), UsageError, "needs to know where"),
    "missing-file": (lambda: ckptool.bundle({"a": "none.pt"}, "out.pt"), FileProblem, "none.pt"),
    "missing-part": (lambda: ckptool.bundle({"a": "D.pt#nowhere"}, "out.pt"), UsageError, "there is no nowhere"),
    "name-twice": (
        lambda: ckptool.bundle({"a": "G.pt"}, "out.pt", values={"a": 1}),
        Conflict,
        "two members are called 'a'",
    ),
    "add-there": (
        lambda: ckptool.bundle({"ema": "G.pt"}, "out.pt", file="b.tar"),
        Conflict,
        "two members are called 'ema'",
    ),
    "drop-unknown": (lambda: ckptool.bundle(file="b.tar", out="out.pt", drop=["x"]), UsageError, "no member 'x'"),
    "rename-unknown": (
        lambda: ckptool.bundle(file="b.tar", out="out.pt", rename={"x": "y"}),
        UsageError,
        "no member 'x'",
    ),
    "rename-there": (
        lambda: ckptool.bundle(file="b.tar", out="out.pt", rename={"ema": "generator"}),
        Conflict,
        "two members are called 'generator'",
    ),
    "rename-to-one": (
        lambda: ckptool.bundle(file="b.tar", out="out.pt", rename={"ema": "x", "generator": "x"}),
        Conflict,
        "two members are called 'x'",
    ),
    "drop-and-rename": (
        lambda: ckptool.bundle(file="b.tar", out="out.pt", drop=["ema"], rename={"ema": "x"}),
        UsageError,
        "dropped and renamed",
    ),
    "nothing-to-do": (lambda: ckptool.bundle(file="b.tar", out="out.pt"), UsageError, "nothing to do"),
    "drop-all": (lambda: ckptool.bundle(file="b.tar", out="out.pt", drop=["generator", "ema"]), UsageError, "no"),
    "drop-of-nothing": (lambda: ckptool.bundle(out="out.pt", drop=["a"]), UsageError, "no bundle whose members"),
    "a-state-dict": (
        lambda: ckptool.bundle(file="G.pt", out="out.pt", drop=["0.weight"]),
        UsageError,
        "one set of model",
    ),
    "an-optimizer": (
        lambda: ckptool.bundle(file="optimizer.pt", out="out.pt", drop=["state"]),
        UsageError,
        "Adam state",
    ),
    "a-part": (lambda: ckptool.bundle(file="b.tar#ema", out="out.pt", drop=["x"]), UsageError, "part of a file"),
    "npz": (lambda: ckptool.bundle(GAN, "out.npz"), UsageError, "a bundle cannot be npz"),
    "sharded": (lambda: ckptool.bundle(GAN, "out", container="sharded"), UsageError, "a bundle cannot be sharded"),
    "single-tensors": (lambda: ckptool.bundle({"a": "G.pt#0.weight"}, "out.pt"), Conflict, "together would be one set"),
    "input-is-output": (lambda: ckptool.bundle(GAN, "G.pt"), Conflict, "is the input itself"),
    "there-already": (lambda: ckptool.bundle(GAN, "b.tar"), OutputExists, "b.tar"),
    "both": (lambda: ckptool.bundle(out="out.pt", file="b.tar", from_folder="."), UsageError, "both"),
    "no-folder": (lambda: ckptool.bundle(out="out.pt", from_folder="."), Unsupported, "has no bundle.json"),
    "a-function": (
        lambda: ckptool.bundle(GAN, "out.pt", values={"x": lambda: 0}),
        Unsupported,
        "cannot be imported by name",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(gan_files: Path, case: str) -> None:
    ckptool.bundle({"generator": "G.pt", "ema": "ema.pt"}, "b.tar")
    before = {path.name: path.read_bytes() for path in gan_files.iterdir()}
    call, error, words = REFUSED[case]
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)
    three_parts(caught.value) if case not in ("there-already", "missing-file") else None
    assert {path.name: path.read_bytes() for path in gan_files.iterdir()} == before


def test_unknown_calls_are_named_and_kept_only_when_told(gan_files: Path) -> None:
    torch.save(TRAPS["20-unknown-call"](), "odd.pt")
    with pytest.raises(UnsafeObject, match="odd/"):
        ckptool.bundle({"a": "G.pt", "odd": "odd.pt"}, "out.pt")
    assert not Path("out.pt").exists()
    ckptool.bundle({"a": "G.pt", "odd": "odd.pt"}, "out.pt", keep_unknown=True)
    assert "unsafe-global" in [note.code for note in ckptool.inspect("out.pt").notes]


def test_a_program_is_refused_by_name(gan_files: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), "script.pt")
    with pytest.raises(Unsupported, match=r"script.pt holds .* beside its tensors"):
        ckptool.bundle({"a": "G.pt", "b": "script.pt"}, "out.pt")


def test_an_input_that_changes_meanwhile(gan_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptool.formats import torch_zip

    write = torch_zip.write

    def meddle(*given: Any, **options: Any) -> Any:
        Path("D.pt").write_bytes(Path("D.pt").read_bytes() + b" ")
        return write(*given, **options)

    monkeypatch.setattr(torch_zip, "write", meddle)
    with pytest.raises(FileChanged, match=r"D\.pt"):
        ckptool.bundle(GAN, "out.pt")
    assert not Path("out.pt").exists()


def test_a_damaged_member_is_noticed(gan_files: Path) -> None:
    raw = bytearray(Path("ema.pt").read_bytes())
    (place,) = [
        record.data.offset for name, record in read("ema.pt").origin.archive.records.items() if name.endswith("data/0")
    ]
    raw[place] ^= 1
    Path("ema.pt").write_bytes(raw)
    with pytest.raises(CkptoolError, match="checksum"):
        ckptool.bundle(GAN, "out.pt")
    assert not Path("out.pt").exists()


def test_dry_run_writes_nothing(gan_files: Path) -> None:
    done = ckptool.bundle(GAN, "out.pt", dry_run=True)
    assert done.dry_run and not Path("out.pt").exists() and done.facts["members"]
