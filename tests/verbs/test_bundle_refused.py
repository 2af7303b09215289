"""`bundle` refuses what it cannot write whole, and leaves everything as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import (
    Ambiguous,
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
from tests.support.looped import looped

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


CHANGE = {"file": "b.tar", "out": "out.pt"}
# Members, options, and what is said. An output of its own where none is given.
REFUSED: list[tuple[dict[str, str] | None, dict[str, Any], type[CkptoolError], str]] = [
    ({}, {}, UsageError, "no members"),
    (GAN, {"out": None}, UsageError, "needs to know where"),
    ({"a": "none.pt"}, {}, FileProblem, "none.pt"),
    ({"a": "D.pt#nowhere"}, {}, UsageError, "there is no nowhere"),
    ({"a": "G.pt"}, {"values": {"a": 1}}, Conflict, "two members are called 'a'"),
    ({"ema": "G.pt"}, {"file": "b.tar"}, Conflict, "two members are called 'ema'"),
    (None, {**CHANGE, "drop": ["x"]}, UsageError, "no member 'x'"),
    (None, {**CHANGE, "rename": {"x": "y"}}, UsageError, "no member 'x'"),
    (None, {**CHANGE, "rename": {"ema": "generator"}}, Conflict, "two members are called 'generator'"),
    (None, {**CHANGE, "rename": {"ema": "x", "generator": "x"}}, Conflict, "two members are called 'x'"),
    (None, {**CHANGE, "drop": ["ema"], "rename": {"ema": "x"}}, UsageError, "dropped and renamed"),
    (None, {**CHANGE, "drop": ["generator", "ema"]}, UsageError, "no"),
    (None, {"file": "numbers.pt", "drop": ["0"]}, Ambiguous, "'0' names 2 members"),
    (None, CHANGE, UsageError, "nothing to do"),
    (None, {"drop": ["a"]}, UsageError, "no bundle whose members"),
    (None, {"file": "G.pt", "drop": ["0.weight"]}, UsageError, "one set of model"),
    (None, {"file": "optimizer.pt", "drop": ["state"]}, UsageError, "Adam state"),
    (None, {"file": "b.tar#ema", "drop": ["x"]}, UsageError, "part of a file"),
    (GAN, {"out": "out.npz"}, UsageError, "a bundle cannot be npz"),
    (GAN, {"out": "out", "container": "sharded"}, UsageError, "a bundle cannot be sharded"),
    ({"a": "G.pt#0.weight"}, {}, Conflict, "together would be one set"),
    (GAN, {"out": "G.pt"}, Conflict, "is the input itself"),
    (GAN, {"out": "b.tar"}, OutputExists, "b.tar"),
    (None, {"file": "b.tar", "from_folder": "."}, UsageError, "both"),
    (None, {"from_folder": "."}, Unsupported, "has no bundle.json"),
    (GAN, {"values": {"x": lambda: 0}}, Unsupported, "cannot be imported by name"),
]


@looped(("members", "options", "error", "words"), REFUSED)
def test_refused(
    members: dict[str, str] | None, options: dict[str, Any], error: type[CkptoolError], words: str, gan_files: Path
) -> None:
    ckptool.bundle({"generator": "G.pt", "ema": "ema.pt"}, "b.tar", overwrite=True)
    torch.save({0: {"a.weight": torch.ones(2)}, "0": {"b.weight": torch.ones(3)}, "x": 1}, "numbers.pt")
    before = {path.name: path.read_bytes() for path in gan_files.iterdir()}
    with pytest.raises(error) as caught:
        ckptool.bundle(members, **{"out": "out.pt", **options})
    assert words in str(caught.value)
    three_parts(caught.value) if error not in (OutputExists, FileProblem) else None
    assert {path.name: path.read_bytes() for path in gan_files.iterdir()} == before


def test_unknown_calls_are_named_and_kept_only_when_told(gan_files: Path) -> None:
    torch.save(TRAPS["20-unknown-call"](), "odd.pt")
    with pytest.raises(UnsafeObject, match="odd/"):
        ckptool.bundle({"a": "G.pt", "odd": "odd.pt"}, "out.pt")
    assert not Path("out.pt").exists()
    ckptool.bundle({"a": "G.pt", "odd": "odd.pt"}, "out.pt", keep_unknown=True)
    assert "unsafe-global" in [note.code for note in ckptool.inspect("out.pt").notes]


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
