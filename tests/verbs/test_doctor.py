"""`doctor`: what a file is, why it does not load, and that the commands it prints do mend it; older state dicts, as
stock torch judges them."""

import argparse
import copy
import gzip
import io
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import ckptool
from ckptool.analysis.findings import Diagnosis, recognised
from ckptool.cli import main
from ckptool.errors import PlanRefused
from ckptool.render.lines import text as text_of
from tests.support.engine_folders import save_dcp
from tests.support.errors import refused
from tests.support.files import CORPUS, saved
from tests.support.lab_trial import run_line
from tests.support.looped import looped
from tests.support.programs import ROOT, programs
from tests.support.same import assert_same_objects


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 3)


def codes(found: Diagnosis) -> list[str]:
    return [finding.code for finding in found.findings]


def run_all(found: Diagnosis) -> str:
    """Runs every command that was printed, as it stands; returns the output of the last one that wrote."""
    out = ""
    for fix in (fix for finding in found.findings for fix in finding.fixes):
        words = shlex.split(fix)
        assert words[0] == "ckptool" and main(words[1:]) == 0, fix
        out = words[words.index("-o") + 1] if "-o" in words else out
    return out


def fc_weights() -> dict[str, torch.Tensor]:
    return {"fc.weight": torch.ones(3, 2), "fc.bias": torch.zeros(3)}


def wrapped() -> dict[str, torch.Tensor]:
    return {f"module.{key}": value for key, value in fc_weights().items()}


def test_damage_of_a_header_is_a_problem_just_where_torch_minds(tmp_path: Path) -> None:
    whole = saved(fc_weights(), tmp_path / "whole.pt").read_bytes()
    start, name = whole.index(b"archive/data/0") - 30, b"archive/data/0"
    seen = set()
    for at in range(start, start + 30 + len(name)):
        file = tmp_path / "a.pt"
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            loads = torch.equal(torch.load(file)["fc.weight"], fc_weights()["fc.weight"])
        except RuntimeError:
            loads = False
        found = ckptool.doctor(file)
        assert found.loads is loads, (at - start, found)
        assert not found.findings or "recover" in found.findings[0].fixes[0]
        seen.add((loads, bool(found.findings)))
    assert seen == {(True, False), (True, True), (False, True)}


def test_values_that_weights_only_refuses(tmp_path: Path) -> None:
    file = saved({**fc_weights(), "best": np.float64(0.5), "args": argparse.Namespace(lr=1)}, tmp_path / "a.pt")
    found = ckptool.doctor(file)
    assert "weights-only" in codes(found) and ".multiarray.scalar" in found.findings[0].what
    assert list(torch.load(run_all(found), weights_only=True)) == list(fc_weights()), "the rest is dropped, by name"
    assert torch.load(tmp_path / "a.fixed.pt", weights_only=True)["best"] == 0.5


@looped("prefix", ["", "module.", "model.", "net.encoder."])
def test_a_prefix_on_either_side(tmp_path: Path, prefix: str) -> None:
    plain = saved(fc_weights(), tmp_path / "plain.pt")
    other = saved({prefix + key: value for key, value in fc_weights().items()}, tmp_path / "other.pt")
    for file, target in ((plain, other), (other, plain)):
        found = ckptool.doctor(file, against=target)
        if not prefix:
            assert not found.findings and ckptool.doctor(file).findings == ()
            continue
        assert any(finding.code.startswith("prefix") for finding in found.findings) and not found.loads
        assert list(torch.load(run_all(found), weights_only=True)) == list(torch.load(target, weights_only=True))


def test_shapes_and_names_that_differ(tmp_path: Path) -> None:
    file = saved({**fc_weights(), "head.weight": torch.ones(10, 3)}, tmp_path / "a.pt")
    target = saved({**fc_weights(), "fc.bias": torch.ones(5), "top.weight": torch.ones(2)}, tmp_path / "b.pt")
    found = ckptool.doctor(file, against=target)
    said = {finding.code: finding.what for finding in found.findings}
    assert "1 is missing (top.weight) and 1 is unexpected (head.weight)" in said["keys-differ"]
    assert "fc.bias [3] against [5]" in said["shape-mismatch"]
    assert f"ckptool warm-start {file} --against {target}" in found.findings[0].advice
    model = torch.load(run_all(found), weights_only=True)
    assert list(model) == list(torch.load(target, weights_only=True)) and torch.equal(model["fc.bias"], torch.ones(5))

    # One command for ties and shapes; none where names may have changed, since rules have to be given with it.
    tied = {**fc_weights(), "head.weight": torch.ones(3, 2)}
    tied["head.weight"] = tied["fc.weight"]
    wrapped_target = saved({f"_orig_mod.{key}": value for key, value in tied.items()}, tmp_path / "tied.pt")
    less = saved({"module.fc.weight": torch.ones(3, 2), "module.fc.bias": torch.ones(4)}, tmp_path / "less.pt")
    found = ckptool.doctor(less, against=wrapped_target)
    assert codes(found) == ["prefix-module", "prefix", "tied-weights", "shape-mismatch"]
    assert torch.load(run_all(found), weights_only=True).keys() == torch.load(wrapped_target).keys()
    less = saved({"fc.weight": torch.ones(3, 2), "fc.bias": torch.ones(4), "top.weight": torch.ones(7)}, less)
    other = saved({**fc_weights(), "head.weight": torch.ones(7)}, tmp_path / "head.pt")
    found = ckptool.doctor(less, against=other)
    assert codes(found) == ["keys-differ", "shape-mismatch"]
    assert not any(finding.fixes for finding in found.findings) and "--on-mismatch skip" in found.findings[0].advice
    both = {"epoch": 1, "loss": 2.0, "step": 3, "averaged_model": fc_weights(), "model": fc_weights()}
    assert "beside averaged_model (an average), epoch" in str(ckptool.doctor(saved(both, tmp_path / "both.pt")))

    # A ViT at another image size: its positions are computed, the head of other classes is the model's.
    vit = {"cls": torch.ones(8), "pos_embed": torch.rand(1, 17, 8), "head.bias": torch.ones(3)}
    other = saved({**vit, "pos_embed": torch.zeros(1, 26, 8)}, tmp_path / "other.pt")
    for wanted, head in (
        (other, 3),
        (saved({**torch.load(other), "head.bias": torch.zeros(4)}, tmp_path / "four.pt"), 4),
    ):
        found = ckptool.doctor(saved(vit, tmp_path / "vit.pt"), against=wanted)
        (line,) = (str(fix) for fix in found.findings[0].fixes)
        assert "--resize 'pos_embed=bicubic(cls=1)' --on-mismatch skip" in line
        ckptool.doctor(tmp_path / "vit.pt", tmp_path / f"{head}.pt", fix=True, against=wanted)
        made = torch.load(tmp_path / f"{head}.pt", weights_only=True)
        assert made["pos_embed"][0, 0].equal(vit["pos_embed"][0, 0]) and made["pos_embed"].ne(0).all()
        assert list(made["head.bias"].shape) == [head]


CODE = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 3)
        self.head = nn.Linear(3, 5, bias=False)
        print("built")
"""


def test_against_ones_own_code_and_against_a_spec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = saved({**wrapped(), "module.head.weight": torch.ones(10, 3)}, tmp_path / "a.pt")
    (tmp_path / "net.py").write_text(CODE)
    code = f"{tmp_path / 'net.py'}:Net"
    assert main(["doctor", str(file), "--against", code, "--json"]) == 1
    text = capsys.readouterr()
    assert json.loads(text.out)["loads"] is False and text.err == "built\n"
    found = ckptool.doctor(file, against=code)
    assert codes(found) == ["prefix-module", "shape-mismatch"]
    assert "head.weight [10, 3] against [5, 3]" in found.findings[1].what
    assert tuple(torch.load(run_all(found), weights_only=True)["head.weight"].shape) == (5, 3)
    ckptool.spec(code, tmp_path / "net.json")
    found = ckptool.doctor(file, against=tmp_path / "net.json")
    assert codes(found)[1] == "shape-mismatch" and not found.findings[1].fixes, "a spec has no values to fill up with"


MESSAGES = [line.split("\t") for line in (ROOT / "docs" / "messages.txt").read_text().splitlines() if line[0] != "#"]


@looped(("code", "command", "text"), [*MESSAGES, ["unknown-error", "", "Segmentation fault"]])
def test_a_message_has_its_meaning_and_its_command(code: str, command: str, text: str) -> None:
    broken = re.sub(" (Missing key|Unexpected key|size mismatch)", r"\n\t\1", text)  # as torch prints it
    (finding,) = ckptool.doctor(error=f"Traceback (most recent call last):\n  File x\n{broken}\n").findings
    assert (finding.code, finding.certain) == (code.rstrip("?"), code[-1] != "?"), finding
    assert finding.what and (finding.fixes or finding.advice) and (code == "unknown-error" or finding.says in broken)
    assert finding.fixes[:1] == ((f"ckptool {command}",) if command else ()), finding.fixes


def test_an_error_from_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = "Traceback (most recent call last):\n  File ...\nValueError: CUDA error: out of memory"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode() + b"\xff\x1b[31m")))
    assert main(["doctor", "--error", "-"]) == 1
    out = capsys.readouterr().out
    assert "gpu-memory" in out and "\x1b" not in out


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_real_messages_of_this_torch(tmp_path: Path) -> None:
    """What torch, safetensors and torch's loaders really say here is in the table."""
    cut = saved(fc_weights(), tmp_path / "cut.pt")
    os.truncate(cut, 500)
    (tmp_path / "text.pt").write_text("version https://git-lfs")
    (tmp_path / "empty.pt").touch()
    safetensors.torch.save_file(fc_weights(), cut_short := tmp_path / "cut.safetensors")
    os.truncate(cut_short, os.path.getsize(cut_short) - 4)
    saved({"a": np.float64(1)}, tmp_path / "numpy.pt")
    saved(Net(), tmp_path / "net.pt")
    torch.jit.script(Net()).save(str(tmp_path / "jit.pt"))
    tries: dict[str, Any] = {
        "prefix-module": lambda: Net().load_state_dict(wrapped()),
        "shape-mismatch": lambda: Net().load_state_dict({**fc_weights(), "fc.bias": torch.ones(9)}),
        "nested-weights": lambda: Net().load_state_dict({"state_dict": fc_weights(), "epoch": 1}),
        "truncated": lambda: torch.load(cut, weights_only=True),
        "not-a-checkpoint": lambda: torch.load(tmp_path / "text.pt", weights_only=True),
        "numpy-values": lambda: torch.load(tmp_path / "numpy.pt", weights_only=True),
        "weights-only": lambda: torch.load(tmp_path / "net.pt", weights_only=True),
        "torchscript": lambda: torch.load(tmp_path / "jit.pt", weights_only=True),
        "shared-tensors": lambda: safetensors.torch.save_file(
            {"a": (w := torch.ones(4)), "b": w}, tmp_path / "x.safetensors"
        ),
    }
    for code, attempt in tries.items():
        with pytest.raises(Exception) as caught:
            attempt()
        said = f"{type(caught.value).__name__}: {caught.value}"
        assert (found := recognised(said)) is not None and found.finding.code == code, said
    # And what a finding quotes of them is what they say.
    for path, load in ((cut_short, safetensors.torch.load_file), (tmp_path / "empty.pt", torch.load)):
        with pytest.raises(Exception) as caught:
            load(path)
        (finding,) = ckptool.doctor(path).findings
        said = f"{type(caught.value).__name__}: {caught.value}"
        assert any(part.partition(": ")[0] in said for part in finding.says.split("; or: ")), (finding.says, said)


@pytest.mark.parametrize("name", ["two words.pt", "a\nb.pt", "it's.pt", "-dash.pt"])
def test_a_shell_runs_the_commands_whatever_the_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(wrapped(), tmp_path / name)
    cut = saved({**wrapped(), "large": torch.ones(5000)}, tmp_path / f"{name}.cut.pt")
    os.truncate(cut, os.path.getsize(cut) - 5000)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(b"inside"))
    before = (tmp_path / name).read_bytes()
    names = {name: ["strip-module"], f"{name}.cut.pt": ["recover"], f"{name}.gz": ["gzip"]}
    program = f"{programs() / 'ckptool'} "
    monkeypatch.chdir(tmp_path)
    for file, verbs in names.items():
        found = ckptool.doctor(file)
        fixes = [fix for finding in found.findings for fix in finding.fixes]
        assert [next(word for word in fix.split(" ") if word in verbs) for fix in fixes] == verbs
        for fix in fixes:
            line = fix.replace("ckptool ", program, 1) if fix.startswith("ckptool ") else fix
            ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
            assert ended.returncode == (1 if "recover" in fix else 0), (fix, ended.stderr)
        assert (tmp_path / name).read_bytes() == before, "no command replaces what is there"
    assert sum(".fixed" in file for file in os.listdir(tmp_path)) == 2, "those of strip-module and recover"


def test_of_a_folder_one_command_writes_a_file_that_the_model_loads(tmp_path: Path) -> None:
    """And no copy of the rest first."""
    state = {"model": nn.Linear(3, 2).state_dict(), "path": Path("x"), "step": 1}  # none of weights_only's values
    save_dcp(state, folder := tmp_path / "step-1")
    found = ckptool.doctor(folder)
    (command,) = [fix for each in found.findings for fix in each.fixes]
    assert f"{folder}#model" in command and text_of(ckptool.doctor(f"{folder}#model")).startswith(f"{folder}#model: ")
    nn.Linear(3, 2).load_state_dict(torch.load(run_all(found), weights_only=True))
    line = next(line for line in str(found).splitlines() if "Or in Python: " in line)
    exec(line.partition("Or in Python: ")[2], {"model": (model := nn.Linear(3, 2)), "ckptool": ckptool})
    assert model.weight.equal(ckptool.load(folder)["model"]["weight"])


class Learner:
    """A trainer's object; this module is where its class is found."""

    def __init__(self, model: Any) -> None:
        self.model, self.rate = model, 0.1


# Of a module and its state dict, what people save.
SAVED: list[Callable[[nn.Module, Any], Any]] = [
    lambda net, state: {"model": net, "epoch": 1},
    lambda net, state: {"model": state, "epoch": 1},
    lambda net, state: {"train": {"state dict": state}, "epoch": 1},
    lambda net, state: [state, 1],
    lambda net, state: {"it's\nhere": state, "epoch": 1},
    lambda net, state: {"learner": Learner(net), "epoch": 1},
    lambda net, state: {"learner": Learner(state), "epoch": 1},
    lambda net, state: Learner(net),
    lambda net, state: {"all": types.SimpleNamespace(net=state), "epoch": 1},
]


@looped("number", range(len(SAVED)))
def test_a_python_line_loads_the_weights(number: int, tmp_path: Path) -> None:
    """In a real Python that trusts the file: torch is the judge."""
    file = saved(SAVED[number](net := Net(), net.state_dict()), tmp_path / "a.pt")
    said = text_of(ckptool.doctor(file))
    lines = re.findall(r"in Python: (model\.load_state_dict\(.*\))$", said, re.MULTILINE | re.IGNORECASE)
    assert lines, said
    for line in lines:
        exec(line, {"model": (fresh := Net()), "checkpoint": torch.load(file, weights_only=False)})
        assert_same_objects(dict(fresh.state_dict()), dict(net.state_dict()))


@looped("name", sorted(os.listdir(CORPUS)) if CORPUS.is_dir() else [])
def test_every_command_for_a_real_file_succeeds(name: str, tmp_path: Path) -> None:
    source = CORPUS / name
    copy = shutil.copytree if source.is_dir() else shutil.copyfile
    copy(source, tmp_path / name)
    found = ckptool.doctor(tmp_path / name)
    if out := run_all(found):
        again = ckptool.doctor(out)
        assert {finding.code for finding in again.findings if finding.blocks} <= {"prefix-module"}


@pytest.mark.parametrize(("wrapper", "loads"), [("module", True), ("_orig_mod", False)])
def test_names_with_and_without_a_prefix_of_compiling_load_nowhere(wrapper: str, loads: bool, tmp_path: Path) -> None:
    """A child may be called module, as torch shows; what `torch.compile` makes has no other names beside."""

    class Parent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.add_module(wrapper, torch.nn.Linear(2, 1, bias=False))

    found = ckptool.doctor(saved(Parent().state_dict(), tmp_path / "m.pt"))
    assert [each.blocks for each in found.findings if each.code.startswith("prefix")] == [not loads]
    assert not any(each.commands for each in found.findings)


def test_a_fix_that_casts_says_which_values_it_rounded(tmp_path: Path) -> None:
    file = saved({"fc.weight": torch.linspace(0, 1, 7)}, tmp_path / "m.pt")
    done = ckptool.doctor(file, tmp_path / "o.pt", fix=True, dtype="bf16")
    assert "values rounded in 1 of 1 storage" in text_of(done)


State = dict[str, Any]


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.ones(2))


class Fused(nn.Module):
    """A module with a convolution and a BatchNorm fused for quantization-aware training."""

    def __init__(self) -> None:
        super().__init__()
        qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
        self.block = torch.ao.nn.intrinsic.qat.ConvBn2d(3, 4, 1, qconfig=qconfig)


def norms() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "norms": norms,
    "sync": lambda: nn.SyncBatchNorm(4),
    "tracking instance norm": lambda: nn.Sequential(nn.InstanceNorm2d(3, affine=True, track_running_stats=True)),
    "instance norm": lambda: nn.Sequential(nn.InstanceNorm2d(3, affine=True)),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))),
    "spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 2))),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "transformer": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "lstm": lambda: nn.LSTM(3, 2),
    "scalar": Scalar,
    "fused": Fused,
}


OLD_NAMES = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
OLD_FUSED = {"bn.weight": "gamma", "bn.bias": "beta"} | {
    f"bn.{name}": name for name in ("running_mean", "running_var", "num_batches_tracked")
}


def with_version(state: Any, version: int) -> State:
    """Without the counters of norms, and with `_metadata` of that version."""
    made = OrderedDict(ERAS["without counters"](state))
    made._metadata = {k: {**v, "version": version} for k, v in state._metadata.items()}  # type: ignore[attr-defined]
    return made


def without(state: State, *ends: str, most: int = 99) -> State:
    gone = [key for key in state if key.endswith(ends)][:most]
    return {key: value for key, value in state.items() if key not in gone}


def old_names(state: State, names: dict[str, str] = OLD_NAMES) -> State:
    new = {key: next((n for n in names if key.endswith(n)), "") for key in state}
    return {key.removesuffix(new[key]) + names.get(new[key], ""): value for key, value in state.items()}


def old_spectral_norm(state: State) -> State:
    made = without(state, "weight_v")
    return {**made, **{key[:-5]: value / 2 for key, value in made.items() if key.endswith("weight_orig")}}


def old_scalars(state: State) -> State:
    return {k: v.reshape(1) if v.dim() == 0 and v.is_floating_point() else v for k, v in state.items()}


ERAS: dict[str, Callable[[Any], State]] = {
    "without metadata": dict,
    "without counters": lambda state: without(state, "num_batches_tracked"),
    "version 1 without counters": lambda state: with_version(state, 1),
    "version 2 without counters": lambda state: with_version(state, 2),
    "one counter less": lambda state: without(state, "num_batches_tracked", most=1),
    "old weight norm": old_names,
    "one half of weight norm": lambda state: without(old_names(state), "weight_g"),
    "old fused": lambda state: old_names(state, OLD_FUSED),
    "old observers": lambda state: without(state, ".eps"),
    "old spectral norm": old_spectral_norm,
    "old scalars": old_scalars,
    "without bias": lambda state: without(state, "bias"),
    "statistics of instance norm": lambda state: {
        **state,
        "0.running_mean": torch.zeros(3),
        "0.running_var": torch.ones(3),
    },
}
CASES = list(itertools.product(MODELS, ERAS))


def stock_loads(model: nn.Module, state: State) -> bool:
    try:
        copy.deepcopy(model).load_state_dict(copy.copy(state), strict=True)
    except RuntimeError:
        return False
    return True


@pytest.mark.filterwarnings("ignore")  # torch's, on its quantization
@looped(("name", "era"), CASES)
def test_missing_is_what_torch_misses(name: str, era: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved, model = MODELS[name](), MODELS[name]()
    state = ERAS[era](saved.state_dict())
    torch.save(state, tmp_path / "old.pt")
    torch.save(model.state_dict(), tmp_path / "new.pt")
    loads = stock_loads(model, state)
    found = ckptool.doctor(tmp_path / "old.pt", against=tmp_path / "new.pt")
    assert found.loads is loads, [finding.what for finding in found.findings]
    report = ckptool.warm_start(tmp_path / "old.pt", tmp_path / "new.pt", strict=True)
    assert report.accepted is loads or (report.accepted and era == "old scalars"), report.refused
    before = copy.deepcopy(model.state_dict())
    if not loads:
        refused(PlanRefused, tmp_path, lambda: ckptool.load_into(model, tmp_path / "old.pt", strict=True))
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        return
    ckptool.load_into(model, tmp_path / "old.pt", strict=True)
    stock = MODELS[name]()
    stock.load_state_dict(before)
    stock.load_state_dict(copy.copy(state))
    for key, value in stock.state_dict().items():
        # Of spectral norm torch solves for the second vector; the power iteration does that anyway.
        is_solved = era == "old spectral norm" and key.endswith("_v")
        assert is_solved or not isinstance(value, torch.Tensor) or torch.equal(value, model.state_dict()[key]), key


def test_safetensors_have_no_versions(tmp_path: Path) -> None:
    state = without(norms().state_dict(), "num_batches_tracked")
    safetensors.torch.save_file(state, tmp_path / "old.safetensors")
    torch.save(norms().state_dict(), tmp_path / "new.pt")
    report = ckptool.warm_start(tmp_path / "old.safetensors", tmp_path / "new.pt", tmp_path / "out.pt", strict=True)
    assert report.accepted and not report.missing and len(report.supplied) == 2
    norms().load_state_dict(torch.load(tmp_path / "out.pt", weights_only=True))


def test_counters_on_the_meta_device_begin_at_zero(tmp_path: Path) -> None:
    torch.save(without(norms().state_dict(), "num_batches_tracked"), tmp_path / "old.pt")
    with torch.device("meta"):
        model = norms()
    ckptool.load_into(model, tmp_path / "old.pt", strict=True)
    assert model.get_buffer("1.num_batches_tracked").item() == 0 and not any(p.is_meta for p in model.parameters())


def test_one_pass_is_offered_only_where_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit of the file's own header of each record is turned: the record is lost, which only `recover` finds."""
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {f"module.{name}": torch.ones(9) for name in "abc"}, "epoch": 1}, "m.pt")
    data = Path("m.pt").read_bytes()
    with zipfile.ZipFile("m.pt") as archive:
        places = [info.header_offset for info in archive.infolist() if "/data/" in info.filename]
    for number, place in enumerate(at + byte for at in places for byte in (0, 14, 18, 30)):
        Path(f"{number}.pt").write_bytes(data[:place] + bytes([data[place] ^ 8]) + data[place + 1 :])
        found = ckptool.doctor(f"{number}.pt")
        assert not found.at_once or run_line(found.at_once) == 0, found
        assert found.at_once or any("recover" in fix for each in found.findings for fix in each.fixes)
