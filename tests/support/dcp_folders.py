"""Folders of torch.distributed.checkpoint that tests save, and change as its own classes would write them."""

import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as save_state


def training_state() -> dict[str, Any]:
    """What a training run saves: a model, an optimizer, lists, objects, and types of all sorts."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    return {
        "model": dict(model.state_dict()), "optimizer": optimizer.state_dict()["state"],
        "list": [torch.ones(2), {"inside": torch.arange(3)}, 7], "plain": [1, 2, "three"], "epoch": 3,
        "name": "run", "nothing": None, "half": torch.randn(5, 3).bfloat16(),
        "float8": torch.randn(4).to(torch.float8_e4m3fn), "unsigned": torch.arange(4).to(torch.uint16),
        "complex": torch.randn(2, 2, dtype=torch.complex64), "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4), "transposed": torch.randn(3, 5).t(), "a.b": {"c.d": torch.ones(1)},
    }  # fmt: skip


def save_dcp(value: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_state(value, checkpoint_id=folder, no_dist=True)
    return folder


def edit(folder: Path, change: Callable[[Any], Any]) -> Path:
    """The folder with another table, written by torch's own classes."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # made by this test
    replaced = change(metadata)
    path.write_bytes(pickle.dumps(replaced if isinstance(replaced, Metadata) else metadata))
    return folder


def place_of(metadata: Metadata, name: str = "half") -> tuple[MetadataIndex, _StorageInfo]:
    return next((index, info) for index, info in metadata.storage_data.items() if index.fqn == name)


def placed(tensor: str = "half", /, **changes: Any) -> Callable[[Any], None]:
    """Changes where one tensor is."""

    def change(metadata: Metadata) -> None:
        index, info = place_of(metadata, tensor)
        for name, value in changes.items():
            setattr(info, name, value)
        assert metadata.storage_data[index] is info

    return change


def chunk(change: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda metadata: change(metadata.state_dict_metadata["half"])


def chunks(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Any], None]:
    parts = [ChunkStorageMetadata(torch.Size(begin), torch.Size(sizes)) for begin, sizes in boxes]
    return chunk(lambda tensor: setattr(tensor, "chunks", parts))
