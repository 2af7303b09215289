"""The table of known names, held against torch; and what is common and harmless, which every writer takes without a
word."""

from __future__ import annotations

import _compat_pickle
import argparse
import collections
import copyreg
import datetime
import decimal
import enum
import functools
import importlib
import inspect as inspect_module
import logging
import pathlib
import pickle
import random
import re
import types
import typing
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._weights_only_unpickler import _get_allowed_globals

import ckptool
from ckptool.checkpoint.nodes import Global
from ckptool.errors import UnsafeObject
from ckptool.pickles import known
from ckptool.pickles import plain as values
from ckptool.pickles.known import TORCH_CLASSES
from tests.support.errors import refused
from tests.support.hostile_inputs import ONE, name, pickle_zip, program, text
from tests.support.looped import looped

OLD = ("torch.nn.backends", "torch.nn.modules.dropout_")
REMOVED = {"_LinearWithBias", "_UpsamplingBase"}


@pytest.mark.filterwarnings("ignore")
def test_listed_classes_of_torch_are_there() -> None:
    for module, each in known.named(TORCH_CLASSES):
        if not module.startswith(OLD) and each not in REMOVED:
            assert isinstance(getattr(importlib.import_module(module), each, None), type), (module, each)


def test_every_module_of_torch_nn_is_listed() -> None:
    public = [value for value in vars(nn).values() if isinstance(value, type) and issubclass(value, nn.Module)]
    optimizers = [v for v in vars(torch.optim).values() if isinstance(v, type) and issubclass(v, torch.optim.Optimizer)]
    schedules = vars(torch.optim.lr_scheduler)
    schedulers = [schedules[each] for each in torch.optim.lr_scheduler.__all__]
    for cls in (*public, *optimizers, *schedulers):
        kind = known.kind_of(Global(cls.__module__, cls.__qualname__))
        assert kind is not None and kind.empty and not kind.custom, cls


def test_every_word_for_a_value_is_one_that_a_value_is_made_for() -> None:
    words = {kind.value for kind in known._KINDS.values()} - {""}
    assert words - {"uninitialized"} == set(values._VALUES)


def test_every_name_is_also_known_as_protocol_2_spells_it() -> None:
    for (module, each), kind in known._KINDS.items():
        renamed = _compat_pickle.REVERSE_IMPORT_MAPPING.get(module, module)
        spelled = _compat_pickle.REVERSE_NAME_MAPPING.get((module, each), (renamed, each))
        assert known.kind_of(Global(*spelled)) == kind, (module, each, spelled)


# What is common and harmless ------------------------------------------------------------------------------------------


class Net(nn.Module):
    """People's own model."""

    class Block(nn.Sequential):
        """A nested class."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net.Block(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.GELU(), nn.Dropout(0.1))
        self.norm = functools.partial(nn.LayerNorm, eps=1e-6)
        self.activation = torch.nn.functional.relu
        self.log = logging.getLogger("net")
        self.names = {0: "person"}


class Options:
    """An object as fairseq's dictionary or ultralytics' namespace is: a class and its attributes."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


WEIGHTS = {"module.a.weight": torch.ones(2, 2), "module.a.bias": torch.zeros(2)}

HARMLESS: dict[str, Callable[[], Any]] = {
    "namespace": lambda: argparse.Namespace(lr=0.1, path=pathlib.Path("a/b"), sizes=[1, 2]),
    "simple namespace": lambda: types.SimpleNamespace(a=1),
    "numpy scalars": lambda: [np.float32(1), np.int64(2), np.bool_(True), np.str_("a"), np.datetime64("2020-01-01")],
    "numpy arrays": lambda: [np.ones(3), np.array(["a"]), np.array([1, "a"], object), np.zeros(2, [("a", "i4")]),
                             np.char.array(["a"]), np.matrix([[1]])],
    "numpy types": lambda: [np.float32, np.dtype("f8"), np.ndarray],
    "random states": lambda: {
        "python": random.getstate(),
        "generator": random.Random(1),
        "numpy": np.random.get_state(),
        "legacy": np.random.RandomState(1),
        "new": np.random.default_rng(1),
        "philox": np.random.Generator(np.random.Philox(1)),
        "torch": torch.get_rng_state(),
        "torch generator": torch.Generator(),
    },
    "paths": lambda: [pathlib.Path("/a"), pathlib.PurePosixPath("b"), pathlib.PureWindowsPath("c:/d")],
    "dates and numbers": lambda: [
        datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc),
        datetime.timedelta(1),
        decimal.Decimal("1.5"),
        uuid.UUID(int=5),
        1j,
        range(3),
        slice(1, 2),
        bytearray(b"a"),
        1 << 200,
    ],
    "containers": lambda: [
        collections.defaultdict(list, a=[1]),
        collections.Counter("aab"),
        collections.deque([1, 2], maxlen=3),
        collections.OrderedDict(a=1),
        {1, 2},
        frozenset({3}),
    ],
    "types": lambda: [typing.Any, dict[str, int], typing.Optional[int], typing.Union[int, str],  # noqa: UP007, UP045
                      type(None), ..., int, list, int | None],
    "a pattern": lambda: re.compile("a+", re.IGNORECASE),
    "torch values": lambda: [torch.Size([1]), torch.device("cuda:0"), torch.float16, torch.__version__],
    "modules": lambda: nn.Sequential(nn.LSTM(2, 2), nn.TransformerEncoderLayer(4, 2), nn.MultiheadAttention(4, 2)),
    "quantized convolutions": lambda: [
        torch.ao.nn.quantized.Conv1d(2, 2, 1), torch.ao.nn.quantized.Conv2d(2, 2, 1, bias=False),
        torch.ao.nn.quantized.Conv3d(2, 2, 1),
    ],
    "hooks of torch": lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
    "pruned": lambda: _pruned(),
    "an optimizer": lambda: torch.optim.AdamW([nn.Parameter(torch.ones(2))]),
    "a scheduler": lambda: torch.optim.lr_scheduler.OneCycleLR(
        torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1), 1, 10
    ),
    "a scaler": lambda: torch.amp.GradScaler("cpu"),
    "a data set": lambda: torch.utils.data.TensorDataset(torch.ones(2)),
    "references": lambda: {"optimizer": torch.optim.Adam, "loss": nn.CrossEntropyLoss, nn.ReLU: "as a key"},
    "a jagged tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}  # fmt: skip


def _pruned() -> nn.Module:
    import torch.nn.utils.prune as prune

    return prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=0.5)  # type: ignore[no-any-return]


OWN: dict[str, Callable[[], Any]] = {
    "a whole model": Net,
    "a model in DataParallel": lambda: nn.DataParallel(Net()),
    "an object": lambda: Options(names={0: "a"}, other=Options(w=torch.ones(2)), level=[1, None]),
    "objects in a set and as keys": lambda: [{Options()}, {Options(): 1}],
}


def write_with_every_verb(file: Path, folder: Path) -> list[Any]:
    """What each of the usual writers reports of a file with weights in `state_dict`."""
    return [
        ckptool.remap(file, folder / "remap.pt", to="cuda:1", verify=True),
        ckptool.edit(file, folder / "edit.pt", set={"epoch": 3}),
        ckptool.strip_module(file, folder / "strip.pt", at="state_dict"),
        ckptool.strip_module(folder / "strip.pt", folder / "copy.pt", at="state_dict"),
        ckptool.convert(file, folder / "convert.pt"),
    ]


@pytest.mark.filterwarnings("ignore")
@looped("title", HARMLESS)
@pytest.mark.parametrize("protocol", [2, 4])
def test_what_is_common_and_harmless_is_written_without_a_word(title: str, protocol: int, tmp_path: Path) -> None:
    file = tmp_path / "in.pt"
    torch.save({"state_dict": WEIGHTS, "epoch": 1, "x": HARMLESS[title]()}, file, pickle_protocol=protocol)
    codes = {note.code for done in write_with_every_verb(file, tmp_path) for note in done.notes}
    codes |= {note.code for note in ckptool.inspect(file).notes}
    assert not codes & {"unsafe-global", "custom-class"} and not ckptool.scan(file).findings
    assert torch.load(tmp_path / "convert.pt", weights_only=False).keys() == {"state_dict", "epoch", "x"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", OWN)
def test_objects_of_peoples_own_classes_are_written_on_and_mentioned(title: str, tmp_path: Path) -> None:
    file = tmp_path / "in.pt"
    torch.save({"state_dict": WEIGHTS, "epoch": 1, "x": OWN[title]()}, file)
    for done in write_with_every_verb(file, tmp_path):
        assert [note.code for note in done.notes if note.code in ("unsafe-global", "custom-class")] == ["custom-class"]
    (note,) = [note for note in ckptool.inspect(file).notes if note.code in ("unsafe-global", "custom-class")]
    assert note.code == "custom-class" and __name__ in note.message and "imports and creates" in note.message
    assert ckptool.scan(file).findings
    refused(UnsafeObject, tmp_path, lambda: ckptool.load(file))
    assert type(torch.load(tmp_path / "convert.pt", weights_only=False)["x"]) is type(OWN[title]())


def test_nothing_is_made_of_what_a_pickle_only_names(tmp_path: Path) -> None:
    file = tmp_path / "in.pt"
    file.write_bytes(pickle_zip(program(b"}" + text("x") + name("posix", "system") + b"s"), ONE))
    refused(UnsafeObject, tmp_path, lambda: ckptool.convert(file, tmp_path / "out.pt"), r"refers to posix\.system at x")


# What torch.load(weights_only=True) takes -----------------------------------------------------------------------------


def takes(file: Path) -> bool:
    try:
        torch.load(file, weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


def is_said_to_be_taken(file: Path) -> bool:
    codes = {note.code for note in ckptool.inspect(file).notes}
    return not codes & {"weights-only", "pickle-protocol", "unsafe-global", "custom-class"}


@pytest.mark.filterwarnings("ignore")
def test_names_are_said_to_be_taken_where_torch_takes_them(tmp_path: Path) -> None:
    kinds = {full: known.kind_of(Global(*full.rpartition(".")[::2])) for full in _get_allowed_globals()}
    listed = [full for full, kind in kinds.items() if kind is not None and kind.stands]
    others = """torch.nn.modules.linear.Linear torch.optim.adam.Adam torch.channels_last torch.nn.parameter.Buffer
        torch._utils._rebuild_xla_tensor builtins.list builtins.len collections.deque collections.defaultdict
        numpy.dtype numpy.ndarray datetime.datetime"""
    assert len(listed) > 100
    for full in (*listed, *others.split()):
        module, _, attribute = full.rpartition(".")
        (tmp_path / "in.pt").write_bytes(pickle_zip(program(b"}" + text("x") + name(module, attribute) + b"s"), ONE))
        assert takes(tmp_path / "in.pt") is is_said_to_be_taken(tmp_path / "in.pt"), full


def _noted(tensor: torch.Tensor, note: Any) -> torch.Tensor:
    tensor.note = note  # type: ignore[attr-defined]
    return tensor


NESTED_SETS: dict[str, Callable[[], Any]] = {
    "sets in a set": lambda: {frozenset({1, 2}), frozenset(), 3},
    "sets in keys": lambda: {(frozenset({1}), 2): 3, frozenset({4}): 5},
    "sets and members in a set": lambda: {frozenset({inspect_module.Parameter.empty}), "a", Colour.RED},
}


@pytest.mark.parametrize("title", NESTED_SETS)
def test_plain_values_of_what_is_hashed_can_be_hashed(title: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "x": NESTED_SETS[title]()}, tmp_path / "in.pt")
    assert not takes(tmp_path / "in.pt") and not is_said_to_be_taken(tmp_path / "in.pt")
    ckptool.convert(tmp_path / "in.pt", tmp_path / "out.pt", weights_only=True)
    assert len(torch.load(tmp_path / "out.pt", weights_only=True)["x"]) in (2, 3)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize(
    "value",
    [b"a", b"", bytearray(b"a"), bytearray(), "a", frozenset()]
    + [
        [_noted(torch.ones(2), note)] for note in (torch.ones(1), b"", bytearray(), frozenset(), {1}, {"a": (b"",)}, 1j)
    ],
)
@pytest.mark.parametrize("protocol", [2, 3])
def test_bytes_and_attributes_are_said_to_be_taken_where_torch_takes_them(
    value: Any, protocol: int, tmp_path: Path
) -> None:
    torch.save({"x": value}, tmp_path / "in.pt", pickle_protocol=protocol)
    assert takes(tmp_path / "in.pt") is is_said_to_be_taken(tmp_path / "in.pt")


# Live objects ---------------------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Registered:
    """A class whose reducer is in `copyreg`'s table, as tensordict's is."""


LIVE: dict[str, Any] = {
    "a method of C's": torch.relu, "a class without a name": type(None), "a union of types": int | None,
    "a pattern": re.compile("a+"), "a nested class": Net.Block, "an object of one": Net.Block(nn.ReLU()),
    "the class of a constant": type(...), "a registered class": Registered(), "a member": Colour.RED,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("title", LIVE)
def test_what_pickle_can_write_can_be_saved(title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg.dispatch_table, Registered, lambda _: (complex, (1.0, 2.0)))
    ckptool.save({"x": LIVE[title]}, tmp_path / "out.pt", keep_unknown=True)
    torch.save({"x": LIVE[title]}, tmp_path / "stock.pt", pickle_protocol=4)
    ours, theirs = (torch.load(tmp_path / each, weights_only=False)["x"] for each in ("out.pt", "stock.pt"))
    assert ours == theirs or repr(ours) == repr(theirs)


def test_a_member_of_a_known_enum_by_its_name_runs_nothing_and_another_attribute_does(tmp_path: Path) -> None:
    """As Python 3.11.0 to 3.11.3 pickle every member."""
    intervals, stages = (
        ("transformers.trainer_utils", "IntervalStrategy"),
        ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    )
    cases = {(*intervals, "STEPS"): "good", (*stages, "weights"): "good", (*intervals, "__class__"): "unsafe-global"}
    cases |= {
        ("timm.layers.format", "Format", "NCHW"): "good",
        ("os", "path", "join"): "unsafe-global",
        (*intervals, "a.b"): "unsafe-global",
    }
    for module in ("builtins", "__builtin__"):
        for (home, owner, member), state in cases.items():
            call = name(module, "getattr") + name(home, owner) + text(member) + b"\x86R"
            file = tmp_path / "in.pt"
            file.write_bytes(pickle_zip(program(b"}" + text("x") + call + b"s"), ONE))
            (row,) = ckptool.scan(file).files
            assert row.state == state, (home, owner, member)
