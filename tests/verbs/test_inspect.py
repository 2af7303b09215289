"""`inspect`: what is in a checkpoint, its statistics, and the notes on it with the commands that mend it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.analysis.inspect import Listing
from ckptool.checkpoint import Composite, Note
from ckptool.cli import main
from ckptool.errors import UsageError
from fixtures.make import make
from fixtures.traps import TRAPS
from tests.support.cli import Run
from tests.support.files import saved, weights
from tests.support.looped import looped


def listed(value: Any, folder: Path, at: str | None = None, **options: Any) -> Listing:
    return ckptool.inspect(saved(value, folder / "in.pt"), at=at, **options)


def notes(found: Listing) -> dict[str, Note]:
    return {note.code: note for note in found.notes}


def test_every_tensor_by_every_name(tmp_path: Path) -> None:
    found = listed(TRAPS["01-full-tie-three-roots"](), tmp_path)
    assert [(row.address, row.storage) for row in found.tensors] == [
        (name, 0) for name in ("model/w", "ema/w", "list/0", "list/1")
    ]
    assert (found.storages, found.tensor_bytes) == (1, 16)


def test_a_composite_is_one_row(tmp_path: Path) -> None:
    found = listed(TRAPS["11-sparse-csr"](), tmp_path)
    (row,) = found.tensors
    assert isinstance(row.tensor, Composite) and row.storage is None and row.address == "w"
    assert found.storages == 3 and found.tensor_bytes == sum(part.storage.nbytes for part in row.tensor.parts())


def test_a_line_of_each_tensor_says_what_is_unusual(tmp_path: Path, run: Run) -> None:
    w = torch.ones(2, 3)
    path = saved({"w": w, "turned": w.t(), "again": w, "sparse": torch.eye(2).to_sparse()}, tmp_path / "a.pt")
    ckptool.remap(path, tmp_path / "b.pt", to="cuda:1")
    words = {"w": "", "turned": "strides [1, 3]", "again": "tied to w", "sparse": "sparse coo"}
    for file, place in ((path, ""), (tmp_path / "b.pt", "cuda:1")):
        lines = [line for line in run("inspect", str(file), "--all").out.splitlines() if " f32 " in line]
        found = {line.split()[0]: line.partition(" B")[2].strip() for line in lines}
        assert found == {name: ", ".join(filter(None, (place, text))) for name, text in words.items()}


def test_plain_entries(tmp_path: Path) -> None:
    value = {"epoch": 3, "config": {"lr": 0.1, "empty": {}, "names": ["a"]}, "none": None, "w": torch.ones(1), "t": ()}
    assert {row.address: row.value for row in listed(value, tmp_path).entries} == {
        "epoch": 3,
        "config/lr": 0.1,
        "config/empty": {},
        "config/names/0": "a",
        "none": None,
        "t": (),
    }


def test_file_and_sizes(tmp_path: Path) -> None:
    found = listed({"a": (x := torch.ones(10)), "b": x[:2]}, tmp_path)
    path = tmp_path / "in.pt"
    assert (found.file, found.container, found.bytes) == (str(path), "torch-zip", path.stat().st_size)
    assert found.tensor_bytes == 40 and [row.tensor.nbytes for row in found.tensors] == [40, 8]
    assert found.statistics == {} and found.notes == ()


def test_a_part(tmp_path: Path) -> None:
    value = {"models": {"G": weights("a.w"), "D": weights("b.w", "c.w")}, "epoch": 1}
    found = listed(value, tmp_path, "models/D")
    assert [row.address for row in found.tensors] == ["models/D/b.w", "models/D/c.w"]
    assert [(root.address, root.is_model) for root in found.roots] == [("models/D", True)]
    assert found.entries == () and found.at == "models/D"
    assert ckptool.inspect(f"{tmp_path / 'in.pt'}#models/D").to_dict() == found.to_dict()
    assert [(row.address, row.value) for row in listed(value, tmp_path, "epoch").entries] == [("epoch", 1)]
    with pytest.raises(UsageError, match="there is no x"):
        listed(value, tmp_path, "x")


def test_listing_reads_no_tensor_data(tmp_path: Path) -> None:
    """The bytes of a storage may be anything: only its checksum would tell."""
    path = saved({"w": torch.ones(1000)}, tmp_path / "x.pt")
    data = path.read_bytes()
    path.write_bytes(data.replace(torch.ones(1000).numpy().tobytes(), bytes(4000)))
    code = f"import sys, ckptool; print(ckptool.inspect({str(path)!r}).tensor_bytes, 'numpy' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "4000 False\n"


def test_a_conjugate_view_is_no_more_memory(tmp_path: Path) -> None:
    values = torch.randn(6, dtype=torch.complex64)
    (part,) = listed({"x": values, "y": values.conj()}, tmp_path).parts
    assert (len(part.rows), part.elements, part.bytes, part.tied) == (2, 6, 48, {1: 0})


def test_a_file_that_is_one_tensor_or_has_no_parts(tmp_path: Path, run: Run) -> None:
    alone = str(saved(torch.ones(2), tmp_path / "alone.pt"))
    assert run("inspect", alone, "-q").out == "/\n"
    assert "(the whole file)  8 B" in run("inspect", alone).out
    entries = str(saved({"model": {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "in.pt"))
    found = run("inspect", entries, "--only", "epoch")
    assert found.code == 0 and found.out.split("\n")[2:5] == ["entries", "  epoch  3", ""]


def test_tensors_under_keys_that_read_alike(tmp_path: Path, run: Run) -> None:
    """An optimizer that was pickled whole keeps its state by parameters, and two of one shape have one name."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    torch.save(
        {"optimizer": optimizer, "keys": {torch.ones(2): torch.ones(1), torch.ones(2): torch.ones(1)}},
        file := tmp_path / "x.pt",
    )
    for words in ((), ("--all",), ("--depth", "9"), ("--stats",), ("--json",)):
        found = run("inspect", str(file), *words)
        assert found.code == 0 and not found.err, (words, found)
    shown = run("inspect", str(file), "--depth", "9").out
    assert shown.count("exp_avg_sq") == 6 and shown.count("<tensor f32[2]>") == 2, shown


# Statistics -----------------------------------------------------------------------------------------------------------


def test_statistics(tmp_path: Path) -> None:
    w = torch.tensor([[1.0, -2.0], [0.0, 5.0]])
    state = {
        "w": w,
        "tied": w,
        "n": torch.tensor([1, 2, 3]),
        "none": torch.empty(0),
        "q": TRAPS["11-sparse-coo"]()["w"],
    }
    found = ckptool.inspect(saved(state, tmp_path / "in.pt"), stats=True)
    assert list(found.statistics) == ["w", "tied", "n"] and found.statistics["w"] is found.statistics["tied"]
    values = found.statistics["w"]
    assert (values.count, values.min, values.max, values.mean, values.zeros) == (4, -2, 5, 1, 1)
    assert values.std == pytest.approx(w.std().item()) and values.norm == pytest.approx(w.norm().item())


def test_a_note_on_what_is_not_finite(tmp_path: Path) -> None:
    state = {"a.w": torch.tensor([1.0, float("nan")]), "b.w": torch.tensor([float("inf")]), "c.w": torch.ones(1)}
    file = saved(state, tmp_path / "in.pt")
    assert [note.code for note in ckptool.inspect(file).notes] == []
    (note,) = ckptool.inspect(file, stats=True).notes
    assert (note.code, note.message) == ("non-finite", "2 of 3 tensors hold NaN or Inf: a.w, b.w")


@looped("name", TRAPS)
def test_statistics_count_every_element_of_every_trap(name: str, tmp_path: Path) -> None:
    found = ckptool.inspect(saved(TRAPS[name](), tmp_path / "in.pt"), stats=True)
    for row in found.tensors:
        values = found.statistics.get(row.address)
        assert values is None or values.count == row.tensor.numel  # type: ignore[union-attr]


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
    assert set(notes(ckptool.inspect(make(name, tmp_path)))) == expected


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
    fixable = [code for code, note in notes(ckptool.inspect(file)).items() if note.fix]
    assert fixable
    for code in fixable:
        fix = notes(ckptool.inspect(file))[code].fix
        assert main(fix[1:]) == 0
        file = Path(fix[fix.index("-o") + 1])
        assert code not in notes(ckptool.inspect(file))


def test_the_notes_say_what_and_where(tmp_path: Path) -> None:
    value = {"G": weights("module.a.w", "module.b.w"), "D": weights("module.c.w", "d.w"), "x": weights("e")}
    one, other = (note for note in listed(value, tmp_path).notes if note.code == "prefix-module")
    assert [note.message.partition(" ha")[0] for note in (one, other)] == ["2 of 2 keys of G", "1 of 2 keys of D"]
    assert "--partial" in one.fix and not other.fix  # one command mends both
    assert main(one.fix[1:]) == 0 and ckptool.inspect(one.fix[one.fix.index("-o") + 1]).notes == ()
    device = notes(ckptool.inspect(make("cuda.pt", tmp_path)))["cuda-location"]
    assert "9 tensors were saved on cuda:0" in device.message and device.fix[:2] == ("ckptool", "remap")


def test_wasted_bytes_are_those_behind_no_tensor(tmp_path: Path) -> None:
    big = torch.zeros(100_000)
    wasted = notes(listed({"a": big[10:12], "b": torch.ones(3)}, tmp_path))["wasted-storage"]
    assert "399,992 bytes in 1 storage" in wasted.message
    assert "wasted-storage" not in notes(listed({"a": big[:50_000], "b": big[50_000:]}, tmp_path))
    assert "wasted-storage" not in notes(listed({"a": big[10:], "all": big}, tmp_path))
    assert "wasted-storage" not in notes(listed({"a": torch.ones(1, 4).expand(100_000, 4)}, tmp_path))
