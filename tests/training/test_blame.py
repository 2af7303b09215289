"""Whatever the user's own code raises or returns, in whichever phase of a run, is told as theirs, with the place; exit
2 and no bug."""

from __future__ import annotations

import os
import random
import socket
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.cli.output import Bug, in_words
from ckptool.errors import CkptoolError, RunFailed, UsageError, UserCodeFailed
from ckptool.training import loop
from ckptool.training.trainer import start
from tests.support.looped import looped
from tests.support.programs import python
from tests.support.small_runs import config

# Everything of a user's that a run calls, each with the place of its fault.
OWN = """
import torch
from torch import nn
from ckptool.training.tasks import Task, Phase, classify
from ckptool.training.toys import blobs

def fault(place, value=None):
    if place == PLACE:
        FAULT
    return value

class Model(nn.Sequential):
    def __init__(self, inputs, classes):
        super().__init__(nn.Linear(inputs[0], classes))
        fault("model")
    def forward(self, x):
        return fault("forward", super().forward(x))
    def train(self, mode=True):
        fault("train" if mode else "eval")
        return super().train(mode)
    def get_extra_state(self):
        return fault("get_extra_state", 3)
    def set_extra_state(self, state):
        fault("set_extra_state")
    def _apply(self, function, *more):
        fault("to")
        return super()._apply(function, *more)

class Data:
    made = blobs(samples=60, inputs=4)
    @property
    def about(self):
        return fault("about", self.made.about)
    def __len__(self):
        return fault("len", len(self.made))
    def __getitem__(self, index):
        return fault("getitem", self.made[index])

def data():
    return fault("data", Data())
def collate(samples):
    return fault("collate", torch.utils.data.default_collate(samples))
def init(model):
    return fault("init")
def task():
    fault("task")
    made = classify()
    def loss(models, batch):
        return fault("loss", made.phases[0].loss(models, batch))
    def evaluate(models, batches):
        return fault("evaluate", made.evaluate(models, batches))
    return Task([Phase("main", loss)], evaluate)

class Hook:
    def __init__(self): fault("hook")
    def attach(self, trainer):
        fault("attach")
        trainer.optimizers["main"].register_step_post_hook(lambda *given: fault("optimizer"))
        trainer.models["main"][0].weight.register_hook(lambda grad: fault("backward", grad))
    def after_backward(self, trainer, model): return fault("after_backward", {"a": 1})
    def after_step(self, trainer): fault("after_step")
    def facts(self): return fault("facts", {"b": torch.ones(1)})
    def logged(self, trainer, fact): fault("logged")
    def ended(self, trainer): fault("ended")
"""
PLACES = [line.split('fault("')[1].split('"')[0] for line in OWN.splitlines() if 'fault("' in line] + ["eval"]
KINDS = ("LookupError", "ValueError", "RuntimeError", "OSError", "SystemExit")
ODD = ("None|3|'text'|[1, 2]|object()|{'x': None}|{'x': 'y'}|{'x': [1]}|torch.ones(3)|{3}|lambda: 0").split("|")


def owned(path: Path, place: str, fault: str) -> dict[str, Any]:
    file = path / "own.py"
    file.write_text(OWN.replace("PLACE", repr(place)).replace("FAULT", fault))
    return {
        "models": {"main": {"name": f"{file}:Model", "init": f"{file}:init"}},
        "data": {"name": f"{file}:data", "collate": f"{file}:collate", "batch": 8},
        "task": f"{file}:task",
        "hooks": [f"{file}:Hook"],
        "train": {"steps": 4},
        "log": {"every": 1},
        "eval": {"every": 2},
    }


def told(path: Path, place: str, fault: str) -> CkptoolError | None:
    """What is told of a run in which something of the user's has a fault; None where it goes well."""
    sections = owned(path, place, fault)
    try:
        start(config(run=path / "run", **sections))
        if place == "set_extra_state":
            start(config("train.steps=6", run=path / "run", **sections), resume="auto")
    except Exception as error:  # noqa: BLE001  as the command line does
        return in_words(error)
    return None


RAISED = [*((place, random.Random(place).choice(KINDS)) for place in sorted(set(PLACES)))]
ENDS = [(place, "StopIteration") for place in ("collate", "getitem")]  # which is no end of the data


@pytest.mark.parametrize(("place", "kind"), [*RAISED, *ENDS])
def test_what_is_raised_anywhere(tmp_path: Path, place: str, kind: str) -> None:
    found = told(tmp_path, place, f"raise {kind}('lost')")
    assert isinstance(found, UserCodeFailed), found
    assert found.exit_code == 2
    assert "lost" in (str(found) if (place, kind) in ENDS else found.what)
    assert str(tmp_path / "own.py") in str(found)


RETURNS = {"data", "len", "about", "collate", "forward", "loss", "evaluate", "after_backward", "facts", "getitem"}


@looped(("place", "odd"), product(sorted(RETURNS), ODD), here=30, at_once=10)
def test_what_is_returned_anywhere(tmp_path: Path, place: str, odd: str) -> None:
    """Some of it does; what does not is never called a bug of ckptool's."""
    assert not isinstance(told(tmp_path, place, f"return {odd}"), Bug)


def test_what_is_no_number_is_named(tmp_path: Path) -> None:
    found = told(tmp_path, "facts", "return {'x': None}")
    assert isinstance(found, UsageError)
    assert "own.py:Hook gave no dictionary of numbers: float() argument" in found.what


@pytest.mark.parametrize(
    ("body", "raised"),
    [("{}['x']", KeyError), ("torch.zeros(2) @ torch.zeros(3)", RuntimeError),
        ("torch.nn.functional.embedding(3, 2)", RunFailed)],
)  # fmt: skip
def test_ckptools_own_errors_stay_bugs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, raised: Any) -> None:
    """What torch raises inside itself is told; what is raised by a line of ckptool's is not hidden."""
    made: dict[str, Any] = {"torch": torch}
    exec(compile(f"def broken(*given):\n    {body}\n", loop.__file__, "exec"), made)
    monkeypatch.setattr(loop, "one_step", made["broken"])
    with pytest.raises(raised) as found:
        start(config(run=tmp_path / "run"))
    assert isinstance(in_words(found.value), Bug) is (raised is not RunFailed)


@pytest.mark.parametrize(
    "keys",
    [
        {"data": {"name": "blobs", "args": {"samples": -3}}},
        {"data": {"name": "blobs", "args": {"inputs": "x"}}},
        {"models": {"main": {"name": "mlp", "args": {"hidden": [-1]}}}},
        {"models": {"main": {"name": "mlp", "args": {"dropout": 2}}}},
    ],
)
def test_arguments_that_what_is_built_in_refuses_are_the_users(tmp_path: Path, keys: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="does not take these arguments"):
        start(config(run=tmp_path / "run", **keys))


# Processes that do not meet ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {"WORLD_SIZE": "two"},
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "70000"},
        {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "taken"},
    ],
    ids=["no number", "no rank", "no such host", "port taken"],
)
def test_processes_that_cannot_meet(tmp_path: Path, given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text("run: x\ntrain: {steps: 1}\nstrategy: ddp\ndata: {name: blobs}\ndevice: cpu\n")
    monkeypatch.chdir(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        given = {key: str(taken.getsockname()[1]) if value == "taken" else value for key, value in given.items()}
        code = "import sys; from ckptool import cli; sys.exit(cli.main(['train', 'run.yaml']))"
        done = python(code, env={**os.environ, **given})
    assert done.returncode == 2, done.stderr
    assert "bug" not in done.stderr
    said = ("the processes of this run could not connect", "WORLD_SIZE is 'two'")
    assert any(words in done.stderr for words in said), done.stderr


# A configuration in Python --------------------------------------------------------------------------------------------


class Net(torch.nn.Linear):
    pass


@pytest.mark.parametrize(
    "value", [Net, Net(2, 2), torch.ones(2), len, {1, 2}, pytest.param(object(), id="object"), b"x", 1j, float], ids=str
)
def test_a_value_that_no_configuration_can_hold_is_named(value: Any) -> None:
    with pytest.raises(UsageError, match=r"models\.main\."):
        config(models={"main": {"name": value}})
    with pytest.raises(UsageError, match=r"models\.main\.args\.x"):
        config(models={"main": {"name": "mlp", "args": {"x": value}}})


# What to type -------------------------------------------------------------------------------------------------------

NAMES = {  # key -> a name that is nothing, what may be meant, and what one's own is said to be
    "data.name": ("blob", "blobs", "is called with args and gives a Dataset"),
    "data.collate": ("defalt", "default", "is called with a list of samples"),
    "data.sampler": ("random", "", "is called with (data set, generator)"),
    "models.main.name": ("mpl", "mlp", "is called with args and gives a torch.nn.Module"),
    "models.main.init": ("defalt", "default", "is called with the model"),
    "task": ("clasify", "classify", "is called without arguments and gives a ckptool.training.tasks.Task"),
    "optim.main.name": ("adamv", "Adam", "is called with (parameters, lr=…, **args) and gives a torch.optim.Optimizer"),
    "optim.main.schedule.name": ("stpe", "StepLR", "is a function of the step that gives a factor"),
    "hooks.0": ("gradnorm", "grad_norm", "is called without arguments and gives an object with any of the methods"),
}


@pytest.mark.parametrize("key", NAMES)
def test_a_name_that_is_nothing_says_what_may_be_meant_and_what_to_type(key: str, tmp_path: Path) -> None:
    name, meant, yours = NAMES[key]
    with pytest.raises(UsageError, match=f"there is no '{name}'") as raised:
        start(config(f"{key}={name}", run=tmp_path / "run", hooks=["grad_norm"]))
    guess = f"Did you mean {meant}? " if meant else ""
    assert str(raised.value.fix).startswith(f"{guess}Your own is file.py:NAME, which {yours}")
