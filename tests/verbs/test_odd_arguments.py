"""Every parameter of every function with values of every other type: it works, or one error of ours says what is wrong.
Only an argument that does not exist is a `TypeError`, as Python's own."""

from __future__ import annotations

import inspect
import random
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import numpy as np
import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import CkptoolError, UsageError
from tests.support.files import load, saved
from tests.support.looped import looped

ODD: dict[str, Any] = {
    "None": None, "a number": 3, "a fraction": -3.5, "not a number": float("nan"), "empty": "", "text": "nope",
    "bytes": b"a.pt", "list": [], "numbers": [1], "texts": ["nope"], "dictionary": {}, "names": {"a": "b"},
    "numbered": {1: 2}, "object": object(), "true": True, "a path": Path("nope"), "set": {"nope"}, "NUL": "a\0b",
    "array": numpy.ones(2), "tensor": torch.ones(2), "int64": numpy.int64(1), "a type": dict, "complex": 1j,
}  # fmt: skip
FILE, OUT = "a.pt", "out.pt"
CALLS: dict[str, dict[str, Any]] = {
    "add_module": {"file": FILE, "out": OUT}, "average": {"files": [FILE, FILE], "out": OUT},
    "bake": {"file": FILE, "out": OUT}, "bundle": {"members": {"a": FILE}, "out": OUT},
    "cast": {"file": FILE, "out": OUT, "dtype": "bf16"}, "convert": {"file": FILE, "out": OUT},
    "diff": {"left": FILE, "right": FILE}, "doctor": {"file": FILE, "out": OUT, "fix": True},
    "edit": {"file": FILE, "out": OUT, "set": {"x": 1}}, "find_rules": {"old": FILE, "new": FILE},
    "inspect": {"file": FILE}, "load": {"f": FILE}, "open": {"file": FILE},
    "remap": {"file": FILE, "out": OUT, "to": "cpu"},
    "rename": {"file": FILE, "rules": "a => b", "out": OUT}, "save_for_cpu": {"model": torch.nn.ReLU(), "path": OUT},
    "show": {"file": FILE}, "slim": {"file": FILE, "out": OUT}, "spec": {"target": FILE}, "verify": {"file": FILE},
    "strip_module": {"file": FILE, "out": OUT},
    "translate": {"file": FILE, "rules": "a => b", "out": OUT, "rest": "keep"},
    "warm_start": {"file": FILE, "against": FILE, "out": OUT}, "recover": {"file": FILE, "out": OUT},
    "load_into": {"model": torch.nn.Linear(2, 2), "checkpoint": FILE}, "unbundle": {"file": FILE, "folder": "out"},
}  # fmt: skip


@looped("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_a_value_of_another_type(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved({"weight": torch.ones(2, 2), "bias": torch.ones(2), "a": torch.ones(1)}, tmp_path / FILE)
    function, wrong = getattr(ckptool, name), []
    parameters = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    for parameter in parameters:
        for kind, value in ODD.items():
            try:
                function(**{**CALLS[name], parameter: value})
            except CkptoolError:
                pass
            except Exception as error:  # noqa: BLE001
                wrong.append((parameter, kind, repr(error)[:100]))
    assert not wrong
    with pytest.raises((TypeError, UsageError), match="nothing_of_that_name"):
        function(**CALLS[name], nothing_of_that_name=1)


def test_parts_of_a_report_are_short_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each item of what a report has is short, whatever the file's size; but for its tree, which is one."""
    monkeypatch.chdir(tmp_path)
    many = {f"layers.{number % 4}.w{number}": torch.full((2, 2), 1.0) for number in range(200)}
    saved({"model": many, "optimizer": {"state": {}, "param_groups": []}, "epoch": 1}, tmp_path / FILE)
    saved({"model": {**many, "layers.1.w1": torch.zeros(3)}}, tmp_path / "b.pt")
    long, shown = [], 0
    reports = {name: getattr(ckptool, name)(FILE) for name in ("doctor", "inspect", "scan", "verify")}
    reports["warm_start"] = ckptool.warm_start("b.pt", f"{FILE}#model")
    for name, report in reports.items():
        for fact in dir(report):
            value = getattr(report, fact) if fact[0] != "_" and fact != "tree" else ""
            items = (
                value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]
            )
            shown += not callable(value)
            long += [(name, fact, repr(item)[:80]) for item in items if len(repr(item)) > 600]
    assert not long and shown > 40


# Values that are too large --------------------------------------------------------------------------------------------
# Where a verb computes values that its output's type cannot hold, it says so; where it does not, it says nothing.


Make = Callable[[random.Random, torch.dtype, Path, Path], Any]


def some(draw: random.Random, *shape: int) -> torch.Tensor:
    """Numbers of any size, now and then infinite already."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(99)))
    values *= draw.choice((1, 1, 200, 30_000))
    return values if draw.random() < 0.8 else values.masked_fill(values > 2, float("inf"))


def averaged(draw: random.Random, dtype: torch.dtype, folder: Path, out: Path) -> Any:
    files = [saved({"a.weight": some(draw, 4, 4).to(dtype)}, folder / f"{at}.pt") for at in range(3)]
    method = draw.choice(("mean", "task-arithmetic", "ties", "dare"))
    if method == "mean":
        return ckptool.average(files, out, weights=[draw.choice((-1.0, 0.2, 3.0)) for _ in files])
    return ckptool.average(files[:2], out, base=files[2], method=method, scale=draw.choice((0.5, 4.0)))


def merged(draw: random.Random, dtype: torch.dtype, folder: Path, out: Path) -> Any:
    base = saved({"a.weight": some(draw, 4, 4).to(dtype)}, folder / "base.pt")
    names = ("base_model.model.a.lora_A.weight", "base_model.model.a.lora_B.weight")
    adapter = dict(zip(names, (some(draw, 2, 4), some(draw, 4, 2)), strict=True))
    config = {"r": 2, "lora_alpha": 2, "peft_type": "LORA", "target_modules": ["a"]}
    return ckptool.lora_merge(base, saved(adapter, folder / "adapter.pt"), out, config=config)


def dequantized(draw: random.Random, dtype: torch.dtype, folder: Path, out: Path) -> Any:
    codes = some(draw, 4, 4).clamp(-400, 400).to(torch.float8_e4m3fn)
    values = {"a.weight": codes, "a.weight_scale": some(draw, 4, 1)}
    return ckptool.cast(saved(values, folder / "in.pt"), out, dtype, dequantize=True)


@pytest.mark.parametrize("make", [averaged, merged, dequantized])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_computed_values_that_became_infinite_are_said(make: Make, dtype: torch.dtype, tmp_path: Path) -> None:
    said_by, lost = [0, 0], 0
    for seed in range(40):
        folder = tmp_path / f"{seed}"
        folder.mkdir()
        done = make(random.Random(seed), dtype, folder, folder / "out.pt")
        said = any(note.code == "non-finite" for note in done.notes)
        trees = [load(path) for path in folder.iterdir() if path.name != "out.pt"]
        inputs = [value.float() for tree in trees for value in tree.values()]
        was_infinite = any(value.isinf().any() for value in inputs)
        is_infinite = any(value.isinf().any() for value in load(folder / "out.pt").values())
        if not was_infinite:
            assert said == is_infinite, seed
            lost += is_infinite
        said_by[said] += 1
        assert is_infinite or not said, seed
    assert said_by[0] and (dtype is torch.float32 or (said_by[1] and lost)), "else this tests nothing"


def test_a_result_in_memory_is_warned_of() -> None:
    large = {"a.weight": torch.full((2, 2), 60_000.0, dtype=torch.float16)}
    with (
        pytest.warns(match="add up to 1.5"),
        pytest.warns(match=r"too large for f16 and became infinite \(non-finite\)"),
    ):
        assert ckptool.average([large, large], weights=[2, -0.5])["a.weight"].isinf().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckptool.average([large, large])


# What torch does not load ---------------------------------------------------------------------------------------------
# `doctor` names a problem just where stock torch does not load a file: values of every kind, in both formats.


def of_every_kind() -> dict[str, Any]:
    """Tensors of every type and layout, and other values of state dicts."""
    dtypes = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
    tensors = {str(dtype): torch.zeros(64, dtype=torch.uint8).view(dtype) for dtype in dtypes if dtype.itemsize}
    ones = torch.ones(2, 2)
    layouts = [ones.to_sparse(), ones.to_sparse_csr(), ones.t(), ones.cfloat().conj(), ones.storage(), ones.to("meta")]
    layouts += [torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8), torch.nested.nested_tensor([ones, ones[:1]])]
    layouts += [nn.Parameter(ones), ones.untyped_storage()]
    values = [torch.float8_e5m2, torch.Size([2]), torch.device("cpu"), np.float64(1), np.ones(2), {1}, 1j, b"x"]
    values += [range(2), nn.Linear(1, 1), types.SimpleNamespace(a=1), Path("x"), OrderedDict(a=1), None]
    return tensors | {f"{number} {type(value)}": value for number, value in enumerate(layouts + values)}


@pytest.mark.filterwarnings("ignore")
@looped("zipped", [True, False])
@looped("protocol", [2, 3], here=1)
def test_it_says_what_stock_torch_does_not_load(zipped: bool, protocol: int, tmp_path: Path) -> None:
    file, seen = tmp_path / "a.pt", set()
    for kind, value in of_every_kind().items():
        tree, options = {"fc.weight": torch.ones(3, 2), "other": value}, {"_use_new_zipfile_serialization": zipped}
        try:
            torch.save(tree, file, pickle_protocol=protocol, **options)
        except (KeyError, NotImplementedError, RuntimeError):  # not in this format
            continue
        try:
            loads = list(torch.load(file, weights_only=True)) == list(tree)
        except Exception:  # noqa: BLE001 -- whatever torch says
            loads = False
        loads = loads and (zipped or not getattr(value, "is_nested", False))  # its sizes are what was in memory: chance
        of_models = {"not-a-tensor", "nested-weights"}  # these are loaded, but by no model
        stands = {finding.code for finding in ckptool.doctor(file).findings if finding.blocks} - of_models
        assert loads != bool(stands), (kind, stands)
        seen.add(loads)
    assert seen == {True, False}
