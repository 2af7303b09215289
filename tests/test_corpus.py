"""The main job on files that other people made, where `../shared/corpus` lies beside the project.

They are untrusted: `torch.load` sees them with `weights_only=True` only, and they are never unpickled otherwise.
"""

import csv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptool
from ckptool.checkpoint import Composite, TensorEntry
from ckptool.checkpoint.tree import tensors
from ckptool.conventions.state_dicts import find_state_dicts
from ckptool.errors import CkptoolError, OnlyAPart, UnsafeObject, UsageError
from ckptool.formats import read
from ckptool.pickles.calls import CUSTOM, UNKNOWN, uses_of
from tests.support.errors import refused
from tests.support.files import CORPUS, load
from tests.support.same import assert_same_objects, assert_same_tree

CONTAINERS = {"zip": "torch-zip", "legacy": "torch-legacy", "raw-pickle": "pickle"}


def manifest(*kinds: str) -> list[dict[str, str]]:
    """The files of these kinds, or all; the parts of a folder are looked at as the folder."""
    if not CORPUS.is_dir():
        return []
    with (CORPUS / "MANIFEST.tsv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if "/" not in row["file"]]
    return [row for row in rows if not kinds or row["kind"] in kinds]


every = pytest.mark.parametrize("row", manifest(), ids=lambda row: row["file"])
each = pytest.mark.parametrize("row", manifest("zip", "safetensors"), ids=lambda row: row["file"])
read_only = pytest.mark.parametrize("row", manifest("legacy", "raw-pickle"), ids=lambda row: row["file"])
Row = dict[str, str]


def path_of(row: Row) -> Path:
    return CORPUS / row["file"]


# What loading the file would run, worst first; None: nothing. Where it is unknown, writing needs to be told.
VERDICTS = {
    # names of classes by themselves, a metric made with arguments
    "chemprop__example_model_v2_regression_mol.ckpt": UNKNOWN,
    "skorch__net_cuda.pkl": UNKNOWN,
    "pytorch-vdsr__model_epoch_50.pth": CUSTOM,  # a whole model
}


@every
def test_what_would_run_is_judged_as_before(row: Row, tmp_path: Path) -> None:
    verdicts = {use.verdict for use, _ in uses_of(read(path_of(row)))}
    assert (UNKNOWN if UNKNOWN in verdicts else CUSTOM if verdicts else None) == VERDICTS.get(row["file"])
    if UNKNOWN in verdicts:
        refused(UnsafeObject, tmp_path, lambda: ckptool.remap(path_of(row), tmp_path / "out.pt", to="cuda:1"))


def assert_same_file(file: Path, out: Path) -> None:
    """The same tree, and the same for torch where torch opens the original without running it."""
    assert_same_tree(read(file), read(out))
    if file.suffix != ".safetensors":
        try:
            before = torch.load(file, weights_only=True, map_location="cpu")
        except Exception as error:  # noqa: BLE001 (torch's refusals are of several kinds)
            assert "weights_only" in str(error) or "Weights only" in str(error)
            return
        assert_same_objects(before, torch.load(out, weights_only=True, map_location="cpu"))


@every
def test_inspect_counts_what_the_manifest_does(row: Row) -> None:
    found = ckptool.inspect(path_of(row))
    assert found.bytes == int(row["bytes"]) and found.container == CONTAINERS.get(row["kind"], row["kind"])
    assert len(found.tensors) == int(row["tensors"])
    for name, said in (("location", row["locations"]), ("dtype", row["dtypes"].lower())):
        counts = Counter(str(getattr(one.tensor, name)) for one in found.tensors)
        told = dict(part.rsplit(":", 1) for part in said.split(",")) if said else {}
        assert not told or {part: str(count) for part, count in counts.items()} == told
    assert ckptool.inspect(path_of(row), stats=True).statistics.keys() <= {one.address for one in found.tensors}


@every
def test_every_tensor_has_the_bytes_that_torch_reads(row: Row) -> None:
    """Where torch opens the file without running it, every tensor is the same, bit for bit, and no other is there."""
    opened = dict(tensors(read(path_of(row)).tree))
    assert all(isinstance(part, (TensorEntry, Composite)) for part in opened.values())
    for tensor in opened.values():
        _ = tensor.row_major() if isinstance(tensor, TensorEntry) else list(tensor.parts())
    if not row["torch_load_weights_only"].startswith("ok"):
        return
    path = path_of(row)
    theirs = load_file(path) if path.suffix == ".safetensors" else load(path)
    expected = dict(live(theirs))
    assert list(opened) == list(expected)
    for place, entry in opened.items():
        assert isinstance(entry, TensorEntry)
        assert (entry.shape, entry.dtype.torch) == (tuple(expected[place].shape), str(expected[place].dtype)[6:]), place
        assert entry.bytes() == expected[place].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), place


def live(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """The tensors in what torch loaded, with their places."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from live(part, (*path, key))


def test_the_folder_of_a_distributed_checkpoint() -> None:
    if (folder := CORPUS / "lightning_dcp").is_dir():
        found = ckptool.inspect(folder)
        assert found.container == "dcp" and len(found.tensors) == 4
        assert len(ckptool.inspect(folder / ".metadata").tensors) == 4
        with pytest.raises(OnlyAPart, match="Name the folder"):
            ckptool.inspect(folder / "__0_0.distcp")


@read_only
def test_what_is_only_read_is_written_as_a_zip(row: Row, tmp_path: Path) -> None:
    """The same tree, with its ties, flags and places; torch opens what it opened before."""
    file, out = path_of(row), tmp_path / "out.pt"
    calls = list(uses_of(read(file)))
    ckptool.convert(file, out, verify=True, keep_unknown=bool(calls))
    assert_same_tree(read(file), read(out))
    if row["torch_load_weights_only"].startswith("ok"):
        assert_same_objects(load(file), load(out))


def test_a_whole_module_gives_its_weights_without_its_class(tmp_path: Path) -> None:
    file = CORPUS / "pytorch-vdsr__model_epoch_50.pth"
    if not file.exists():
        return
    done = ckptool.convert(file, tmp_path / "weights.safetensors", verify=True)
    assert done.facts["tensors"] == 20 and done.facts["left_behind"] == ["epoch"]
    names = list(load_file(tmp_path / "weights.safetensors"))
    assert sorted(names) == sorted(row.path[-1] for row in ckptool.inspect(file, at="model").tensors)
    assert "input.weight" in names and "residual_layer.0.conv.weight" in names


def test_torchscript_gives_its_state_dict(tmp_path: Path) -> None:
    file = CORPUS / "silero-vad__model_micro.jit"
    if not file.exists():
        return
    done = ckptool.convert(file, tmp_path / "weights.safetensors", verify=True)
    assert done.facts["tensors"] == 56 and ckptool.diff(file, tmp_path / "weights.safetensors").same
    mobile = ckptool.inspect(CORPUS / "Compsci-528-DeFault-Data-Classification__model.ptl")
    (note,) = [note for note in mobile.notes if note.code == "no-state-dict"]
    assert [part.shape for part in ckptool.show(note.fix[-1]).entry] == [(427, 8), (427,)]


@each
def test_add_and_strip_a_prefix(row: Row, tmp_path: Path) -> None:
    """What the other verbs give of these files is in tests/golden/record-corpus."""
    file = path_of(row)
    there, back = tmp_path / f"there{file.suffix}", tmp_path / f"back{file.suffix}"
    if not any(root.is_model for root in find_state_dicts(read(file))):
        with pytest.raises(UsageError, match="no dictionary that looks like model weights"):
            ckptool.add_module(file, there)
        assert row["tensors"] == "0"
        return
    options = {"keep_unknown": VERDICTS.get(row["file"]) == UNKNOWN, "verify": True}
    added = ckptool.add_module(file, there, **options)
    assert added.facts["changed"] > 0 and added.verified
    ckptool.strip_module(there, back, prefix="module.", **options)
    assert_same_file(file, back)


@each
def test_convert_the_whole_tree_and_back(row: Row, tmp_path: Path) -> None:
    file, there, back = path_of(row), tmp_path / "all.safetensors", tmp_path / "back.pt"
    try:
        ckptool.convert(file, there, all=True, verify=True)
    except CkptoolError as refused:
        assert refused.code == "unsupported" and refused.what and not there.exists()
        unknown = refused.what.partition("carried: ")[2].partition(" at ")[0]
        assert unknown and not unknown.startswith(("torch.", "numpy.")), refused
        return
    ckptool.convert(there, back, verify=True)
    assert_same_file(file, back)


def test_the_manifest_is_read() -> None:
    assert (len(manifest()) >= 15 and len(manifest("legacy")) >= 6) or not CORPUS.is_dir()
