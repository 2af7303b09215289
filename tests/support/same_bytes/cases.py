"""What the command lines run on: fixtures, traps, the lab, files of old versions, folders, and the corpus if it is
there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import safetensors.torch
import torch
import yaml
from torch import nn

from fixtures import lab
from fixtures.make import PRODUCERS, TRAPS, make
from fixtures.torch_tar import save_tar
from tests.support.small_runs import MLP

ROOT = Path(__file__).parents[3]
CORPUS = ROOT.parent / "shared" / "corpus"
NET = """
from torch import nn


def build():
    return nn.ModuleDict({"fc1": nn.Linear(8, 16), "bn": nn.BatchNorm1d(16), "fc2": nn.Linear(16, 4)})
"""


@dataclass(frozen=True)
class Case:
    """A file (or folder) to work on, in a folder of its own with `ref.pt` and `net.py` beside it.

    few: only some of the commands.  model: a factory that it is for.  trains: the file is the configuration of a run.
    """

    name: str
    make: Callable[[Path], Path]
    few: bool = False
    model: str = "net.py:build"
    trains: bool = False

    def prepare(self, folder: Path) -> str:
        """Fills the folder; the name of the file."""
        folder.mkdir(parents=True)
        (folder / "net.py").write_text(NET)
        reference(folder / "ref.pt")
        numpy.save(folder / "ones.npy", numpy.ones((2, 3), "f4"))
        (folder / "rules.yaml").write_text("- '*weight => *w'\n- 'module.* => m.*'\n")
        return self.make(folder).name


def reference(path: Path) -> None:
    """The model of `net.py`, as a training checkpoint."""
    torch.manual_seed(7)
    layers = {"fc1": nn.Linear(8, 16), "bn": nn.BatchNorm1d(16), "fc2": nn.Linear(16, 4)}
    torch.save({"state_dict": nn.ModuleDict(layers).state_dict(), "epoch": 3}, path)


def cases() -> Iterator[Case]:
    for name in PRODUCERS:
        yield Case(name, lambda folder, name=name: make(name, folder))
    for path in [*sorted((ROOT / "fixtures").glob("*.pt")), *sorted((ROOT / "fixtures" / "versions").glob("*.pt"))]:
        yield Case(path.name, lambda folder, path=path: _copied(path, folder))
    for maker in (_npy, _npz, _tar, _sharded, _several_roots):
        yield Case(maker.__name__.strip("_"), maker)
    for path in sorted(CORPUS.iterdir()) if CORPUS.exists() else ():
        if path.suffix not in (".md", ".tsv"):
            yield Case(f"corpus-{path.name}", lambda folder, path=path: _copied(path, folder))
    yield Case("training-run", _configuration, trains=True)
    for name in TRAPS:
        yield Case(f"trap-{name}", lambda folder, name=name: make(name, folder), few=True)
    for name, specimen in lab.SPECIMENS.items():
        model = f"net.py:{specimen.model or 'build'}"
        yield Case(f"lab-{name}", lambda folder, name=name: lab.make(name, folder), few=True, model=model)


def _configuration(folder: Path) -> Path:
    config = {**MLP, "run": "run", "train": {"steps": 6}, "eval": {"every": 2}, "save": {"every": 2}}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder / "run.yaml"


def _copied(path: Path, folder: Path) -> Path:
    target = folder / path.name
    if path.is_dir():
        shutil.copytree(path, target, copy_function=shutil.copyfile)
        target.chmod(0o755)
    else:
        shutil.copyfile(path, target)
    return target


def _npy(folder: Path) -> Path:
    numpy.save(folder / "array.npy", numpy.arange(12.0).reshape(3, 4))
    return folder / "array.npy"


def _npz(folder: Path) -> Path:
    arrays = {"fc.weight": numpy.arange(12.0, dtype="f4").reshape(3, 4), "fc.bias": numpy.zeros(3, "f2")}
    numpy.savez(folder / "arrays.npz", **arrays)
    return folder / "arrays.npz"


def _tar(folder: Path) -> Path:
    state = {"fc.weight": torch.arange(6.0).reshape(2, 3), "fc.bias": torch.ones(2)}
    return save_tar({"state_dict": state, "epoch": 2}, folder / "old.tar")


def _sharded(folder: Path) -> Path:
    model = folder / "model"
    model.mkdir()
    shards = {"a": {"a.weight": torch.ones(4, 4)}, "b": {"b.weight": torch.arange(8.0), "b.bias": torch.zeros(2)}}
    for name, tensors in shards.items():
        safetensors.torch.save_file(tensors, model / f"{name}.safetensors", metadata={"format": "pt"})
    names = ", ".join(f'"{key}": "{name}.safetensors"' for name, tensors in shards.items() for key in tensors)
    (model / "model.safetensors.index.json").write_text(
        f'{{"metadata": {{"total_size": 104}}, "weight_map": {{{names}}}}}'
    )
    return model


def _several_roots(folder: Path) -> Path:
    """Two models, one of them a copy of the other's tensors, views of one storage, a tie across models, plain
    values."""
    torch.manual_seed(1)
    big = torch.arange(24.0)
    one = {"fc.weight": torch.randn(3, 4), "fc.bias": torch.zeros(3), "view": big[4:10].reshape(2, 3), "tail": big[20:]}
    two = {"module." + key: value.clone() for key, value in one.items()} | {"module.tied": one["fc.weight"].t()}
    torch.save({"g": one, "d": two, "epoch": 3, "name": "x", "nested": {"list": [1, 2.5, None]}}, folder / "two.pt")
    return folder / "two.pt"
