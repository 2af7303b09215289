"""Sharded checkpoints as the hub's savers write them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ckptool.checkpoint import Checkpoint

INDEX = "model.safetensors.index.json"


def sharded_state() -> dict[str, torch.Tensor]:
    """Twelve tensors in an order of their own, of several types."""
    torch.manual_seed(0)
    tensors = {f"layers.{i}.weight": torch.randn(10, 25) for i in range(9)}
    return {
        **tensors,
        "norm": torch.randn(50).bfloat16(),
        "a.first": torch.arange(7),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
    }


def index_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / INDEX).read_text())  # type: ignore[no-any-return]


def hub(folder: Path, tensors: dict[str, torch.Tensor] | None = None, shards: int = 3, **metadata: Any) -> Path:
    """A folder as the hub's savers write it: names sorted in the index, ties named in its metadata."""
    tensors = tensors if tensors is not None else sharded_state()
    folder.mkdir(parents=True, exist_ok=True)
    names, places = list(tensors), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_index(folder, places, {"total_size": total, **metadata})
    return folder


def write_index(folder: Path, places: dict[str, str], metadata: Any = None, name: str = INDEX) -> None:
    index = {"metadata": metadata or {}, "weight_map": places}
    (folder / name).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def bins(folder: Path, parts: list[Any], **options: Any) -> Path:
    """Shards as torch.save writes them, and their index."""
    folder.mkdir()
    places = {}
    for number, part in enumerate(parts, 1):
        file = f"pytorch_model-{number:05d}-of-{len(parts):05d}.bin"
        torch.save(part, folder / file, **options)
        places.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for part in parts for tensor in part.values())
    write_index(folder, places, {"total_size": total}, "pytorch_model.bin.index.json")
    return folder


def assert_values(found: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
    assert set(found.tree) == set(tensors)
    for name, tensor in tensors.items():
        entry = found[name]
        assert entry.shape == tuple(tensor.shape) and entry.dtype.torch == str(tensor.dtype).removeprefix("torch.")
        assert entry.bytes() == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), name
