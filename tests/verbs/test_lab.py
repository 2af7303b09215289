"""The lab: what `doctor` says of every specimen, with its model and without, and what its commands make; `--fix`, which
makes the same in one pass. For every code of a note, and of an error that names a command: it is printed, a shell reads
it, and it runs. Torch is the judge."""

import argparse
import ast
import json
import os
import pathlib
import shutil
import warnings
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import ckptool
from ckptool.analysis.findings import Chain
from ckptool.errors import CkptoolError, Text
from fixtures import lab
from fixtures.make import make
from fixtures.torch_tar import save_tar
from fixtures.traps import TRAPS
from tests.support.cli import Ran, Run
from tests.support.engine_cases import ROOT
from tests.support.errors import refused
from tests.support.files import saved
from tests.support.lab_trial import Trial, files_below, run_line, stock_loads, trial
from tests.support.looped import looped

WITH_MODEL = [name for name, specimen in lab.SPECIMENS.items() if specimen.model]
BOTH = [(name, False) for name in lab.SPECIMENS] + [(name, True) for name in WITH_MODEL]
# Each specimen once, every other one of those that have a model with it.
ONCE = {(name, name in WITH_MODEL[::2]) for name in lab.SPECIMENS}


@pytest.fixture(scope="module")
def trials(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Trial]:
    """The specimens of this run, tried without their models or with them, each in a folder of its own."""
    chosen = BOTH if any(item.name.endswith("[all]") for item in request.session.items) else sorted(ONCE)
    before, made = os.getcwd(), {}
    for name, against in chosen:
        folder = tmp_path_factory.mktemp("lab")
        os.chdir(folder)
        try:
            made[name, against] = trial(lab.SPECIMENS[name], folder, against)
        finally:
            os.chdir(before)
    return made


def wanted(specimen: lab.Specimen, against: bool) -> frozenset[str]:
    return specimen.against if against and specimen.against is not None else specimen.codes


@pytest.mark.parametrize(
    ("name", "against"), [pytest.param(*each, marks=() if each in ONCE else pytest.mark.soak) for each in BOTH]
)
def test_a_specimen(name: str, against: bool, trials: dict[tuple[str, bool], Trial]) -> None:
    specimen, done = lab.SPECIMENS[name], trials[name, against]
    assert done.good is specimen.healthy, "the specimen is not what it says"
    assert not done.failed, "a command that was printed did not run"
    assert not (done.good and done.blocks), f"a false alarm: {done.codes}"
    if against or specimen.seen_alone:
        assert done.good or not done.all_clear, "a false all-clear"
        assert done.loads or done.good or not specimen.mended or not (against or specimen.alone), (
            "what came out does not load"
        )
    assert not done.good or done.loads, "a healthy file no longer loads after what was printed"


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(6, 600))])
@pytest.mark.parametrize("against", [False, True])
def test_any_specimen(seed: int, against: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    specimen = lab.any_specimen(seed)
    done = trial(specimen, tmp_path, against)
    assert not done.failed and not (done.good and done.blocks), done
    assert done.good or not done.all_clear or not (against or specimen.seen_alone), done
    assert done.loads or done.good or not (against or specimen.alone), done


@pytest.mark.parametrize(
    "chosen", [pytest.param(sorted(ONCE), id="once"), pytest.param(BOTH, id="all", marks=pytest.mark.soak)]
)
def test_the_share_of_what_is_named(chosen: list[tuple[str, bool]], trials: dict[tuple[str, bool], Trial]) -> None:
    faulty = [each for each in chosen if wanted(lab.SPECIMENS[each[0]], each[1])]
    named = [each for each in faulty if wanted(lab.SPECIMENS[each[0]], each[1]) <= trials[each].codes]
    assert len(lab.SPECIMENS) >= 80 and len(faulty) >= 60
    assert len(named) >= 0.95 * len(faulty), sorted(set(faulty) - set(named))


# `--fix`.
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
def test_one_command_makes_what_the_printed_ones_make(
    name: str, against: bool, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follows(lab.SPECIMENS[name], against, run, tmp_path, monkeypatch)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(6, 200))])
@pytest.mark.parametrize("against", [False, True])
def test_one_command_for_any_specimen(
    seed: int, against: bool, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follows(lab.any_specimen(seed), against, run, tmp_path, monkeypatch)


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
    refused(CkptoolError, tmp_path, lambda: ckptool.doctor(file, fix=True, in_place=True), "out=")


@looped(("suffix", "dtype"), product([".pt", ".safetensors"], [None, "bf16"]))
def test_a_shard_is_not_taken_for_a_whole(suffix: str, dtype: str | None, tmp_path: Path) -> None:
    ckptool.convert(lab.state(), tmp_path / "hub", shard_size="100B", container="sharded")
    shard = next((tmp_path / "hub").glob("*-00001-of-*.safetensors"))
    fix = lambda: ckptool.doctor(shard, tmp_path / f"out{suffix}", fix=True, dtype=dtype)  # noqa: E731
    refused(CkptoolError, tmp_path, fix, "shard 1 of")


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
        ((file, "--fix"), "an output"),
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
    assert "already exists" in run("doctor", file, "--fix", "-o", out).err and out.read_text() == "there"
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


SOURCE = Path(ckptool.__file__).parent


# Every printed command.
def zipped(path: Path, name: str, content: bytes = b"x" * 200_000, mode: int = 0, tree: Any = None) -> None:
    """A torch zip with one more record."""
    torch.save(tree or lab.state(), path)
    with zipfile.ZipFile(path, "a") as archive:
        entry = zipfile.ZipInfo(name)
        entry.create_system, entry.external_attr = 3, mode << 16
        archive.writestr(entry, content)


def legacy(path: Path, more: bytes = b"", other: torch.Tensor | None = None) -> None:
    torch.save(lab.state() | ({} if other is None else {"other": other}), path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes() + more)


def edited(path: Path) -> None:
    torch.save(lab.prefixed("module."), path)
    ckptool.strip_module(path, in_place=True)


def quantized(path: Path) -> None:
    torch.save({"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(1)}, path)


def frozen(path: Path) -> None:
    torch.jit.freeze(torch.jit.script(lab.model().eval())).save(str(path))


def tar(path: Path) -> None:
    save_tar(dict(lab.state()), path)
    path.write_bytes(path.read_bytes() + bytes(511) + b"x")


def numpy_pickle(path: Path) -> None:
    lab.SPECIMENS["detectron2.pkl"].make(path)


NOTES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "prefix-module": ("a.pt", lab.SPECIMENS["dp.pt"].make),
    "prefix-module of a folder": ("a", lab.SPECIMENS["hf_folder_dp"].make),
    "prefix-compiled": ("a.pt", lab.SPECIMENS["compiled.pt"].make),
    "cuda-location": ("a.pt", lab.SPECIMENS["on_cuda0.pt"].make),
    "device-location": ("a.pt", lab.SPECIMENS["on_mps.pt"].make),
    "wasted-storage": ("a.pt", lab.SPECIMENS["healthy_whole_storage.pt"].make),
    "pickle-protocol": ("a.pt", lab.SPECIMENS["protocol4.pt"].make),
    "big-endian": ("big_endian.pt", lambda path: make("big_endian.pt", path.parent)),
    "deflated": ("rezipped_deflated.pt", lambda path: make("rezipped_deflated.pt", path.parent)),
    "no-checksums": ("a.pt", legacy),
    "legacy-types": ("a.pt", lambda path: legacy(path, other=torch.zeros(2, dtype=torch.uint16))),
    "trailing-bytes": ("a.pt", lambda path: legacy(path, b"123456")),
    "trailing-bytes of a tar": ("a.pt", tar),
    "unused-record": ("a.pt", lambda path: zipped(path, "a/data/99")),
    "symlink-records": ("a.pt", lambda path: zipped(path, "a/link", b"x", 0o120777)),
    "superseded-pickle": ("a.pt", edited),
    "numpy-weights": ("a.pkl", numpy_pickle),
    "quantized": ("a.pt", quantized),
    "torchscript": ("a.jit", lab.SPECIMENS["script.pt"].make),
    "no-state-dict": ("a.jit", frozen),
    "pieces-not-read": ("a", lambda path: shutil.copytree(ROOT / "hf-consolidated" / "checkpoint", path)),
}
# Made by hand in the tests of what they are about: a nested class in an old pickle, a part of a checkpoint; of verbs
# other than `inspect`.
ELSEWHERE = {"nested-name", "non-finite", "unused-bytes", "part", "recover", "whole-module", "optimizer-differs"}


def codes_with_commands() -> set[str]:
    """The codes of all notes in the program that come with a command."""
    found: set[str] = set()
    for text in (path.read_text() for path in SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(text)) if "Note(" in text else ():
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Note" and len(node.args) > 2:
                found |= {part.value for part in ast.walk(node.args[0]) if isinstance(part, ast.Constant)}
    return {code for code in found if isinstance(code, str) and code != "cuda"}


def test_every_note_with_a_command_is_tried() -> None:
    assert codes_with_commands() - ELSEWHERE <= set(NOTES)


@pytest.mark.filterwarnings("ignore")
@looped("code", NOTES)
def test_the_commands_of_a_note_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (name, write), code = NOTES[code], code.partition(" ")[0]
    write(Path(name).absolute())
    notes = ckptool.inspect(name).notes
    fixes = {note.code: note.fix for note in notes if note.fix}
    if code not in fixes:  # another note has the very command
        assert code in {note.code for note in notes}
    assert fixes and all(run_line(str(fix)) == 0 for fix in fixes.values()), fixes
    outputs = [fix[fix.index("-o") + 1] for fix in fixes.values() if "-o" in fix]
    if outputs and code not in ("numpy-weights", "no-checksums"):
        assert code not in {note.code for note in ckptool.inspect(outputs[-1]).notes}


def file_of(name: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        lab.make(name, folder)
        return name

    return write


def tree_in(name: str, tree: Callable[[], Any], cut: int = 0) -> Callable[[Path], str]:
    """Writes a file, without so many of its last bytes; returns its name."""

    def write(folder: Path) -> str:
        os.truncate(path := saved(tree(), folder / name), path.stat().st_size - cut)
        return name

    return write


no_weights = tree_in("two words.pt", lambda: {"epoch": [1, 2]})
arrays = tree_in("arrays.pt", lambda: {"model": {"a.weight": np.zeros(2)}})
cut = tree_in("cut.pt", lab.state, 30)
whole = tree_in("whole.pt", lab.model)
called = tree_in("called.pt", lambda: {"m": {**lab.state(), "x": TRAPS["20-unknown-call"]()["danger"]}})


ERRORS: list[tuple[str, Callable[[Path], str], Callable[[str], Any]]] = [
    ("usage", no_weights, lambda file: ckptool.strip_module(file, "o.pt")),
    ("usage", arrays, lambda file: ckptool.strip_module(file, "o.pt")),
    ("usage", whole, lambda file: ckptool.strip_module(file, "o.pt")),
    ("unsafe-global", whole, lambda file: ckptool.load(file)),
    ("truncated", cut, ckptool.inspect),
    ("truncated", file_of("cut.safetensors"), ckptool.inspect),
    ("unsupported", file_of("compressed.pt.gz"), ckptool.inspect),
    ("not-a-checkpoint", file_of("run"), ckptool.inspect),
    ("broken-link", file_of("link.pt"), ckptool.inspect),
    ("io", lambda folder: "missing.pt", ckptool.inspect),
    ("usage", file_of("hf_folder_dp"), lambda file: ckptool.recover(file, "o.pt")),
    ("unsafe-global", called, lambda file: ckptool.add_module(file, "o.pt")),
    ("unsupported", file_of("script.pt"), lambda file: ckptool.cast(file, "o.pt", dtype="bf16")),
    ("io", file_of("healthy.pt"), lambda file: ckptool.convert(file, "new/folder/o.pt")),
]


@pytest.mark.filterwarnings("ignore")
@looped(("code", "write", "attempt"), ERRORS)
def test_the_commands_of_an_error_run(
    code: str,
    write: Callable[[Path], str],
    attempt: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path)
    with pytest.raises(CkptoolError) as caught:
        attempt(file)
    error = caught.value
    assert error.code == code and isinstance(error.fix, Text) and error.fix.commands, (error.code, str(error))
    chain = Chain(file)
    for each in error.fix.commands:
        line = str(chain.fill(each))
        loses = "recover" in line and "cut.safetensors" in line
        assert run_line(line) == loses or each[1] == "scan", line


def tied(path: Path) -> None:
    model = nn.ModuleDict({"module": nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Identity()})})
    model["module"]["b"].weight = model["module"]["a"].weight
    safetensors.torch.save_model(model, str(path))


def without_weights(path: Path) -> None:
    zipped(path, "a/data/99", tree={"args": argparse.Namespace(lr=1)})


IN_ONE_PASS: dict[str, tuple[Callable[[Path], Any], bool]] = {
    "a.bin": (tied, True),
    "a.pt": (
        lambda path: torch.save({"a.weight": np.zeros(2), "b.weight": np.zeros(2), "c": [np.ones(1)]}, path),
        False,
    ),
    "none.pt": (without_weights, False),
}


@looped("name", IN_ONE_PASS)
def test_what_is_offered_in_one_pass_is_done(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_it, is_offered = IN_ONE_PASS[name]
    make_it(Path(name))
    found = ckptool.doctor(name)
    assert bool(found.at_once) == is_offered and (not is_offered or run_line(found.at_once) == 0)
    assert [fix for each in ckptool.doctor(name).findings for fix in each.fixes if run_line(fix)] == []


def test_the_one_of_several_that_is_named_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tree_in("it's.pt", lambda: {"G": lab.state(), "D": lab.state()})(tmp_path)
    with pytest.raises(CkptoolError) as caught:
        ckptool.convert(file, "o.safetensors")
    assert run_line(f"ckptool inspect {caught.value.fix.removeprefix('Name it: ')}") == 0
