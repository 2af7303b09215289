"""What the command lines run on: fixtures, traps, the lab, files of old versions, folders, those of engines, whole and
broken, hostile files, odd usage, and the corpus if it is there."""

import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import safetensors.torch
import torch
import yaml
from torch import nn

from fixtures import lab
from fixtures.make import PRODUCERS, TRAPS, make
from fixtures.torch_tar import save_tar
from tests.golden import commands
from tests.golden.commands import Facts, Words
from tests.golden.names import names_cases
from tests.support.all_hostile import everything
from tests.support.engine_cases import committed_cases
from tests.support.hostile_folders import Mutation, folder_mutations
from tests.support.small_runs import MLP

ROOT = Path(__file__).parents[2]
CORPUS = ROOT.parent / "shared" / "corpus"
LARGE = 100_000  # bytes of a hostile file, of which an eighth is tried
BROKEN = 4  # ways for each folder of an engine
NET = """
from torch import nn


def build():
    return nn.ModuleDict({"fc1": nn.Linear(8, 16), "bn": nn.BatchNorm1d(16), "fc2": nn.Linear(16, 4)})
"""


@dataclass(frozen=True)
class Case:
    """A file (or folder) to work on, in a folder of its own with `ref.pt` and `net.py` beside it.

    lines: the commands, for what is known of the file.  model: a factory that it is for.
    """

    name: str
    make: Callable[[Path], Path]
    lines: Callable[[Facts], Iterator[Words]] = commands.all_verbs
    model: str = "net.py:build"
    of_corpus: bool = False

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
    """All of them; a name is one word, and a file's."""
    return (replace(case, name=re.sub(r"[^\w.%-]+", "_", case.name)) for case in _cases())


def _cases() -> Iterator[Case]:
    for name in PRODUCERS:
        yield Case(name, lambda folder, name=name: make(name, folder))
    for path in [*sorted((ROOT / "fixtures").glob("*.pt")), *sorted((ROOT / "fixtures" / "versions").glob("*.pt"))]:
        yield Case(path.name, lambda folder, path=path: _copied(path, folder))
    for maker in (_npy, _npz, _tar, _sharded, _several_roots):
        yield Case(maker.__name__.strip("_"), maker)
    for path in sorted(CORPUS.iterdir()) if CORPUS.exists() else ():
        if path.suffix not in (".md", ".tsv"):
            yield Case(f"corpus-{path.name}", lambda folder, path=path: _copied(path, folder), of_corpus=True)
    yield Case("training-run", _configuration, commands.training)
    for name in TRAPS:
        yield Case(f"trap-{name}", lambda folder, name=name: make(name, folder), commands.few_verbs)
    for name, specimen in lab.SPECIMENS.items():
        model = f"net.py:{specimen.model or 'build'}"
        yield Case(f"lab-{name}", lambda folder, name=name: lab.make(name, folder), commands.few_verbs, model)
    for folder in committed_cases():
        whole = folder / "checkpoint"
        yield Case(f"engine-{folder.name}", lambda out, whole=whole: _copied(whole, out), commands.few_verbs)
        yield from _broken(folder.name, whole)
    for number, (title, data) in enumerate(everything()):
        if len(data) <= LARGE or number % 8 == 0:
            yield Case(f"hostile-{title}", lambda folder, data=data: _written(data, folder), commands.hostile)
    for name, maker, lines in names_cases():
        yield Case(name, maker, lines)
    yield Case("usage", lambda folder: make("training.pt", folder), commands.usage)


def _broken(name: str, whole: Path) -> Iterator[Case]:
    """Some of the ways in which a file of an engine's folder can be broken."""
    rng = random.Random(name)
    mutations = [each for each in folder_mutations(whole, rng) if not re.search("FIFO|outside|another rank", each.how)]
    for mutation in rng.sample(mutations, min(BROKEN, len(mutations))):

        def broken(out: Path, mutation: Mutation = mutation) -> Path:
            folder = _copied(whole, out)
            mutation.do(folder)
            return folder

        yield Case(f"broken-{name}-{mutation}", broken, commands.hostile)


def _written(data: bytes, folder: Path) -> Path:
    (folder / "m.pt").write_bytes(data)
    return folder / "m.pt"


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
