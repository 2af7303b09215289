"""What is in a checkpoint, and the notes on it with the commands that mend it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.analysis.inspect import Listing, listing
from ckptool.checkpoint import Composite, Note
from ckptool.errors import UsageError
from ckptool.formats import read
from fixtures.make import PRODUCERS, make
from fixtures.traps import TRAPS
from tests.support.files import opened, saved, weights
from tests.support.looped import looped


def listed(value: Any, folder: Path, at: str = "") -> Listing:
    return listing(opened(value, folder), at)


def notes(found: Listing) -> dict[str, Note]:
    return {note.code: note for note in found.notes}


def test_every_tensor_by_every_name(tmp_path: Path) -> None:
    found = listed(TRAPS["01-full-tie-three-roots"](), tmp_path)
    assert [(row.address, row.storage) for row in found.tensors] == [
        ("model/w", 0),
        ("ema/w", 0),
        ("list/0", 0),
        ("list/1", 0),
    ]
    assert (found.storages, found.tensor_bytes) == (1, 16)


def test_a_composite_is_one_row(tmp_path: Path) -> None:
    found = listed(TRAPS["11-sparse-csr"](), tmp_path)
    (row,) = found.tensors
    assert isinstance(row.tensor, Composite) and row.storage is None and row.address == "w"
    assert found.storages == 3 and found.tensor_bytes == sum(part.storage.nbytes for part in row.tensor.parts())


def test_plain_entries(tmp_path: Path) -> None:
    value = {"epoch": 3, "config": {"lr": 0.1, "empty": {}, "names": ["a"]}, "none": None, "w": torch.ones(1), "t": ()}
    found = listed(value, tmp_path)
    assert {row.address: row.value for row in found.entries} == {
        "epoch": 3,
        "config/lr": 0.1,
        "config/empty": {},
        "config/names/0": "a",
        "none": None,
        "t": (),
    }


def test_file_and_sizes(tmp_path: Path) -> None:
    path = saved({"a": (x := torch.ones(10)), "b": x[:2]}, tmp_path / "x.pt")
    found = listing(read(path))
    assert (found.file, found.container, found.bytes) == (str(path), "torch-zip", path.stat().st_size)
    assert found.tensor_bytes == 40 and [row.tensor.nbytes for row in found.tensors] == [40, 8]


def test_a_part(tmp_path: Path) -> None:
    found = listed({"models": {"G": weights("a.w"), "D": weights("b.w", "c.w")}, "epoch": 1}, tmp_path, "models/D")
    assert [row.address for row in found.tensors] == ["models/D/b.w", "models/D/c.w"]
    assert [(root.address, root.is_model) for root in found.roots] == [("models/D", True)]
    assert found.entries == () and found.at == "models/D"
    leaf = listed({"epoch": 1}, tmp_path, "epoch")
    assert [(row.address, row.value) for row in leaf.entries] == [("epoch", 1)]
    with pytest.raises(UsageError, match="there is no x"):
        listed({"epoch": 1}, tmp_path, "x")


@looped("name", [*TRAPS, *(name for name in PRODUCERS if "legacy" not in name)])
def test_everything_can_be_listed(name: str, tmp_path: Path) -> None:
    checkpoint = read(make(name, tmp_path))
    found = listing(checkpoint)
    places = [row.address for row in (*found.tensors, *found.entries)]
    assert len(places) == len(set(places)) or name == "18-keys-that-are-not-text"
    assert all(note.code and note.message for note in found.notes)
    assert found.storages == len({row.storage for row in found.tensors if row.storage is not None}) or any(
        row.storage is None for row in found.tensors
    )


# Notes ---------------------------------------------------------------------------------------------------------------


@looped(
    ("name", "expected"),
    [
        ("dp.pt", {"prefix-module"}),
        ("compiled.pt", {"prefix-compiled"}),
        ("dp_compiled.pt", {"prefix-module"}),
        ("compiled_dp.pt", {"prefix-module"}),
        ("compiled_submodule.pt", {"prefix-compiled"}),
        ("averaged.pt", {"prefix-module"}),
        ("fsdp.pt", {"prefix-compiled"}),
        ("deepspeed.pt", {"prefix-compiled"}),
        ("cuda.pt", {"cuda-location"}),
        ("training_sgd.pt", {"prefix-module", "cuda-location"}),
        ("training.pt", set()),
        ("lightning.ckpt", set()),
        ("model.safetensors", set()),
        ("13-in-the-middle", set()),
        ("13-the-word-inside-a-name", set()),
        ("07-slice-of-a-big-storage", {"wasted-storage"}),
        ("20-unknown-call", {"unsafe-global"}),
        ("20-unknown-object", {"custom-class"}),
    ],
)
def test_notes(name: str, expected: set[str], tmp_path: Path) -> None:
    assert set(notes(listing(read(make(name, tmp_path))))) == expected


def carry_out_fix(fix: tuple[str, ...], file: Path, out: Path) -> None:
    """Carries out a note's command by the function of its name, with the options that it has."""
    assert fix[0] == "ckptool"
    verb = getattr(ckptool, fix[1].replace("-", "_"))
    words = [{"FILE": file, "OUT": out}.get(word, word) for word in fix[2:]]
    assert words.pop(0) == file and words.pop(words.index("-o") + 1) == out
    words.remove("-o")
    options: dict[str, Any] = {}
    while words:
        name = str(words.pop(0)).removeprefix("--").replace("-", "_")
        options[name] = True if not words or str(words[0]).startswith("--") else words.pop(0)
    verb(file, out, **options)


@looped(
    "name",
    [
        "dp.pt",
        "compiled.pt",
        "dp_compiled.pt",
        "compiled_dp.pt",
        "compiled_submodule.pt",
        "averaged.pt",
        "fsdp.pt",
        "deepspeed.pt",
        "cuda.pt",
        "training_sgd.pt",
        "13-on-some-keys",
        "13-a-submodule-called-module",
    ],
)
def test_the_command_of_a_note_mends_it(name: str, tmp_path: Path) -> None:
    file = make(name, tmp_path)
    before = notes(listing(read(file)))
    fixable = [code for code, note in before.items() if note.fix]
    assert fixable
    for number, code in enumerate(fixable):
        out = tmp_path / f"out{number}.pt"
        carry_out_fix(notes(listing(read(file)))[code].fix, file, out)
        assert code not in notes(listing(read(out)))
        file = out


def test_the_notes_say_what_and_where(tmp_path: Path) -> None:
    value = {"G": weights("module.a.w", "module.b.w"), "D": weights("module.c.w", "d.w"), "x": weights("e")}
    found = [note for note in listed(value, tmp_path).notes if note.code == "prefix-module"]
    assert [note.message.partition(" carr")[0] for note in found] == ["2 of 2 keys of G", "1 of 2 keys of D"]
    assert all("--partial" in note.fix for note in found)  # one command mends both
    carry_out_fix(found[0].fix, tmp_path / "opened.pt", tmp_path / "mended.pt")
    assert listing(read(tmp_path / "mended.pt")).notes == ()
    device = notes(listing(read(make("cuda.pt", tmp_path))))["cuda-location"]
    assert "9 tensors are tagged cuda:0" in device.message and device.fix[:2] == ("ckptool", "remap")


def test_wasted_bytes_are_those_behind_no_tensor(tmp_path: Path) -> None:
    big = torch.zeros(100_000)
    wasted = notes(listed({"a": big[10:12], "b": torch.ones(3)}, tmp_path))["wasted-storage"]
    assert "399,992 bytes in 1 storage" in wasted.message
    assert "wasted-storage" not in notes(listed({"a": big[:50_000], "b": big[50_000:]}, tmp_path))
    assert "wasted-storage" not in notes(listed({"a": big[10:], "all": big}, tmp_path))
    assert "wasted-storage" not in notes(listed({"a": torch.ones(1, 4).expand(100_000, 4)}, tmp_path))


def test_names_are_escaped(tmp_path: Path) -> None:
    value = {"\x1b[31m": weights("module.a.w"), "evil": TRAPS["20-unknown-call"]()}
    assert all("\x1b" not in note.message for note in listed(value, tmp_path).notes)


def test_listing_reads_no_tensor_data(tmp_path: Path) -> None:
    """The bytes of a storage may be anything: only its checksum would tell."""
    path = saved({"w": torch.ones(1000)}, tmp_path / "x.pt")
    data = path.read_bytes()
    path.write_bytes(data.replace(torch.ones(1000).numpy().tobytes(), bytes(4000)))
    assert listing(read(path)).tensor_bytes == 4000
    code = (
        "import sys; from ckptool.formats import read; from ckptool.analysis.inspect import listing;"
        f"listing(read({str(path)!r})); print('numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_conjugate_view_is_no_more_memory(tmp_path: Path) -> None:
    values = torch.randn(6, dtype=torch.complex64)
    torch.save({"x": values, "y": values.conj()}, tmp_path / "a.pt")
    (part,) = listing(read(tmp_path / "a.pt")).parts
    assert (len(part.rows), part.elements, part.bytes, part.tied) == (2, 6, 48, {1: 0})
