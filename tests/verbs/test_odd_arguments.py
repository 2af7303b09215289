"""Every parameter of every function with values of every other type: it works, or one error of ours says what is wrong.
Only an argument that does not exist is a `TypeError`, as Python's own."""

import inspect
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ckptool
from ckptool.errors import CkptoolError, UsageError
from tests.support.files import saved
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
