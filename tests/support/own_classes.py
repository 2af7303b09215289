"""Classes of people's own, as they stand in checkpoints: plain objects, records, slots, names in classes, models."""

import dataclasses
import enum
from typing import Any, NamedTuple

import torch


class Plain:
    """An object with a dictionary."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    """An object with slots and a dictionary beside them."""

    __slots__ = ("__dict__", "one", "two")


class Stateful:
    """An object that says itself what its state is, and takes it back."""

    def __init__(self, state: Any) -> None:
        self.inner = state

    def __getstate__(self) -> Any:
        return ("state", self.inner)

    def __setstate__(self, state: Any) -> None:
        self.inner = state[1]


@dataclasses.dataclass(eq=False)
class Record:
    name: str
    values: Any


class Point(NamedTuple):
    x: Any
    y: Any


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


class Names(dict[Any, Any]):
    """A dictionary with attributes."""


class Items(list[Any]):
    """A list with attributes."""


class Outer:
    class Inner(Plain):
        class Innermost(Plain):
            pass

    @staticmethod
    def function() -> None:
        pass


class Net(torch.nn.Module):
    """A model whose tensors are in every place that a module has for them, and in some that it has not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU())
        self.head = torch.nn.Linear(3, 4)
        self.head.weight = self.body[0].weight  # tied
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)
        self.plain = torch.randn(2, 2)
        self.kept = [torch.randn(2), {"deep": torch.randn(1)}]
        self.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)


class Thing:
    """An object of a class that ckptool does not know; two are never equal."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __repr__(self) -> str:
        return f"Thing({self.n})"
