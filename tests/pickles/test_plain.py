"""Plain values of inert objects: what people see of a date, a path, an array, a configuration; and JSON that cannot
explode."""

from __future__ import annotations

import argparse
import base64
import collections
import datetime
import decimal
import fractions
import json
import pathlib
import types
import uuid
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import numpy
import numpy as np
import pytest
import torch

import ckptool
from ckptool.checkpoint import InlineBytes, Storage, TensorEntry
from ckptool.checkpoint.dtypes import by_name
from ckptool.checkpoint.nodes import ByteString, Global, Object, OrderedDict, Set
from ckptool.checkpoint.numpy_arrays import Array
from ckptool.errors import Conflict
from ckptool.pickles.plain import expand, plain, summary, to_json
from ckptool.pickles.reduce import from_live
from fixtures.traps import TRAPS
from tests.support.files import torch_bytes
from tests.support.looped import looped


def nodes(value: Any) -> Any:
    """The nodes that a pickle of a live value decodes to."""
    return from_live(value, keep_unknown=True)


def made(name: str, args: tuple[Any, ...] = (), how: str = "new", **parts: Any) -> Object:
    module, _, attribute = name.rpartition(".")
    node = Object(Global(module, attribute), args, how)
    for part, value in parts.items():
        setattr(node, part, value)
    return node


ZONE = datetime.timezone(datetime.timedelta(hours=2))
VALUES = [
    datetime.date(2024, 2, 29), datetime.datetime(2024, 2, 29, 12, 30),
    datetime.datetime(2024, 2, 29, tzinfo=datetime.timezone.utc), datetime.datetime(2024, 2, 29, tzinfo=ZONE),
    datetime.time(1, 2, 3, 4), datetime.timedelta(days=-1, microseconds=5), ZONE, decimal.Decimal("1.10"),
    decimal.Decimal("NaN"), fractions.Fraction(1, 3), uuid.UUID(int=7), pathlib.PurePosixPath("/a/b"),
    pathlib.PureWindowsPath("C:/a"), pathlib.Path("x"), range(1, 9, 2), slice(None, 3),
]  # fmt: skip


@looped("value", VALUES, ids=repr)
def test_pythons_own_values_come_back(value: Any) -> None:
    found = expand(nodes(value))
    assert type(found) is type(value)
    assert repr(found) == repr(value)


@looped(
    ("value", "expected"),
    [
        (argparse.Namespace(a=1, b=argparse.Namespace(c=[1])), {"a": 1, "b": {"c": [1]}}),
        (types.SimpleNamespace(a=1), {"a": 1}), (collections.defaultdict(list, a=[1]), {"a": [1]}),
        (collections.Counter("aab"), {"a": 2, "b": 1}), (collections.deque([1, 2], maxlen=3), [1, 2]),
        (numpy.float32(0.5), 0.5), (numpy.int64(-3), -3), (numpy.bool_(True), True), (numpy.complex64(1 + 2j), 1 + 2j),
        (numpy.str_("ä"), "ä"), (numpy.float16(1.5), 1.5), (numpy.dtype(">i4"), ">i32"),
        (numpy.dtype("datetime64[25s]"), "datetime64[25s]"),
    ],
    ids=repr,
)  # fmt: skip
def test_containers_and_numpy_scalars_become_plain(value: Any, expected: Any) -> None:
    found = plain(nodes(value))
    assert found == expected
    assert type(found) is type(expected)


@looped("dtype", ["?", "i1", "<u2", ">i4", "i8", "f2", "f4", ">f8", "c8", "c16", "U3", "S2"])
def test_arrays_without_numpy(dtype: str) -> None:
    array = numpy.array([[0, 1], [1, 1]]).astype(dtype)
    found = plain(nodes({"a": array, "f": numpy.asfortranarray(array)}))
    assert isinstance(found["a"], Array)
    assert (found["a"].shape, found["a"].values()) == ((2, 2), array.ravel().tolist())
    assert (found["f"].fortran, found["f"].values()) == (True, array.ravel("F").tolist())


def test_torchs_own_values() -> None:
    from ckptool.bridge.from_live import from_torch

    values = {
        "size": torch.Size([2, 3]), "device": torch.device("cuda:1"), "cpu": torch.device("cpu"),
        "dtype": torch.float8_e5m2, "layout": torch.strided,
    }  # fmt: skip
    assert plain(from_torch(values)) == {
        "size": (2, 3), "device": "cuda:1", "cpu": "cpu", "dtype": "torch.float8_e5m2", "layout": "torch.strided",
    }  # fmt: skip


def test_configuration_is_unwrapped() -> None:
    """Hand-made as the libraries pickle it: none of them is installed."""
    leaf = made("omegaconf.nodes.AnyNode", state={"_metadata": None, "_val": 0.1})
    inner = made("omegaconf.listconfig.ListConfig", state={"_metadata": None, "_content": [leaf]})
    config = made("omegaconf.dictconfig.DictConfig", state={"_content": {"lr": leaf, "steps": inner}, "_parent": None})
    assert plain(config) == {"lr": 0.1, "steps": [0.1]}
    assert plain(made("pytorch_lightning.utilities.parsing.AttributeDict", items={"lr": config})) == {
        "lr": {"lr": 0.1, "steps": [0.1]}
    }
    assert plain(
        made("ml_collections.config_dict.config_dict.ConfigDict", state={"_fields": {"a": 1}, "_locked": True})
    ) == {"a": 1}
    assert plain(made("easydict.EasyDict", items={"a": 1}, state={"a": 1})) == {"a": 1}


@looped(
    "node",
    [
        made("datetime.datetime", (b"no",), "call"),
        made("datetime.timedelta", ("1",), "call"),
        made("decimal.Decimal", ("not a number",), "call"),
        made("decimal.Decimal", (made("os.system", ("x",), "call"),), "call"),
        made("uuid.UUID", state={"int": -1}),
        made("uuid.UUID"),
        made("collections.Counter", (5,), "call"),
        made("torch.Size", (5,), "call"),
        made("numpy.core.multiarray.scalar", (made("numpy.dtype", ("f8",), "call"), b"short"), "call"),
        made(
            "numpy.core.multiarray._reconstruct",
            (Global("os", "system"), (0,), b"b"),
            "call",
            state=(1, (1,), None, False, b""),
        ),
        made("omegaconf.dictconfig.DictConfig"),
        made("pathlib.PosixPath", (5,), "call"),
        made("pathlib.PosixPath", ("a",), "call", elements=[1]),
        made("builtins.int", items={"a": 1}),
    ],
    ids=repr,
)
def test_objects_that_their_class_would_not_write_stay(node: Object) -> None:
    assert expand(node) is node
    assert summary(node)
    assert json.dumps(to_json(node))


def test_nothing_recurses() -> None:
    deep: Any = made("argparse.Namespace", state={})
    for _ in range(5_000):
        deep = made("argparse.Namespace", state={"a": (deep,)})
    found = plain(deep)
    for _ in range(5_000):
        found = found["a"][0]
    assert found == {}
    assert len(json.dumps(to_json(deep))) < 10_000


# One line ------------------------------------------------------------------------------------------------------------


@looped(
    ("value", "expected"),
    [
        (0.001, "0.001"), ("adam", "'adam'"), ("a\n\x1b[31m", "'a\\n\\x1b[31m'"), (None, "None"), (True, "True"),
        (1 << 2000, "integer of 2,001 bits"), (b"ab", "b'ab'"), (bytes(100), "bytes of 100"),
        (ByteString(b"\xff" * 20), "Python 2 text of 20"), ({"a": 1, "b": 2, "c": 3}, "3 items"), ({0: 0}, "1 item"),
        ({}, "{}"), ([], "[]"), ((0.9, 0.999), "(0.9, 0.999)"), ((1,), "(1,)"), ([1] * 20, "list of 20 items"),
        ([[1]], "list of 1 item"), (Set([1, "a"]), "{1, 'a'}"), (Set([], frozen=True), "empty frozenset"),
        (OrderedDict({"a": 1}), "1 item"), (Global("torch", "float32"), "torch.float32"),
        (Global("os", "system\n"), "name os.system\\n"),
        (made("foo.Bar", state={"a": 1, "b": 2, "c": 3}), "<unknown class foo.Bar with 3 attributes>"),
        (made("foo.bar", (1,), "call"), "<unknown call foo.bar(1)>"),
        (made("foo.Bar", ("a\n", "b")), "<unknown class foo.Bar('a\\n', 'b')>"),
        (made("foo.bar", ([1],), "call"), "<unknown call foo.bar>"),
        (made("torch.nn.modules.loss.L1Loss", state={"a": 1}), "<torch.nn.modules.loss.L1Loss with 1 attribute>"),
        (TensorEntry(Storage(InlineBytes(bytes(8))), by_name("f32"), (2,), (1,)), "tensor f32[2]"),
    ],
    ids=lambda value: repr(value)[:30],
)  # fmt: skip
def test_summaries(value: Any, expected: str) -> None:
    assert summary(value) == expected


@pytest.mark.parametrize("width", [2, 10, 60])
def test_summaries_fit(width: int) -> None:
    for value in ("x" * 100_000, ["y" * 30] * 5, made("m" * 200 + ".C"), 10**300):
        assert len(summary(value, width)) <= width


# JSON ----------------------------------------------------------------------------------------------------------------


def test_json_of_everything() -> None:
    tree = nodes(
        {
            "nan": float("nan"), "inf": [float("inf"), -float("inf")], 0: "int", "0": "text", (1, "a"): None, None: 1,
            "bytes": b"ab", "big": bytes(10_000), "complex": 1 + 2j, "set": {1}, "array": numpy.array([[1, 2]]),
            "date": datetime.date(2024, 1, 2), "surrogate": "\ud800",
        }
    )  # fmt: skip
    found = json.loads(json.dumps(to_json(tree), allow_nan=False))
    assert found == {
        "nan": "NaN", "inf": ["Infinity", "-Infinity"], "0 (int)": "int", "0": "text", "(1, 'a')": None, "None": 1,
        "bytes": {"base64": base64.b64encode(b"ab").decode()}, "big": {"bytes": 10_000}, "complex": [1.0, 2.0],
        "set": [1], "array": {"numpy": "i64", "shape": [1, 2], "values": [1, 2]}, "date": "2024-01-02",
        "surrogate": "\\ud800",
    }  # fmt: skip


def test_json_is_bounded() -> None:
    ring: list[Any] = []
    ring.append(ring)
    assert len(json.dumps(to_json(ring))) < 1_000
    doubling: Any = [1]
    for _ in range(60):
        doubling = [doubling, doubling]
    assert len(json.dumps(to_json(doubling))) < 10_000_000
    for text in ("x" * 500, 1 << 2_000):  # also what is long and stands in many places
        assert to_json([text] * 400) == [to_json(text)] * 400
        assert len(json.dumps(to_json([text] * 50_000))) < 10_000_000
    long = "long" * 100_000
    found = to_json([long] * 1_000 + ["short", 1])
    assert found[0] == long and list(found[-3]) == ["..."] and found[-2:] == ["short", 1]
    assert len(json.dumps(found)) < 30_000_000


@looped("name", sorted(TRAPS))
def test_everything_can_be_said(name: str, tmp_path: Any) -> None:
    from ckptool.formats import read

    path = tmp_path / "x.pt"
    path.write_bytes(torch_bytes(TRAPS[name]()))
    tree = read(path).tree
    json.dumps(to_json(tree), allow_nan=False)
    for key, value in tree.items():
        assert summary(key).isprintable()
        assert summary(value).isprintable()


# weights_only: what comes out opens so, and nothing goes without a word -----------------------------------------------


class Config:
    def __init__(self) -> None:
        self.lr, self.path = 0.1, pathlib.PurePosixPath("/data")


def made_plain(folder: Path, tree: Any) -> tuple[Any, list[str]]:
    """What stock torch loads after the conversion, and the lines that said what was changed."""
    file, out = folder / "in.pt", folder / "out.pt"
    torch.save(tree, file)
    done = ckptool.convert(file, out, weights_only=True, overwrite=True)
    return torch.load(out, weights_only=True), list(done.details)


@looped(
    ("value", "expected"),
    [
        (np.float64(0.5), 0.5),
        (np.int32(-3), -3),
        (np.bool_(True), True),
        (argparse.Namespace(lr=0.1, deep=argparse.Namespace(n=1)), {"lr": 0.1, "deep": {"n": 1}}),
        (pathlib.PurePosixPath("a/b"), "a/b"),
        (defaultdict(list, {"a": [1]}), {"a": [1]}),
        (deque([1, 2]), [1, 2]),
        (datetime.datetime(2020, 1, 2, 3), "2020-01-02 03:00:00"),
        (decimal.Decimal("1.50"), "1.50"),
        (frozenset({1}), {1}),
        (b"", bytearray()),
        (Config(), {"lr": 0.1, "path": "/data"}),
        ({"k": (np.float32(1.5), [np.int64(2)])}, {"k": (1.5, [2])}),
    ],
)  # fmt: skip
def test_a_value_becomes_the_plain_one(tmp_path: Path, value: Any, expected: Any) -> None:
    loaded, told = made_plain(tmp_path, {"value": value, "w": torch.ones(2)})
    assert loaded["value"] == expected and type(loaded["value"]) is type(expected)
    assert torch.equal(loaded["w"], torch.ones(2))
    assert any("value" in line for line in told)


def test_a_tensor_of_a_class_of_its_own_becomes_a_plain_one(tmp_path: Path) -> None:
    class Mine(torch.Tensor):
        pass

    globals()["Mine"] = Mine
    Mine.__qualname__ = "Mine"
    loaded, told = made_plain(tmp_path, {"w": torch.ones(3).as_subclass(Mine)})
    assert type(loaded["w"]) is torch.Tensor and torch.equal(loaded["w"], torch.ones(3))
    assert len(told) == 1


def test_two_keys_that_become_one_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "in.pt"
    torch.save({pathlib.PurePosixPath("a"): 1, "a": 2}, file)
    with pytest.raises(Conflict, match="would both become 'a'"):
        ckptool.convert(file, tmp_path / "out.pt", weights_only=True)
    assert not (tmp_path / "out.pt").exists()
