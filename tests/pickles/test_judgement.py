"""What is said of classes: people's own, those of libraries that torch installs, torch's own of all versions."""

from __future__ import annotations

import collections
import contextlib
import copyreg
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
from torch import nn

import ckptool
from ckptool.errors import CkptoolError
from tests.support.cli import Run
from tests.support.files import saved
from tests.support.hidden import hidden_effects
from tests.support.hostile_inputs import name, pickle_zip, program, tensor, text

ITEMS, ELEMENTS, STATE = text("a") + b"K\x01s", b"K\x01a", b"}" + text("a") + b"K\x01sb"


def _file(path: Path, module: str, attribute: str, given: bytes) -> Path:
    value = name(module, attribute) + b")\x81" + given
    path.write_bytes(pickle_zip(program(b"}(" + text("w") + tensor((4,), (1,)) + text("x") + value + b"u")))
    return path


def test_known_dictionaries_and_lists_take_them_silently(tmp_path: Path) -> None:
    for module, attribute in (
        ("lightning_fabric.utilities.data", "AttributeDict"),
        ("easydict", "EasyDict"),
        ("addict.addict", "Dict"),
        ("mmcv.utils.config", "ConfigDict"),
        ("mmengine.config.config", "ConfigDict"),
        ("argparse", "Namespace"),
        ("ultralytics.utils", "IterableSimpleNamespace"),
        ("munch", "Munch"),
    ):
        assert not ckptool.scan(_file(tmp_path / "in.pt", module, attribute, ITEMS)).findings, module


def test_private_and_removed_layers_of_torch_pass(tmp_path: Path) -> None:
    quiet = (("linear", "_LinearWithBias"), ("conv", "_ConvTransposeMixin"), ("loss", "NLLLoss2d"))
    for module, attribute in (*quiet, ("linear", "NoSuchLayer"), ("activation", "_Gone")):
        file = _file(tmp_path / "in.pt", f"torch.nn.modules.{module}", attribute, STATE)
        assert bool(ckptool.scan(file).findings) is ((module, attribute) not in quiet)
        assert ckptool.rename(file, ["w => v"], tmp_path / "out.pt", overwrite=True)
        for given in (ITEMS, ELEMENTS):  # of which no layer has any
            assert ckptool.scan(_file(tmp_path / "in.pt", f"torch.nn.modules.{module}", attribute, given)).findings
    hooks = b"}(" + b"".join(b"K" + bytes([n]) + value for n, value in enumerate((b"N", b"N", b"}", b"\x88", b"N")))
    file = _file(tmp_path / "in.pt", "torch.nn.modules.linear", "Tensor", hooks + b"ub")  # which its module imports
    assert ckptool.scan(file).findings
    for attribute in ("functional", "os.system", "Linear.forward"):  # no classes
        assert ckptool.scan(_file(tmp_path / "in.pt", "torch.nn.modules.linear", attribute, STATE)).findings
    arguments = name("torch.nn.modules.linear", "_LinearWithBias") + b"K\x02K\x02\x86R"
    (tmp_path / "in.pt").write_bytes(pickle_zip(program(b"}" + text("x") + arguments + b"s")))
    assert ckptool.scan(tmp_path / "in.pt").findings


class _Quantized(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.quant, self.layer, self.dequant = quantization.QuantStub(), layer, quantization.DeQuantStub()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dequant(self.layer(self.quant(x)))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")
def test_quantized_programs_of_torch_are_benign(tmp_path: Path, run: Run) -> None:
    made: list[nn.Module] = []
    inputs = ((nn.Linear(4, 4), (2, 4)), (nn.Conv1d(2, 2, 3), (1, 2, 8)), (nn.Conv2d(2, 2, 3), (1, 2, 8, 8)))
    for layer, shape in inputs:
        model = _Quantized(layer).eval()
        model.qconfig = quantization.get_default_qconfig(torch.backends.quantized.engine)  # type: ignore[assignment]
        prepared = quantization.prepare(model)
        prepared(torch.ones(shape))
        made.append(quantization.convert(prepared))
    made.append(quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear}))
    embedding = nn.Sequential(nn.Embedding(10, 12)).eval()
    embedding.qconfig = quantization.float_qparams_weight_only_qconfig  # type: ignore[assignment]
    made.append(quantization.convert(quantization.prepare(embedding)))
    for model in made:
        scripted = torch.jit.script(model)
        for program_of in (scripted, torch.jit.freeze(scripted.eval())):
            torch.jit.save(program_of, tmp_path / "q.pt")
            assert not ckptool.scan(tmp_path / "q.pt").findings
            out = run("scan", str(tmp_path / "q.pt")).out
            assert "holds a program" in out and "nothing in it would run" not in out
    torch.save(made[-2], tmp_path / "module.pt")
    assert not ckptool.scan(tmp_path / "module.pt").findings


@pytest.mark.filterwarnings("ignore")
def test_a_program_is_found_however_its_records_are_spelled(tmp_path: Path) -> None:
    """torch looks for records without regard to case."""
    file = tmp_path / "in.pt"
    content = b""
    for case in hidden_effects(random.Random(3)):
        if case.title.startswith("program in linear") and not case.fine:
            content = case.content
            break
    for old, new in ((b"constants.pkl", b"CONSTANTS.PKL"), (b"/code/", b"/CODE/"), (b"linear.py", b"linear.PY")):
        file.write_bytes(content.replace(old, new))
        with contextlib.suppress(CkptoolError):  # it cannot be opened at all
            assert ckptool.scan(file).findings, new


class Made:
    """Pickles as an object of a class, made with these arguments and given this state."""

    def __init__(self, made: Any, arguments: tuple[Any, ...], state: Any = None) -> None:
        self.parts = made, arguments, state

    def __reduce__(self) -> Any:
        return self.parts


def test_states_of_generators_and_layers_are_those_of_their_classes(tmp_path: Path) -> None:
    layer = torch.nn.LSTM
    odd = {
        "numbers": Made(random.Random, (), (2, range(10**12), None)),
        "few": Made(random.Random, (), (3, (1, 2, 3), None)),
        "words": Made(random.Random, (), (2, ("a",) * 625, None)),
        "layers": Made(layer.__new__, (layer,), {"num_layers": 10**9}),
        "counted": Made(layer.__new__, (layer,), collections.Counter(num_layers=10**9)),
    }
    for title, value in odd.items():
        (row,) = ckptool.scan(saved({"x": value}, tmp_path / f"{title}.pt")).files
        assert row.state == "unsafe-global", title
    usual = {"random": random.Random(3), "layer": layer(2, 3), "used": random.Random(4)}
    usual["used"].gauss(0, 1)
    (row,) = ckptool.scan(saved(usual, tmp_path / "usual.pt")).files
    assert row.is_good


# Objects of tensordict and of torch_geometric -------------------------------------------------------------------------


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
