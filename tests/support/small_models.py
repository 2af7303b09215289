"""What the tests of live modules share: models before and after, and which traps need code of their own."""

import json
import struct
import zipfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptool
from ckptool.analysis.warm_start import LoadReport
from ckptool.checkpoint import Storage, TensorEntry
from ckptool.checkpoint.tree import address, map_storages, walk
from ckptool.errors import CkptoolError
from tests.support.errors import three_parts
from tests.support.files import load


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def snapshot(model: nn.Module) -> dict[str, tuple[int, bytes]]:
    """Every tensor of a model: which object it is, and its bits."""
    return {name: (id(tensor), bits(tensor)) for name, tensor in model.state_dict(keep_vars=True).items()}


def assert_same_state(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    assert {name: bits(tensor) for name, tensor in model.state_dict().items()} == {
        name: bits(tensor) for name, tensor in state.items()
    }


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")  # the usual one takes seconds to import


class Classifier(nn.Module):
    def __init__(self, classes: int = 4, width: int = 8) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, classes)


def load_refused(file: Path, model: nn.Module, kind: type[CkptoolError], words: str, **options: Any) -> CkptoolError:
    before = snapshot(model)
    with pytest.raises(kind, match=words) as found:
        ckptool.load_into(model, file, **options)
    assert snapshot(model) == before
    three_parts(found.value)
    return found.value


# Traps that hold objects of classes or functions that only their own code could make again.
UNKNOWN = set(
    "11-subclass 11-subclass-with-attributes 11-subclass-in-a-parameter 11-wrapper-subclass 11-masked 11-nested-jagged "
    "20-defaultdict-of-unknown 20-dict-subclass 20-unknown-object 20-unknown-call".split()
)
LOADED_IN_ESSENCE = {"11-nested-jagged"}  # without the notes that torch's compiler left on it; not saved


# Adapters -------------------------------------------------------------------------------------------------------------
# Adapters of PEFT, and bases for them, made by hand.


Tensors = dict[str, torch.Tensor]
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "some/model"}


def halves(module: str, out: int = 5, inputs: int = 6, rank: int = 2, seed: int = 0) -> Tensors:
    torch.manual_seed(seed)
    return {f"{module}.lora_A.weight": torch.randn(rank, inputs), f"{module}.lora_B.weight": torch.randn(out, rank)}


def peft(folder: Path, tensors: Tensors, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    named = {f"base_model.model.{key}": value.contiguous() for key, value in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def model_folder(folder: Path, tensors: Tensors, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def stored(tensors: Any, path: Path, **metadata: str) -> Path:
    if path.suffix == ".pt":
        torch.save(tensors, path)
    else:
        save_file(tensors, path, metadata=metadata or None)
    return path


# Members of bundles ---------------------------------------------------------------------------------------------------
# Members of bundles; and files of 0.1.0, in which equal storages lie once and are no ties.


def small_net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.Linear(width, 4))


GAN = {"generator": "G.pt", "discriminator": "D.pt#state_dict", "optimizerA": "optimizer.pt", "ema": "ema.pt"}


SHARED = torch.arange(1024.0).reshape(32, 32)


def net_state(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 2)).state_dict()


LEAST = 1024  # bytes


def deduplicated(file: str | Path, out: str | Path) -> int:
    """Writes the file as 0.1.0 deduplicated it; returns how many storages have no bytes of their own."""
    opened = ckptool.open(file)
    alike: dict[tuple[bytes, str], dict[int, list[str]]] = defaultdict(dict)
    first: dict[tuple[bytes, str], Storage] = {}
    one: dict[int, Storage] = {}
    for path, node in walk(opened.tree):
        if isinstance(node, TensorEntry) and node.storage.nbytes >= LEAST:
            key = bytes(node.storage.data.read(0, node.storage.nbytes)), node.storage.location
            alike[key].setdefault(id(node.storage), []).append(address(path))
            one[id(node.storage)] = first.setdefault(key, node.storage)
    groups = [[*storages.values()] for storages in alike.values() if len(storages) > 1]
    tied = map_storages(opened.tree, lambda storage: one.get(id(storage), storage))
    ckptool.save(replace(opened, tree=tied), out, keep_unknown=True)
    with zipfile.ZipFile(out, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{root}/.ckptool/twins", json.dumps(groups))
    return sum(len(group) - 1 for group in groups)


# Warm starts ----------------------------------------------------------------------------------------------------------
# A model of the user to start from a checkpoint, and what comes of it.


CODE = """
import torch
from torch import nn

def build():
    print("building")
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

def state():
    return build().state_dict()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 16)

    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        self.seen = state["seen"]

def on_meta():
    with torch.device("meta"):
        return build()

def raises():
    raise ValueError("the data\\nare missing")

def number():
    return 7

module = nn.Linear(2, 2)
"""


def warm_started(file: Path, target: Path | str, out: Path, **options: Any) -> tuple[LoadReport, dict[str, Any]]:
    report = ckptool.warm_start(file, target, out, **options)
    assert report.accepted and report.applied, report
    return report, load(out)


# Of other programs ----------------------------------------------------------------------------------------------------
# The first bytes of files that other programs write beside checkpoints, by words of what they are.


def varint_text(field: int, text: bytes) -> bytes:
    return bytes([field << 3 | 2, len(text)]) + text


OTHER_MODELS = {
    "GGUF": b"GGUF\x03\0\0\0" + bytes(16),
    "GGML": b"tjgg\x03\0\0\0" + bytes(16),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "ONNX": b"\x08\x08" + varint_text(2, b"pytorch") + varint_text(3, b"2.13.0") + b"\x3a\x80\x01\x0a",
    "SavedModel": b"\x08\x01\x12\xb4\x0a\x0a\x20" + bytes(60),
    "TensorFlow graph": varint_text(1, varint_text(1, b"input") + varint_text(2, b"Placeholder")),
    "TensorFlow checkpoint": b"\0\x05" + bytes(98) + b"\x01" * 40 + bytes.fromhex("57fb808b247547db"),
    "TensorFlow Lite": b"\x1c\0\0\0TFL3" + bytes(40),
    "ExecuTorch": b"\x38\0\0\0ET12" + bytes(40),
    "ONNX Runtime": b"\x38\0\0\0ORTM" + bytes(40),
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
    "SentencePiece": b"\x0a\x0e\x0a\x05<unk>\x15\0\0\0\0\x18\x02" + bytes(20),
}
