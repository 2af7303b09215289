"""`inspect`: what is in a checkpoint, its statistics, and the notes on it with the commands that mend it; the state of
a run."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import io
import itertools
import json
import pathlib
import random
import re
import shlex
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptool
from ckptool.analysis.inspect import listing
from ckptool.analysis.outline import MemoryNeeds, memory_needs
from ckptool.training.store import name_of
from ckptool.training.trainer import start
from tests.support.cli import Run
from tests.support.files import opened, saved
from tests.support.lab_trial import run_line
from tests.support.looped import looped
from tests.support.object_graphs import saved_graph
from tests.support.own_classes import Names
from tests.support.small_runs import Typed, config, cut_short, flip_a_bit, train_typed


def test_a_line_of_each_tensor_says_what_is_unusual(tmp_path: Path, run: Run) -> None:
    w = torch.ones(2, 3)
    path = saved({"w": w, "turned": w.t(), "again": w, "sparse": torch.eye(2).to_sparse()}, tmp_path / "a.pt")
    ckptool.remap(path, tmp_path / "b.pt", to="cuda:1")
    words = {"w": "", "turned": "strides [1, 3]", "again": "tied to w", "sparse": "sparse coo"}
    for file, place in ((path, ""), (tmp_path / "b.pt", "cuda:1")):
        lines = [line for line in run("inspect", str(file), "--all").out.splitlines() if re.search(r" f32 +[^+]", line)]
        found = {line.split()[0]: line.partition(" B")[2].strip() for line in lines}
        assert found == {name: ", ".join(filter(None, (place, text))) for name, text in words.items()}


WEIGHTS = {"fc.weight": torch.ones(3, 2), "fc.bias": torch.zeros(3)}
# Values that torch.load takes by default, that it refuses, that have no plain form, and that it would call.
VALUES: dict[str, Any] = {
    "number": 1,
    "numpy": np.float64(0.5),
    "namespace": argparse.Namespace(lr=1),
    "generic": list[int],
    "function": np.sum,
    "call": collections.UserString("a"),
    "object": Names(epoch=1),
}
FILES = itertools.product(VALUES, (2, 4), (True, False), ("alone", "beside", "wrapped"))


@looped("value protocol zipped place", FILES)
def test_the_commands_that_doctor_and_inspect_print_run_one_after_the_other(
    value: str, protocol: int, zipped: bool, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prefix = "module." if place == "wrapped" else ""
    weights = {f"{prefix}{key}": tensor for key, tensor in WEIGHTS.items()}
    tree = VALUES[value] if place == "alone" else {"model": weights, "x": VALUES[value]}
    torch.save(tree, "a.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    notes = [str(note.fix) for note in ckptool.inspect("a.pt").notes if note.fix]
    assert [fix for fix in notes if run_line(fix)] == []
    for path in tmp_path.glob("a.fixed*"):
        path.unlink()
    found = ckptool.doctor("a.pt")
    fixes = [fix for each in found.findings for fix in each.fixes]
    assert [fix for fix in fixes if run_line(fix)] == []
    if place != "alone":
        last = shlex.split(fixes[-1])[-1] if fixes else "a.pt"
        assert list(torch.load(last, weights_only=True)) == [*WEIGHTS]


def _noted(tensor: torch.Tensor) -> torch.Tensor:
    tensor.note = {"a": 1}  # type: ignore[attr-defined]
    return tensor


PARAMETERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda weight: weight,
    "with attributes": lambda weight: _noted(nn.Parameter(weight)),
    "meta": lambda weight: nn.Parameter(weight.to("meta")),
    "sparse": lambda weight: nn.Parameter(weight.to_sparse()),
    "quantized": lambda weight: torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
    "nested": lambda weight: nn.Parameter(torch.nested.nested_tensor([weight])),
    "transposed": lambda weight: nn.Parameter(weight.t()),
}


@pytest.mark.filterwarnings("ignore")
@looped("one other", itertools.product(PARAMETERS, PARAMETERS))
def test_a_whole_module_has_each_tensor_of_its_state_dict_once(one: str, other: str, tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)])
    for layer, kind in zip(model, (one, other), strict=False):
        if (weight := PARAMETERS[kind](torch.ones(3, 3))).requires_grad:
            layer.weight = weight  # type: ignore[assignment]
        else:
            del layer.weight
            layer.register_buffer("weight", weight)
    model[2].tied = model[0].bias  # type: ignore[assignment]
    found = ckptool.inspect(saved(model, tmp_path / "a.pt")).tensors
    assert [row.address for row in found] == [name for name, _ in model.state_dict().items()]


def test_what_is_printed_to_take_a_prefix_off_or_save_what_is_whole_can_be_run(tmp_path: Path, run: Run) -> None:
    """Names with a prefix, without it, and both ways, in files whose suffix is that of another container."""
    ways, names = ("module.", "_orig_mod.", "_orig_mod.module.", ""), set[bool]()
    for number, (one, other) in enumerate(itertools.product(ways, repeat=2)):
        net = {
            f"{one}a.w": torch.ones(1),
            f"{other}a.{'w' * (number % 2)}b": torch.ones(2),
            f"{other}a.w": torch.ones(3),
        }
        tree = {"net": net, "values": {"x": torch.zeros(300)}, "epoch": 1}
        path = saved(tree, tmp_path / f"{number}.{('pt', 'safetensors', 'npz')[number % 3]}")
        bare = {name.removeprefix("_orig_mod.").removeprefix("module.") for name in net}
        for verb in ("inspect", "doctor"):
            printed = run(verb, str(path)).out
            lines = re.findall(r"ckptool (strip-module .*)$", printed, re.MULTILINE)
            if verb == "inspect":
                names.add(is_one := len(bare) < len(net))
                assert bool(lines) == (not is_one and bool(one or other)), printed
                assert all(run(*shlex.split(line)).code == 0 for line in lines), printed
            elif is_one:
                assert not lines and "only one tensor could stay" in printed
        path.write_bytes(path.read_bytes().replace(bytes(1200), bytes(1199) + b"\1"))
        (line,) = re.findall(r"ckptool (recover .*)$", run("verify", str(path)).out, re.MULTILINE)
        assert run(*shlex.split(line), "-n").code in (0, 1), line
    assert names == {True, False}


def test_a_file_that_is_one_tensor_or_has_no_parts(tmp_path: Path, run: Run) -> None:
    alone = str(saved(torch.ones(2), tmp_path / "alone.pt"))
    assert run("inspect", alone, "-q").out == "/\n"
    assert "(the whole file)  8 B" in run("inspect", alone).out
    entries = str(saved({"model": {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "in.pt"))
    found = run("inspect", entries, "--only", "epoch")
    assert found.code == 0 and found.out.split("\n")[2:5] == ["entries", "  epoch  3", ""]


def test_tensors_under_keys_that_read_alike(tmp_path: Path, run: Run) -> None:
    """An optimizer that was pickled whole keeps its state by parameters, and two of one shape have one name."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    torch.save(
        {"optimizer": optimizer, "keys": {torch.ones(2): torch.ones(1), torch.ones(2): torch.ones(1)}},
        file := tmp_path / "x.pt",
    )
    for words in ((), ("--all",), ("--depth", "9"), ("--stats",), ("--json",)):
        found = run("inspect", str(file), *words)
        assert found.code == 0 and not found.err, (words, found)
    shown = run("inspect", str(file), "--depth", "9").out
    assert shown.count("exp_avg_sq") == 6 and shown.count("<tensor f32[2]>") == 2, shown


def test_depth_is_how_many_levels_are_shown(tmp_path: Path, run: Run) -> None:
    names = "a.b.c a.b.d a.e.f a.e.g h.i.j h.k".split()
    torch.save({name: torch.ones(2) for name in names}, file := tmp_path / "deep.pt")
    levels: list[list[str]] = [[], ["a", "h"], ["a", "b", "e", "h", "i.j", "k"]]
    levels.append(["a", "b", "c", "d", "e", "f", "g", "h", "i.j", "k"])
    for depth, labels in enumerate([*levels, levels[3]]):
        lines = run("inspect", str(file), "--depth", str(depth)).out.splitlines()
        assert [line.split()[0] for line in lines if line.startswith("  ")] == labels, depth


BIG = torch.zeros(100_000)


@looped(
    ("tree", "wasted"),
    [
        ({"a": BIG[10:12], "b": torch.ones(3)}, "400 kB in 1 storage"),
        ({"a": BIG[:50_000], "b": BIG[50_000:]}, ""),
        ({"a": BIG[10:], "all": BIG}, ""),
        ({"a": torch.ones(1, 4).expand(100_000, 4)}, ""),
    ],
)
def test_wasted_bytes_are_those_behind_no_tensor(tree: Any, wasted: str, tmp_path: Path) -> None:
    found = {note.code: note.message for note in ckptool.inspect(saved(tree, tmp_path / "a.pt")).notes}
    assert wasted in found["wasted-storage"] if wasted else "wasted-storage" not in found


def test_statistics_are_of_what_is_chosen(tmp_path: Path) -> None:
    torch.save({"m": {"a.weight": torch.ones(9), "b.weight": torch.full((9,), torch.nan)}}, tmp_path / "m.pt")
    one = ckptool.inspect(tmp_path / "m.pt", stats=True, only="a.weight")
    assert list(one.statistics) == ["m/a.weight"] and one.statistics["m/a.weight"].mean == 1
    assert not one.notes and ckptool.inspect(tmp_path / "m.pt", stats=True).notes[0].code == "non-finite"


pytestmark = pytest.mark.usefixtures("harness")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    start(config("save.keep_last=2", "save.keep_best=1", "eval.metric=val_acc", "eval.mode=max", run=tmp_path / "run"))
    return tmp_path / "run"


def test_what_is_damaged_is_found_by_its_size_or_in_full(run_folder: Path) -> None:
    flip_a_bit(run_folder / "checkpoints" / name_of(20))
    assert ckptool.inspect_run(run_folder).damaged == 0
    full = ckptool.inspect_run(run_folder, full=True)
    assert (full.damaged, full.resumes) == (1, 15)
    assert full.checkpoints[-1].kept == ("damaged",)
    cut_short(run_folder / "checkpoints" / name_of(15))
    for path in (run_folder / "checkpoints").glob("*.pt"):
        cut_short(path)
    found = ckptool.inspect_run(run_folder)
    assert (found.damaged, found.resumes) == (len(found.checkpoints), None)
    assert "none of them is whole" in str(found)


def test_what_the_run_deletes_meanwhile_is_not_damaged(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptool.training import run_folder as module

    real = module.check

    def deleted(saved: Any, verify: str) -> Any:
        if saved.path.endswith(name_of(20)):
            Path(saved.path).unlink()
        return real(saved, verify)

    monkeypatch.setattr(module, "check", deleted)
    found = ckptool.inspect_run(run_folder)
    assert (found.damaged, found.resumes) == (0, 15) and 20 not in {row.step for row in found.checkpoints}


def test_a_sidecar_of_anything(run_folder: Path) -> None:
    path = (run_folder / "checkpoints" / name_of(20)).with_suffix(".json")
    told = json.loads(path.read_text())
    for facts in (
        {"metrics": "none", "epoch": "x", "loss": []},
        {"metrics": {"val_acc": "high", "val_loss": None}, "bytes": "many"},
        {"metrics": {"val_acc": [1], "\x1b[31m": 1.0}, "loss": 1e999},
    ):
        path.write_text(json.dumps(told | facts))
        assert "\x1b" not in str(ckptool.inspect_run(run_folder))
        json.dumps(ckptool.inspect_run(run_folder).to_dict(), allow_nan=False)


def test_a_loop_of_ones_own_goes_on_with_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["mine/train.py"])
    model = torch.nn.Linear(2, 1)
    for steps, told in (
        (3, "done at step 3; to train on, give the loop in train.py more steps or epochs, and run it again"),
        (4, "done at step 4; to train on, give the loop in train.py more steps or epochs, and run it again"),
        (6, "done at step 6; to train on"),
    ):
        with ckptool.Run(tmp_path / "run", model=model, say=lambda text: None) as run:
            for step in run.steps(steps):
                if step % 2 == 0:
                    run.save()
                elif step == 3 and steps == 3:
                    break
        found = ckptool.inspect_run(tmp_path / "run")
        assert (found.script, found.to_dict()["script"]) == ("train.py", "train.py")
        assert told in str(found) and "ckptool resume" not in str(found)


@pytest.mark.parametrize(
    ("changes", "event"),
    [
        ((), "done"),
        (("train.steps=null", "train.epochs=2"), "done"),
        (("stop.after=0.000001",), "stop"),
        (("stop.patience=1", "eval.every=1", "optim.main.lr=1e-30"), "early-stop"),
    ],
)
def test_the_command_that_is_printed_of_a_run_works(typed: Typed, changes: tuple[str, ...], event: str) -> None:
    """Also where its newest checkpoint is damaged; where all are, none is printed."""
    train_typed(typed, *changes)
    assert json.loads(typed("inspect", "runs/x", "--json")[1])["event"] == event
    for _ in range(2):
        (line,) = re.findall(r"ckptool (resume .*)", typed("inspect", "runs/x")[1])
        assert typed(*shlex.split(line), "-q")[0] == 0
        there = sorted(Path("runs/x/checkpoints").glob("*.pt"))
        if len(there) > 1:
            cut_short(there[-1])
    for path in Path("runs/x/checkpoints").glob("*.pt"):
        cut_short(path)
    said = typed("inspect", "runs/x")[1]
    assert "none of them is whole, so it cannot resume" in said and "ckptool" not in said


def needs(value: Any, folder: Path, at: str = "") -> MemoryNeeds:
    return memory_needs(listing(opened(value, folder), at))


def conv() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 4))
    for tensor in model.buffers():
        tensor._is_hf_initialized = True  # as transformers marks them
    return model


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 4), nn.Linear(4, 20))
    model[2].weight = model[0].weight
    return model


MODELS = {"conv": conv, "tied": tied, "encoder": lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True)}
INPUTS = {"conv": torch.rand(2, 3, 8, 8), "tied": torch.tensor([[1, 2]]), "encoder": torch.rand(2, 3, 8)}


def nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["state_dict", "module"])
def test_numbers_are_those_of_torch(name: str, dtype: torch.dtype, form: str, tmp_path: Path) -> None:
    model = MODELS[name]().to(dtype)
    given = INPUTS[name]
    model(given if given.dtype == torch.int64 else given.to(dtype)).sum().backward()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    optimizer.step()
    found = needs(model.state_dict() if form == "state_dict" else model, tmp_path)
    held = [*model.parameters(), *model.buffers()]
    gradients = [p.grad for p in model.parameters()]
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.to_load == sum(found.dtypes.values()) == nbytes(held)
    assert found.to_train == nbytes([*held, *gradients, *moments])
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    both = needs(saved, tmp_path)
    steps = [state["step"] for state in optimizer.state.values()]
    assert both.optimizer == nbytes([*moments, *steps]) and both.to_train == found.to_train
    assert both.optimizer_share == both.optimizer / (both.optimizer + nbytes(held))


def test_frozen_parameters_of_a_module_need_no_gradients(tmp_path: Path) -> None:
    model = conv()
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    trained = [p for p in model.parameters() if p.requires_grad]
    found = needs(model, tmp_path)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.to_load is not None and found.to_train == found.to_load + 3 * nbytes(trained)


def test_the_bytes_of_special_tensors_are_those_of_their_parts(tmp_path: Path) -> None:
    sparse = torch.eye(50).to_sparse().coalesce()
    row = torch.eye(40).to_sparse_csr()
    found = needs({"a.weight": sparse, "b.weight": row, "a.bias": torch.ones(50)}, tmp_path)
    floats = nbytes([sparse.values(), row.values(), torch.ones(50)])
    assert found.dtypes == {"i64": nbytes([sparse.indices(), row.crow_indices(), row.col_indices()]), "f32": floats}
    assert found.parameters is None


def test_bytes_behind_views_take_memory_when_loaded(tmp_path: Path) -> None:
    found = needs({"a.weight": torch.zeros(100, 4)[:2]}, tmp_path)
    assert found.to_load == 1600 and found.dtypes == {"f32": 32}


THREE = {"unsafe-global", "custom-class", "weights-only"}


def taken(data: bytes) -> bool:
    try:
        torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception:  # noqa: BLE001 (whatever it refuses a file with)
        return False
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(150, 3000), marks=pytest.mark.soak)])
def test_it_is_there_just_where_torch_refuses(seeds: range, tmp_path: Path) -> None:
    said = {True: 0, False: 0}
    for seed in seeds:
        graph = saved_graph(seed)
        # Importing torch's nested tensors allows their names in this process. Bytes in protocol 3, which torch refuses,
        # are written as protocol 2 has them, and are not said.
        if graph is None or "nested" in graph.kinds or ("raw" in graph.kinds and graph.protocol == 3):
            continue
        file = tmp_path / "a.pt"
        file.write_bytes(graph.data)
        codes = {note.code for note in ckptool.inspect(file).notes}
        assert len(codes & THREE - {"custom-class"}) <= 1, codes
        if not codes & {"unsafe-global", "custom-class", "pickle-protocol"}:
            assert ("weights-only" not in codes) is taken(graph.data), (seed, graph.kinds)
            said["weights-only" in codes] += 1
    assert said[False] and said[True] >= 5, said


ONE_LINE: list[Any] = [
    *(np.array([1, 0, 1]).astype(kind)[0] for kind in ("?", "i1", "u8", "f2", "f8", "c16", ">f4", "S3", "U2")),
    *(np.zeros((2, 3), kind) for kind in ("?", "i1", "f4", ">i8", "U2", "M8[D]", [("a", "f4"), ("b", "i2")])),
    np.datetime64("2026-01-01"),
    np.dtype("f4"),
    np.asfortranarray(np.ones((2, 3))),
    datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.timezone.utc),
    datetime.timedelta(days=1),
    decimal.Decimal("1.5"),
    fractions.Fraction(1, 3),
    pathlib.PurePosixPath("/a/b"),
    torch.device("cuda", 1),
    torch.Size([2, 3]),
    torch.float16,
    Counter("aab"),
    slice(1, 2),
    range(3),
    1 + 2j,
    b"abc",
    None,
    "text",
]


@pytest.mark.parametrize("seed", range(12))
def test_a_value_is_one_entry_whatever_its_pickle_is_made_of(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    leaves: dict[str, Any] = {}

    def some(place: str, depth: int) -> Any:
        if depth and draw.random() < 0.5:
            parts = {str(key): some(f"{place}/{key}", depth - 1) for key in range(draw.randrange(1, 5))}
            kind = draw.choice((dict, list, types.SimpleNamespace, Whole))
            return parts if kind is dict else list(parts.values()) if kind is list else kind(**parts)
        leaves[place] = draw.choice(ONE_LINE)
        return leaves[place]

    tree = {f"k{at}": some(f"k{at}", 4) for at in range(5)}
    torch.save(tree, tmp_path / "a.pt", pickle_protocol=draw.choice((2, 3, 4, 5)))
    assert {entry.address for entry in ckptool.inspect(tmp_path / "a.pt").entries} == set(leaves)
    shown = str(ckptool.show(tmp_path / "a.pt"))
    assert "(args)" not in shown and "(state)" not in shown


class Whole:
    """A class of the file's own."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


CALLED: dict[str, Any] = {  # by the tensors that they keep; "optimizer" where those are of none that is known
    "Adam": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "Adamax": torch.optim.Adamax,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
    "Adagrad": torch.optim.Adagrad,
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": torch.optim.LBFGS,
    "SGD momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
    "Lion": "exp_avg",
    "optimizer": "exp_avg hessian",  # Sophia
    "optimizer ": "exp_avg exp_avg_sq exp_avg_diff",  # Adan
    "optimizer  ": "momentum_buffer precond_0",  # Shampoo
}


@pytest.mark.parametrize("name", CALLED)
def test_an_optimizer_is_called_what_it_is(name: str, tmp_path: Path) -> None:
    model, kind = torch.nn.Linear(3, 2), CALLED[name]
    state: Any = {n: {key: torch.ones(2) for key in str(kind).split()} for n in range(2)}
    state = {"state": state, "param_groups": [{"params": [0, 1]}]}
    if not isinstance(kind, str):
        optimizer = kind(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step(lambda: model(torch.ones(1, 3)).sum())
        state = optimizer.state_dict()
    shown = str(ckptool.inspect(saved({"optimizer": state, "model": model.state_dict()}, tmp_path / "a.pt")))
    assert f" {name.strip()} state for 2 parameters" in shown
