"""`doctor --fix`: one command makes what the printed ones make, of every specimen of the lab and of any faults
together; torch is the judge, and a shell runs what is printed."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import warnings
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import ckptool
from ckptool.errors import CkptoolError
from fixtures import lab
from tests.support.cli import Ran, Run
from tests.support.lab_trial import files_below, stock_loads, trial
from tests.support.looped import looped

EVERY = [(name, against) for name, each in lab.SPECIMENS.items() for against in (False, True)[: 1 + bool(each.model)]]


def contents() -> dict[str, bytes]:
    return {name: Path(name).read_bytes() for name in sorted(files_below()) if not os.path.islink(name)}


def loaded(path: str) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = safetensors.torch.load_file(path) if path.endswith(".safetensors") else torch.load(path)
    return dict(tree)


def assert_same_tensors(made: str, expected: str) -> None:
    found, wanted = loaded(made), loaded(expected)
    ordered = list if expected.endswith(".pt") else sorted
    assert ordered(found) == ordered(wanted)
    for name, value in wanted.items():
        assert found[name].dtype is value.dtype and found[name].shape == value.shape, name
        assert found[name].reshape(-1).view(torch.uint8).equal(value.reshape(-1).view(torch.uint8)), name


def fix(run: Run, name: str, out: str, *more: str) -> Ran:
    """Runs `doctor --fix`: first with -n, which says the same and writes nothing."""
    words = ["doctor", f"./{name}" if name.startswith("-") else name, "--fix", "-o", out, "--json", *more]
    before = contents()
    tried = run(*words, "-n")
    assert contents() == before
    done = run(*words)
    assert tried.code == done.code
    said, planned = (json.loads(each.out) for each in (done, tried))
    if done.code == 0:
        planned |= {"dry_run": False}
    assert said == planned
    assert contents().keys() - before.keys() == ({f"./{out}"} if done.code == 0 else set())
    return done


def follows(specimen: lab.Specimen, against: bool, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("shell", "one"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "shell")
    shell = trial(specimen, tmp_path / "shell", against)
    monkeypatch.chdir(tmp_path / "one")
    lab.make(specimen, tmp_path / "one")
    found = ckptool.doctor(specimen.name, against=f"net.py:{specimen.model}" if against else None)
    named = specimen.name.endswith(".safetensors") and "misnamed" not in shell.codes
    out = "out.safetensors" if named else "out.pt"
    done = fix(run, specimen.name, out, *(("--against", f"net.py:{specimen.model}") if against else ()))
    by_others = any(not line.startswith("ckptool ") for each in found.findings for line in each.fixes)
    unseen = not against and not (specimen.seen_alone and specimen.alone)  # without the model nothing is wrong
    if (shell.loads or specimen.healthy or unseen) and not by_others:
        assert done.code == 0 and stock_loads(out, specimen.model) is shell.loads, done
        assert_same_tensors(out, str(tmp_path / "shell" / shell.out))
        assert found.findings or Path(out).read_bytes() == Path(specimen.name).read_bytes()
    else:
        said = json.loads(done.out)
        assert done.code == 2 and any(said["what"].endswith(each.what) for each in found.findings), (said, found)


@pytest.mark.parametrize(
    ("name", "against"),
    [pytest.param(*each, marks=() if index % 3 == 0 else pytest.mark.soak) for index, each in enumerate(EVERY)],
)
def test_a_specimen(name: str, against: bool, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follows(lab.SPECIMENS[name], against, run, tmp_path, monkeypatch)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(6, 200))])
@pytest.mark.parametrize("against", [False, True])
def test_any_specimen(seed: int, against: bool, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follows(lab.any_specimen(seed), against, run, tmp_path, monkeypatch)


# Faults together ------------------------------------------------------------------------------------------------------

FAULTS = ("module.", "_orig_mod.", "cuda:3", "nested", "namespace", "path", "whole", "legacy", "protocol 4")
TOGETHER = [some for count in (1, 2, 3) for some in combinations(FAULTS, count)]
IN_PLACE = {*FAULTS} - {"legacy", "protocol 4"}


def faulty(faults: tuple[str, ...], path: Path) -> nn.Module:
    """Writes a model with these faults, and returns the model."""
    model = lab.model()
    wrapped: Any = nn.DataParallel(model) if "module." in faults else model
    if "_orig_mod." in faults:
        outer = nn.Module()
        outer.add_module("_orig_mod", wrapped)
        wrapped = outer
    tree: Any = wrapped if "whole" in faults else wrapped.state_dict()
    beside = {"namespace": {"args": argparse.Namespace(lr=0.1)}, "path": {"log": pathlib.PurePosixPath("a/b")}}
    more = {key: value for fault in faults for key, value in beside.get(fault, {}).items()}
    if "nested" in faults or more:
        tree = {"epoch": 3, "state_dict": tree, "optimizer": lab.adam(model), **more}
    options: dict[str, Any] = {"_use_new_zipfile_serialization": False} if "legacy" in faults else {}
    options |= {"pickle_protocol": 4} if "protocol 4" in faults else {}
    with ExitStack() as stack:
        if "cuda:3" in faults:
            stack.enter_context(lab.tagged("cuda:3"))
        torch.save(tree, path, **options)
    return model


@looped("faults", TOGETHER)
def test_faults_together(faults: tuple[str, ...], tmp_path: Path) -> None:
    file, out = tmp_path / "in.pt", tmp_path / "out.pt"
    model = faulty(faults, file)
    done = ckptool.doctor(file, out, fix=True, against=lab.model())
    found = torch.load(out, weights_only=True)
    lab.model().load_state_dict(found, strict=True)
    assert list(found) == list(model.state_dict())
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    behind = {"epoch", "optimizer"} if {"nested", "namespace", "path"} & {*faults} else set()
    assert behind <= {*done.facts["left_behind"]}


@looped("faults", [each for each in TOGETHER if {*each} <= IN_PLACE])
def test_in_place_the_file_keeps_its_tree(faults: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "in.pt"
    model = faulty(faults, file)
    ckptool.doctor(file, fix=True, in_place=True)
    found = torch.load(file, weights_only=True)
    weights = found
    if "state_dict" in found:
        assert found["epoch"] == 3 and len(found["optimizer"]["state"]) == 6
        weights = found["state_dict"]
    lab.model().load_state_dict(weights, strict=True)
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


@looped("faults", [("legacy", "path"), ("protocol 4",), ("cuda:3", "legacy", "whole")])
def test_what_needs_another_file_is_refused_in_place(faults: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "in.pt"
    faulty(faults, file)
    before = file.read_bytes()
    with pytest.raises(CkptoolError, match="out="):
        ckptool.doctor(file, fix=True, in_place=True)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("more", [{}, {"dtype": "bf16"}])
def test_a_shard_is_not_taken_for_a_whole(suffix: str, more: dict[str, str], tmp_path: Path) -> None:
    ckptool.convert(lab.state(), tmp_path / "hub", shard_size="100B", container="sharded")
    shard = next((tmp_path / "hub").glob("*-00001-of-*.safetensors"))
    with pytest.raises(CkptoolError, match="shard 1 of"):
        ckptool.doctor(shard, tmp_path / f"out{suffix}", fix=True, **more)
    assert not (tmp_path / f"out{suffix}").exists()


def test_a_submodule_called_module_is_no_wrapper(tmp_path: Path) -> None:
    model = lab.model()
    model.module = nn.Linear(2, 2)
    torch.save(model, tmp_path / "in.pt")
    ckptool.doctor(tmp_path / "in.pt", tmp_path / "out.pt", fix=True)
    model.load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True), strict=True)


def test_what_it_does_not_do(tmp_path: Path, run: Run) -> None:
    file, out = tmp_path / "in.pt", tmp_path / "out.pt"
    faulty(("module.", "nested"), file)
    torch.save(lab.state("wider"), tmp_path / "wider.pt")
    for words, said in (
        ((file, "--fix"), "where to write"),
        ((file, "-o", out), "without --fix"),
        ((file, "--fix", "-o", out, "--in-place"), "--in-place"),
        (("--fix", "-o", out), "nothing to look at"),
        ((file, "--fix", "-o", out, "--error", "Killed"), "both --error and --fix"),
        ((file, file, "--fix", "-o", out), "cannot be written to one"),
        ((file, "--fix", "-o", file), "is the input itself"),
        ((f"{file}#state", "--fix", "-o", out), "state_dict"),
        ((file, "--fix", "-o", out, "--against", tmp_path / "wider.pt.spec"), "wider.pt.spec"),
    ):
        ended = run("doctor", *words)
        assert ended.code == 2 and said in ended.err and not out.exists(), (words, ended)
    out.write_text("there")
    assert "exists already" in run("doctor", file, "--fix", "-o", out).err and out.read_text() == "there"
    assert run("doctor", f"{file}#state_dict", "--fix", "-o", out, "-f").code == 0
    lab.model().load_state_dict(torch.load(out, weights_only=True))


def test_many_files_go_into_a_folder(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, faults in enumerate(combinations(("module.", "cuda:3", "nested"), 2)):
        faulty(faults, Path(f"{number}.pt"))
    done = run("doctor", "0.pt", "1.pt", "2.pt", "--fix", "-d", "ready")
    assert done.code == 0 and "1. strip-module [prefix-module]:" in done.out and "FILE" not in done.out, done.out
    for name in os.listdir("ready"):
        lab.model().load_state_dict(torch.load(f"ready/{name}"))
    assert sorted(os.listdir("ready")) == ["0.pt", "1.pt", "2.pt"]


def test_in_memory_it_is_given_back() -> None:
    state = {"epoch": 1, "model": {f"module.{key}": value for key, value in lab.state().items()}}
    fixed = ckptool.doctor(state, fix=True)
    lab.model().load_state_dict(fixed)
    assert fixed["fc.bias"] is state["model"]["module.fc.bias"]
    assert ckptool.doctor(fixed, fix=True).keys() == fixed.keys()
