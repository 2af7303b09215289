"""Whole modules: their state dict is what torch gives, without their class; nothing is imported for it."""

from __future__ import annotations

import collections
import dataclasses
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool.checkpoint import TensorEntry
from ckptool.checkpoint.nodes import Global, Object, OrderedDict, Set
from ckptool.checkpoint.tree import MAX_NAMES, module_state_dict
from ckptool.conventions.state_dicts import WEIGHTS, find_state_dicts
from ckptool.errors import UsageError
from ckptool.formats import read
from tests.support.cli import Run
from tests.support.files import load, saved, torch_bytes, written
from tests.support.same import assert_same_objects


class Net(nn.Module):
    """A bit of everything: buffers of both kinds, None entries, ties, a module in two places, tensors that are plain
    attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.emb, self.out = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.out.weight = self.emb.weight
        self.again = self.fc
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("none", None)
        self.plain = torch.full((3,), 5.0)
        self.values = nn.ParameterList([torch.ones(2), torch.ones(3)])
        self.named = nn.ParameterDict({"a/b": torch.ones(1)})
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.view = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())


class WithExtra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"n": 1}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 2, num_layers=2, bidirectional=True)
        self.gru = nn.GRU(2, 2)


MODELS: dict[str, Any] = {
    "everything": Net,
    "linear": lambda: nn.Linear(2, 2),
    "sequential": lambda: nn.Sequential(
        collections.OrderedDict(conv=nn.Conv2d(1, 2, 3), bn=nn.BatchNorm2d(2), act=nn.ReLU())
    ),
    "recurrent": Recurrent,
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "data parallel": lambda: nn.DataParallel(Net()),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)),
    "weight norm": lambda: nn.utils.weight_norm(nn.Linear(2, 3)),
    "frozen, half": lambda: Net().half().requires_grad_(False),
    "quantization-aware": lambda: nn.Sequential(torch.ao.quantization.FakeQuantize(), nn.Linear(2, 2)),
    "traced by fx": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())),
    "many": lambda: nn.Sequential(*[nn.Linear(2, 2) for _ in range(300)]),
}


@pytest.fixture(autouse=True)
def _the_models_module() -> Iterator[None]:
    """The classes live in `gone_models`, which is gone when the file is opened."""
    module = types.ModuleType("gone_models")
    for cls in (Net, WithExtra, Recurrent):
        cls.__module__ = "gone_models"
        setattr(module, cls.__name__, cls)
    sys.modules["gone_models"] = module
    yield
    sys.modules.pop("gone_models", None)


def module_file(model: Any, path: Path, **options: Any) -> Path:
    """The file of a model whose module can no longer be imported."""
    written(torch_bytes(model, **options), path)
    sys.modules.pop("gone_models", None)
    return path


def assert_is_state_dict(names: Any, expected: dict[str, Any]) -> None:
    assert list(names) == [key for key in expected if not key.endswith("_extra_state")]
    for key, entry in names.items():
        tensor = expected[key]
        assert isinstance(entry, TensorEntry) and not any(entry.flags), key
        assert entry.shape == tuple(tensor.shape) and entry.stride == tensor.stride(), key
        assert torch.equal(entry.torch(), tensor) and entry.dtype.torch == str(tensor.dtype).removeprefix("torch."), key


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
def test_the_state_dict_of_a_whole_module_is_torchs(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    expected = model.state_dict()
    file = module_file(model, tmp_path / "model.pt")
    names = module_state_dict(read(file).tree)
    assert names is not None
    assert_is_state_dict(names, expected)

    ckptool.convert(file, tmp_path / "weights.safetensors", ties="copy", verify=True)
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "weights.safetensors")
    assert weights.keys() == expected.keys()
    assert all(
        torch.equal(weights[key], expected[key]) and weights[key].dtype == expected[key].dtype for key in expected
    )

    done = ckptool.convert(f"{file}#/", tmp_path / "weights.pt", verify=True)
    assert "without its class" in done.summary
    again = load(tmp_path / "weights.pt")
    del expected._metadata
    assert_same_objects(dict(expected), dict(again))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_and_the_middle_of_a_dictionary(protocol: int, tmp_path: Path) -> None:
    model = Net()
    file = module_file({"epoch": 3, "model": model}, tmp_path / "model.pt", pickle_protocol=protocol)
    (_, root) = find_state_dicts(read(file))
    assert (root.path, root.kind, root.detail) == (("model",), WEIGHTS, "whole module gone_models.Net")
    assert_is_state_dict(root.node, model.state_dict())
    with pytest.raises(ModuleNotFoundError, match="gone_models"):
        torch.load(file, weights_only=False)
    done = ckptool.convert(file, tmp_path / "out.safetensors", verify=True)
    assert done.facts["left_behind"] == ["model/_buffers/passing", "model/plain", "epoch"]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_the_method_state_dict_saved_in_place_of_its_result(nested: bool, own: bool, tmp_path: Path, run: Run) -> None:
    """`torch.save(model.state_dict, …)`, without the parentheses: the pickle holds the model."""
    model = Net() if own else nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    value = {"net": model.state_dict, "epoch": 3} if nested else model.state_dict
    file = module_file(value, tmp_path / "model.pt") if own else saved(value, tmp_path / "model.pt")
    name = "gone_models.Net" if own else "torch.nn.modules.container.Sequential"
    (root,) = (root for root in find_state_dicts(read(file)) if root.is_model)
    assert (root.detail, root.call) == (f"state_dict method, saved uncalled, of a {name}", "()")
    found = run("doctor", str(file))
    assert ("model.load_state_dict(checkpoint['net']())" in found.out) is nested
    assert run("doctor", str(file), "--fix", "-o", str(tmp_path / "out.pt")).code == 0
    weights = torch.load(tmp_path / "out.pt")
    assert_same_objects(dict(model.state_dict()), dict(weights))


@pytest.mark.parametrize("verb", ["strip_module", "add_module", "rename", "cast"])
def test_verbs_on_keys_say_that_a_whole_module_has_none(verb: str, tmp_path: Path) -> None:
    file = module_file({"model": nn.DataParallel(Net())}, tmp_path / "model.pt")
    options = {
        "rename": {"rules_file": str(written(b"- a.b => c.d\n", tmp_path / "rules.yaml"))},
        "cast": {"dtype": "bf16"},
    }.get(verb, {})
    for at in (None, "model"):
        with pytest.raises(UsageError, match="whole module") as refused:
            getattr(ckptool, verb)(file, out=tmp_path / "out.pt", at=at, **options)
        assert f"ckptool convert '{file}#model' -o OUT.safetensors" in refused.value.fix
    assert {path.name for path in tmp_path.iterdir()} <= {"model.pt", "rules.yaml"}


# Modules as files may have them, made by hand -------------------------------------------------------------------------


def entry(n: int = 1) -> TensorEntry:
    from ckptool.checkpoint import InlineBytes, Storage
    from ckptool.checkpoint.dtypes import BY_TORCH

    return TensorEntry(Storage(InlineBytes(bytes(4 * n))), BY_TORCH["float32"], (n,), (1,))


def module(name: str = "a.B", **state: Any) -> Object:
    made = Object(Global(*name.rsplit(".", 1)), (), "new")
    made.state = {"_parameters": OrderedDict(), "_buffers": OrderedDict(), "_modules": OrderedDict()} | state
    return made


def test_before_non_persistent_buffers_and_before_rebuild_functions() -> None:
    old = Object(Global("torch.nn.parameter", "Parameter"), (entry(3),), "call")
    old.state = (True, False, OrderedDict())
    names = module_state_dict(module(_parameters={"w": old, "none": None}, _buffers={"b": entry(2)}))
    assert names is not None and [(key, value.shape) for key, value in names.items()] == [("w", (3,)), ("b", (2,))]


def test_what_torch_compile_pickles_is_a_call_with_the_module_in_it() -> None:
    wrapped = Object(Global("torch._dynamo.eval_frame", "OptimizedModule"), (module(_parameters={"w": entry()}), None))
    assert list(module_state_dict(wrapped) or ()) == ["_orig_mod.w"]
    assert module_state_dict(Object(wrapped.fn, (3,))) == {}


def test_what_stylegan_pickles_is_a_call_with_source_code_and_state() -> None:
    rebuild = Global("torch_utils.persistence", "_reconstruct_persistent_obj")
    made = Object(rebuild, ({"module_src": "class G: …", "state": module(_parameters={"w": entry()}).state},))
    assert list(module_state_dict(module(_modules={"mapping": made})) or ()) == ["mapping.w"]
    assert [module_state_dict(Object(rebuild, args)) for args in ((3,), ({},), ({"state": 3},))] == [None] * 3


def test_the_non_persistent_set_may_be_of_a_hostile_kind() -> None:
    for left_out in (Set(["b"]), [], None, 3, {}):
        names = module_state_dict(module(_buffers={"b": entry()}, _non_persistent_buffers_set=left_out))
        assert list(names or ()) == ([] if isinstance(left_out, Set) else ["b"])


@pytest.mark.parametrize("part", ["_parameters", "_buffers", "_modules"])
@pytest.mark.parametrize("value", [None, 3, [], {1: None}])
def test_what_only_looks_like_a_module_is_none(part: str, value: Any) -> None:
    assert module_state_dict(module(**{part: value})) is None
    assert module_state_dict(value) is None


def test_a_module_within_itself_ends() -> None:
    top = module(_parameters={"w": entry()})
    child = module(_modules={"up": top, "self": None})
    child.state["_modules"]["self"] = child
    top.state["_modules"]["child"] = child
    assert list(module_state_dict(top) or ()) == ["w"]


def test_modules_that_double_at_every_level_stay_bounded() -> None:
    below = module(_parameters={"w": entry()})
    for _ in range(60):
        below = module(_modules={"a": below, "b": below})
    assert module_state_dict(below) is None
    long = module(_parameters={"w": entry()})
    for _ in range(400):
        long = module(_modules={"x" * (MAX_NAMES // 1000): long})
    assert module_state_dict(long) is None


# Modules that learners, agents and dictionaries of people's own classes hold ------------------------------------------


@dataclasses.dataclass
class Agent:
    net: Any
    steps: int = 1


class OwnDict(dict):  # type: ignore[type-arg]
    pass


def held() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


HELD = held().state_dict()


def test_keys_of_weights_in_an_object_are_renamed_there(tmp_path: Path) -> None:
    torch.save({"agent": Agent(HELD)}, tmp_path / "a.pt")
    ckptool.rename(tmp_path / "a.pt", ["0.* => first.*"], out=tmp_path / "b.pt")
    agent = torch.load(tmp_path / "b.pt", weights_only=False)["agent"]
    assert type(agent) is Agent and torch.equal(agent.net["first.weight"], HELD["0.weight"])
    torch.save(OwnDict(HELD), tmp_path / "own.pt")
    with pytest.raises(UsageError, match="pickled with its class"):
        ckptool.rename(tmp_path / "own.pt", ["0.* => first.*"], out=tmp_path / "c.pt")
