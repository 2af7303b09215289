"""What the tests of live modules share: models before and after, and which traps need code of their own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import CkptoolError
from tests.support.errors import three_parts


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
