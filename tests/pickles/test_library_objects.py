"""Objects of tensordict and of torch_geometric, whose states are plain: every verb that keeps a tree keeps them.

The classes stand here for the real ones: with their names, and with `__reduce__`, `__getstate__` and `__setstate__` as
tensordict/_reductions.py, tensordict/_td.py and torch_geometric/data/{data,storage}.py have them.
"""

from __future__ import annotations

import copyreg
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool


class WithState:
    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class TensorDict(WithState):
    def __init__(self, values: dict[str, Any], *size: int) -> None:
        self._tensordict, self._batch_size, self._device = values, torch.Size(size), torch.device("cpu")
        self._td_dim_names, self._is_locked = None, False


def _make_td(cls: type, state: dict[str, Any]) -> Any:
    made = cls.__new__(cls)
    made.__setstate__(state)
    return made


class DataTensorAttr: ...


class DataEdgeAttr: ...


class GlobalStorage(WithState):
    def __init__(self, values: dict[str, Any], parent: Any) -> None:
        self._mapping, self._parent = values, parent


class Data(WithState):
    def __init__(self, **values: Any) -> None:
        self._edge_attr_cls, self._tensor_attr_cls = DataEdgeAttr, DataTensorAttr
        self._store = GlobalStorage(values, self)


HOMES = {
    "tensordict._td": [TensorDict],
    "tensordict._reductions": [_make_td],
    "torch_geometric.data.data": [Data, DataEdgeAttr, DataTensorAttr],
    "torch_geometric.data.storage": [GlobalStorage],
}


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for home, members in HOMES.items():
        for end in range(home.count(".") + 1):
            name = ".".join(home.split(".")[: end + 1])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        for member in members:
            monkeypatch.setattr(member, "__module__", home)
            monkeypatch.setattr(sys.modules[home], member.__name__, member, raising=False)
    monkeypatch.setitem(copyreg.dispatch_table, TensorDict, lambda made: (_make_td, (type(made), made.__getstate__())))


def files() -> dict[str, Any]:
    nested = TensorDict({"a": torch.arange(6.0).reshape(3, 2), "inner": TensorDict({"b": torch.ones(3)}, 3)}, 3)
    graph = Data(x=torch.rand(4, 3), edge_index=torch.zeros(2, 5, dtype=torch.long))
    return {
        "tensordict": nested,
        "buffer": {"buffer": nested, "state_dict": {"w": torch.ones(2)}},
        "graph": graph,
        "graphs": [graph, Data(y=torch.ones(1))],
        "dataset": ({"x": torch.ones(4, 3)}, {"x": torch.tensor([0, 4])}, Data),
    }


def values_of(node: Any) -> Any:
    """An object as plain containers of its values; a class as its name."""
    if isinstance(node, WithState):
        state = {key: value for key, value in node.__getstate__().items() if key != "_parent"}
        return type(node).__name__, values_of(state)
    if isinstance(node, dict):
        return {key: values_of(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [values_of(value) for value in node]
    if isinstance(node, torch.Tensor):
        return str(node.dtype), node.tolist()
    return node.__name__ if isinstance(node, type) else node


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("name", files())
def test_every_verb_that_keeps_a_tree_keeps_them(name: str, tmp_path: Path) -> None:
    file, given = tmp_path / "in.pt", files()[name]
    expected = values_of(given)
    torch.save(given, file)
    assert not ckptool.scan(file).findings
    ckptool.remap(file, tmp_path / "remapped.pt", to="cuda:0")
    ckptool.convert(file, tmp_path / "all.safetensors", all=True)
    ckptool.convert(tmp_path / "all.safetensors", tmp_path / "back.pt")
    for out in ("remapped.pt", "back.pt"):
        found = torch.load(tmp_path / out, weights_only=False, map_location="cpu")
        assert values_of(found) == expected
    assert {note.code for note in ckptool.inspect(file).notes} == {"weights-only"}


@pytest.mark.usefixtures("libraries")
def test_what_is_in_their_state_is_judged(tmp_path: Path) -> None:
    for state in ({"_tensordict": {"a": print}}, {"__class__": 1}, {"_tensordict": TensorDict}):
        hidden = type("Hidden", (), {"__reduce__": lambda _, state=state: (_make_td, (TensorDict, state))})()
        torch.save({"x": hidden}, tmp_path / "in.pt")
        flagged = bool(ckptool.scan(tmp_path / "in.pt").findings)
        assert flagged is (TensorDict not in state.values()), state
