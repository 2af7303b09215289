"""`convert --ties`: tied, deduplicated and overlapping tensors in every container, as safetensors' and torch's own
loaders see them."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy
import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckptool
from ckptool.cli import main
from ckptool.formats import WRITERS
from tests.support.bundles import deduplicated

SIZE = 1024
Tensors = dict[str, torch.Tensor]


def stored_once(folder: Path) -> Path:
    """Two names of equal bytes that are stored once, and are two tensors."""
    torch.save(
        {"a": torch.arange(float(SIZE)), "b": torch.arange(float(SIZE)), "c": torch.ones(3)}, folder / "plain.pt"
    )
    assert deduplicated(folder / "plain.pt", folder / "in.pt") == 1
    return folder / "in.pt"


def stored_once_in_safetensors(folder: Path) -> Path:
    stored = {"a": torch.arange(float(SIZE)), "c": torch.ones(3)}
    metadata = {"format": "pt", "b": "a", "ckptool.twins": '["b"]'}
    safetensors.torch.save_file(stored, folder / "in.safetensors", metadata)
    return folder / "in.safetensors"


def tied(folder: Path) -> Path:
    weight = torch.arange(float(SIZE))
    torch.save({"a": weight, "b": weight, "c": torch.ones(3)}, folder / "in.pt")
    return folder / "in.pt"


def overlapping(folder: Path) -> Path:
    whole = torch.arange(1.5 * SIZE)
    torch.save({"a": whole[:SIZE], "b": whole[SIZE // 2 :], "c": torch.ones(3)}, folder / "in.pt")
    return folder / "in.pt"


SOURCES = [stored_once, stored_once_in_safetensors, tied, overlapping]


def by_stock_safetensors(out: Path) -> Tensors:
    return safetensors.torch.load_file(out)


def by_stock_safetensors_of_shards(out: Path) -> Tensors:
    return {
        name: tensor
        for file in sorted(out.glob("*.safetensors"))
        for name, tensor in by_stock_safetensors(file).items()
    }


def by_torch(out: Path) -> Tensors:
    found: Tensors = torch.load(out, weights_only=True)
    return found


def by_numpy(out: Path) -> Tensors:
    return {name: torch.from_numpy(array) for name, array in numpy.load(out).items()}


def by_torch_dcp(out: Path) -> Tensors:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: one process loads
        dcp_to_torch_save(out, out.with_suffix(".pt"))
    return by_torch(out.with_suffix(".pt"))


# Container -> the name of its output, and the loader of another project that reads it.
CONTAINERS = {
    "safetensors": ("out.safetensors", by_stock_safetensors),
    "sharded": ("out", by_stock_safetensors_of_shards),
    "npz": ("out.npz", by_numpy),
    "dcp": ("out.dcp", by_torch_dcp),
    "torch-zip": ("out.pt", by_torch),
}


def converted(file: Path, container: str, ties: str) -> Path:
    out = file.parent / ties / CONTAINERS[container][0]
    out.parent.mkdir(exist_ok=True)
    ckptool.convert(file, out, container=container, ties=ties)
    return out


def test_every_container_that_is_written_is_here() -> None:
    assert {container.name for container in WRITERS} == CONTAINERS.keys()


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize("ties", ["record", "copy"])
def test_every_name_has_its_values(make: object, container: str, ties: str, tmp_path: Path) -> None:
    file = make(tmp_path)  # type: ignore[operator]
    expected, found = ckptool.load(file), ckptool.load(converted(file, container, ties))
    assert set(found) == set(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("make", [tied, overlapping])
def test_a_torch_file_keeps_what_shares_memory(make: object, tmp_path: Path) -> None:
    found = by_torch(converted(make(tmp_path), "torch-zip", "record"))  # type: ignore[operator]
    assert found["a"].untyped_storage().data_ptr() == found["b"].untyped_storage().data_ptr()


def test_another_way_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tied(tmp_path)
    with pytest.raises(ckptool.CkptoolError, match="'error'"):
        ckptool.convert(file, tmp_path / "out.safetensors", ties="error")
    assert main(["convert", str(file), "-o", str(tmp_path / "out.safetensors"), "--ties", "error"]) == 2
    assert "record" in capsys.readouterr().err and not (tmp_path / "out.safetensors").exists()
