"""`doctor`: what a file is, why it does not load, and that the commands it prints do mend it."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
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
from tests.support.cli import Run
from tests.support.dcp_folders import save_dcp
from tests.support.files import CORPUS, saved
from tests.support.looped import looped
from tests.support.programs import programs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 3)


def codes(found: Diagnosis) -> list[str]:
    return [finding.code for finding in found.findings]


def run_all(found: Diagnosis) -> str:
    """Runs every command that was printed, as it stands; returns the output of the last one that wrote."""
    out = ""
    for finding in found.findings:
        for fix in finding.fixes:
            words = shlex.split(fix)
            assert words[0] == "ckptool", fix
            assert main(words[1:]) == 0, fix
            out = words[words.index("-o") + 1] if "-o" in words else out
    return out


def fc_weights() -> dict[str, torch.Tensor]:
    return {"fc.weight": torch.ones(3, 2), "fc.bias": torch.zeros(3)}


def test_a_healthy_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = saved(fc_weights(), tmp_path / "a.pt")
    assert ckptool.doctor(file).findings == ()
    assert main(["doctor", str(file)]) == 0
    out = capsys.readouterr().out
    assert "found nothing" in out and "against a model: --against MODEL" in out
    assert main(["doctor", str(file), "--against", str(file)]) == 0
    assert "is not known" not in capsys.readouterr().out


def wrapped() -> dict[str, torch.Tensor]:
    return {f"module.{key}": value for key, value in fc_weights().items()}


def from_a_gpu(path: Path) -> None:
    ckptool.remap(saved(wrapped(), path.with_name("cpu.pt")), path, to="cuda:0")


def damaged_header(path: Path, field: int) -> None:
    """Of a record whose data is whole: `strip-module` refuses to copy it."""
    name, data = b"archive/data/0", bytearray(saved(wrapped(), path).read_bytes())
    data[data.index(name) + field] ^= 1
    path.write_bytes(data)


LOADS, FAILS = True, False
TWO = {"state_dict": fc_weights(), "ema_state_dict": fc_weights(), "epoch": 1}
# What a file is called, what is in it, the codes, whether it loads as it is, and what is said besides.
MENDED: dict[str, tuple[str, Any, str, bool, str]] = {
    "a wrapped model from a GPU": ("a.pt", from_a_gpu, "prefix-module cuda-location", FAILS, ""),
    "a whole module": ("a.pt", {"model": Net(), "epoch": 3}, "custom-class nested-weights", FAILS, "whole model"),
    "a wrapped one": ("a.pt", nn.DataParallel(Net()), "custom-class prefix-module", FAILS, "whole model"),
    "safetensors named .pt": ("a.pt", lambda p: safetensors.torch.save_file(fc_weights(), p), "misnamed", FAILS, ""),
    "weights in a file of training": ("a.pth.tar", {"state_dict": fc_weights(), "epoch": 1}, "nested-weights", LOADS, ""),
    "weights beside their average": ("a.pt", TWO, "nested-weights", LOADS, "checkpoint['state_dict']"),
    "several sets": ("a.pt", {"G": fc_weights(), "D": fc_weights()}, "several-weights", LOADS, "G, D"),
    "a header's signature": ("a.pt", lambda p: damaged_header(p, -30), "corrupt prefix-module", FAILS, "recover"),
    "a header's checksum": ("a.pt", lambda p: damaged_header(p, -16), "corrupt prefix-module", FAILS, "recover"),
    "a header's name": ("a.pt", lambda p: damaged_header(p, 13), "ambiguous prefix-module", FAILS, "recover"),
}  # fmt: skip


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


@looped("what", MENDED)
def test_the_commands_mend_it(what: str, tmp_path: Path) -> None:
    name, make, expected, loads, said = MENDED[what]
    is_tree = isinstance(make, (dict, nn.Module))
    saved(make, tmp_path / name) if is_tree else make(tmp_path / name)
    found = ckptool.doctor(tmp_path / name)
    assert codes(found) == expected.split() and found.loads is loads and said in str(found)
    out = run_all(found)
    assert Path(out).name.endswith(name[1:]) and ".fixed" in out
    Net().load_state_dict(torch.load(out, weights_only=True))


def test_values_that_weights_only_refuses(tmp_path: Path) -> None:
    file = saved({**fc_weights(), "best": np.float64(0.5), "args": argparse.Namespace(lr=1)}, tmp_path / "a.pt")
    found = ckptool.doctor(file)
    assert "weights-only" in codes(found) and "numpy.core.multiarray.scalar" in found.findings[0].what.replace(
        "_core", "core"
    )
    assert list(torch.load(run_all(found), weights_only=True)) == list(fc_weights()), (
        "what no module has is dropped, by name"
    )
    assert torch.load(tmp_path / "a.fixed.pt", weights_only=True)["best"] == 0.5


def test_a_torch_file_that_is_named_safetensors(tmp_path: Path) -> None:
    saved(fc_weights(), tmp_path / "a.safetensors")
    found = ckptool.doctor(tmp_path / "a.safetensors")
    assert codes(found) == ["misnamed"]
    assert set(safetensors.torch.load_file(run_all(found))) == set(fc_weights())


def test_waste_behind_views(tmp_path: Path) -> None:
    file = saved({"w": torch.ones(1_000_000)[:4]}, tmp_path / "a.pt")
    found = ckptool.doctor(file)
    assert codes(found) == ["wasted-storage"] and found.loads
    assert os.path.getsize(run_all(found)) < 2_000


def test_a_git_lfs_pointer_names_another_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.pt"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    found = ckptool.doctor(file)
    assert found.findings[0].fixes == ("git lfs pull",) and not found.loads
    assert main(["doctor", str(file)]) == 1
    assert "git lfs pull   (another program: git)" in capsys.readouterr().out


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    assert main(["doctor", str(tmp_path / "missing.pt")]) == main(["doctor"]) == 2


# --against -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["module.", "model.", "net.encoder."])
def test_a_prefix_on_either_side(tmp_path: Path, prefix: str) -> None:
    plain = saved(fc_weights(), tmp_path / "plain.pt")
    other = saved({prefix + key: value for key, value in fc_weights().items()}, tmp_path / "other.pt")
    for file, target in ((plain, other), (other, plain)):
        found = ckptool.doctor(file, against=target)
        last = [finding for finding in found.findings if finding.code.startswith("prefix")]
        assert last and not found.loads
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


# --error -------------------------------------------------------------------------------------------------------------

MESSAGES = {
    "prefix-module": 'Error(s) in loading state_dict for ResNet:\n\tMissing key(s) in state_dict: "conv1.weight". '
    '\n\tUnexpected key(s) in state_dict: "module.conv1.weight", "module.bn1.weight". ',
    "prefix-compiled": 'Missing key(s) in state_dict: "fc.weight".\n\tUnexpected key(s) in state_dict: "_orig_mod.fc.weight".',
    "nested-weights": 'Missing key(s) in state_dict: "fc.weight". Unexpected key(s) in state_dict: "epoch", "optimizer".',
    "shape-mismatch": "size mismatch for fc.weight: copying a param with shape torch.Size([1000, 512]) from checkpoint",
    "keys-differ": 'Missing key(s) in state_dict: "fc.weight".',
    "cuda-location": "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.",
    "torchscript": "RuntimeError: Cannot use ``weights_only=True`` with TorchScript archives passed to ``torch.load``",
    "numpy-values": "ModuleNotFoundError: No module named 'numpy._core'",
    "whole-module": "ModuleNotFoundError: No module named 'models'",
    "not-a-checkpoint": "_pickle.UnpicklingError: invalid load key, 'v'.",
    "pickle-protocol": "Weights only load failed. Unsupported operand 149",
    "weights-only": "_pickle.UnpicklingError: Weights only load failed. Unsupported global: GLOBAL argparse.Namespace",
    "truncated": "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
    "shared-tensors": "RuntimeError: Some tensors share memory, this will lead to duplicate memory on disk",
    "disk-full": "OSError: [Errno 28] No space left on device",
    "optimizer-differs": "ValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
    "legacy-tar": "Cannot use ``weights_only=True`` with files saved in the legacy .tar format.",
    "legacy-format": "mmap can only be used with files saved with `torch.save(_use_new_zipfile_serialization=True)`",
}  # fmt: skip


@looped("code", MESSAGES)
def test_a_message_is_recognised(code: str) -> None:
    found = recognised(MESSAGES[code])
    assert found is not None and found.finding.code == code
    (finding,) = ckptool.doctor(error=MESSAGES[code]).findings
    assert finding.code == code and finding.what and (finding.fixes or finding.advice)


TITLE = "RuntimeError: Error(s) in loading state_dict for Net:\n\t"
OTHER_MESSAGES = {
    TITLE
    + 'Missing key(s) in state_dict: "module.a.w". \n\tUnexpected key(s) in state_dict: "a.w".': "ckptool add-module FILE -o OUT",
    TITLE + 'Missing key(s) in state_dict: "a.w", "b". \n\tUnexpected key(s) in state_dict: "net.model.a.w", "c".': (
        "ckptool strip-module FILE --prefix net.model. -o OUT"
    ),
    'ValueError: Trying to set a tensor of shape torch.Size([10, 64]) in "weight" (which has shape torch.Size([7, 64]))': (
        "ckptool warm-start FILE --against MODEL --on-mismatch skip -o OUT"
    ),
    "_pickle.UnpicklingError: invalid load key, '\\x00'.": "ckptool doctor FILE",
    "_pickle.UnpicklingError: invalid load key, '\\xef'.": "ckptool doctor FILE",
    "_pickle.UnpicklingError: Memo value not found at index 12": "ckptool doctor FILE",
    "RuntimeError: unexpected EOF, expected 12 more bytes. The file might be corrupted.": "ckptool doctor FILE",
    "RuntimeError: storage has wrong byte size: expected 9437184 got 256": "ckptool verify FILE",
    "RuntimeError: PytorchStreamReader failed locating file data.pkl: file not found": "ckptool verify FILE",
    "RuntimeError: PytorchStreamReader failed locating file constants.pkl: file not found": "ckptool doctor FILE",
    "SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered": "ckptool recover FILE -o OUT",
    "KeyError: 'state_dict'": "ckptool inspect FILE",
    "TypeError: Expected state_dict to be dict-like, got <class 'models.Net'>.": "ckptool convert FILE -o OUT.safetensors",
    "AttributeError: 'collections.OrderedDict' object has no attribute 'eval'": "ckptool inspect FILE",
    "UnicodeDecodeError: 'ascii' codec can't decode byte 0xc1 in position 0": "ckptool convert FILE -o OUT",
    "OSError: Unable to load weights from pytorch checkpoint file for 'x.bin' at 'x'.": "ckptool doctor FILE",
}


@looped("text", OTHER_MESSAGES)
def test_a_message_leads_to_its_command(text: str) -> None:
    (finding,) = ckptool.doctor(error=f"Traceback (most recent call last):\n  File x\n{text}\n").findings
    assert finding.fixes[0] == OTHER_MESSAGES[text] and finding.says and finding.says in text


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_real_messages_of_this_torch(tmp_path: Path) -> None:
    """What torch, safetensors and torch's loaders really say here is in the table."""
    cut = saved(fc_weights(), tmp_path / "cut.pt")
    os.truncate(cut, 500)
    (tmp_path / "text.pt").write_text("version https://git-lfs")
    (tmp_path / "empty.pt").touch()
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
        found = recognised(f"{type(caught.value).__name__}: {caught.value}")
        assert found is not None and found.finding.code == code, str(caught.value)


def test_an_error_from_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"Traceback (most recent call last):\n  File ...\n{MESSAGES['cuda-location']}\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode() + b"\xff\x1b[31m")))
    assert main(["doctor", "--error", "-"]) == 1
    out = capsys.readouterr().out
    assert "ckptool remap FILE --to cpu -o OUT" in out and "\x1b" not in out


def test_an_unknown_error_says_so() -> None:
    (finding,) = ckptool.doctor(error="Segmentation fault").findings
    assert finding.code == "unknown-error" and "ckptool doctor FILE" in finding.advice


def test_an_error_about_devices_is_compared_with_the_tags_of_the_file(tmp_path: Path) -> None:
    saved({"w": torch.ones(3)}, tmp_path / "cpu.pt")
    ckptool.remap(tmp_path / "cpu.pt", tmp_path / "gpu.pt", to="cuda:1")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "gpu.pt").read_bytes()[:200])
    other = ckptool.doctor(tmp_path / "gpu.pt", error="don't know how to restore data location (tagged with mps)")
    assert "of another file" in other.findings[0].what and not other.findings[0].certain
    messages = {
        "cuda-location": "RuntimeError: Attempting to deserialize object on a CUDA device but …",
        "device-location": "RuntimeError: don't know how to restore data location of a storage (tagged with cuda:1)",
        "gpu-memory": "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    }
    for code, message in messages.items():
        (alone,) = ckptool.doctor(error=message).findings
        found = {name: ckptool.doctor(tmp_path / name, error=message).findings[0] for name in ("cpu.pt", "gpu.pt")}
        assert {each.code for each in found.values()} == {code}
        assert "gpu.pt was saved on cuda:1" in found["gpu.pt"].what and found["gpu.pt"].what.startswith(alone.what)
        assert found["gpu.pt"].certain == alone.certain and len(found["gpu.pt"].fixes) == len(alone.fixes)
        assert "cpu.pt was saved on the CPU alone" in found["cpu.pt"].what and not found["cpu.pt"].certain
        assert "remap" not in str(found["cpu.pt"].fixes)
        assert ckptool.doctor(tmp_path / "cut.pt", error=message).findings[0].what == alone.what


# The commands as they are printed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["two words.pt", "a\nb.pt", "it's.pt", "-dash.pt"])
def test_a_shell_runs_the_commands_whatever_the_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(wrapped(), tmp_path / name)
    cut = saved({**wrapped(), "large": torch.ones(5000)}, tmp_path / f"{name}.cut.pt")
    os.truncate(cut, os.path.getsize(cut) - 5000)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(b"inside"))
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
    assert sum(".fixed" in file for file in os.listdir(tmp_path)) == 2, (
        "strip-module and recover wrote beside their inputs"
    )


def test_no_command_is_there_twice(tmp_path: Path) -> None:
    old = ckptool.doctor(saved(fc_weights(), tmp_path / "old.pt", _use_new_zipfile_serialization=False))
    assert codes(old) == ["legacy-format", "no-checksums"]
    assert len(old.findings[0].fixes) == 1 and not old.findings[1].fixes and "same command" in old.findings[1].advice
    both = ckptool.doctor(saved(wrapped(), tmp_path / "a.pt"), against=saved(fc_weights(), tmp_path / "b.pt"))
    assert codes(both) == ["prefix-module"]


def test_what_is_seen_is_what_the_programs_say(tmp_path: Path) -> None:
    safetensors.torch.save_file(fc_weights(), tmp_path / "a.safetensors")
    os.truncate(tmp_path / "a.safetensors", os.path.getsize(tmp_path / "a.safetensors") - 4)
    (tmp_path / "empty.pt").touch()
    saids = {"a.safetensors": safetensors.torch.load_file, "empty.pt": torch.load}
    for name, load in saids.items():
        with pytest.raises(Exception) as caught:
            load(tmp_path / name)
        (finding,) = ckptool.doctor(tmp_path / name).findings
        said = f"{type(caught.value).__name__}: {caught.value}"
        assert any(part.partition(": ")[0] in said for part in finding.says.split("; or: ")), (finding.says, said)


# Folders of engines: one command writes the weights, and no copy of the rest first ------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    state = {
        "model": nn.Linear(3, 2).state_dict(),
        "path": Path("x"),
        "step": 1,
    }  # a Path is none of weights_only's values
    save_dcp(state, tmp_path / "step-1")
    return tmp_path / "step-1"


def test_of_a_folder_one_command_writes_a_file_that_the_model_loads(folder: Path) -> None:
    found = ckptool.doctor(folder)
    (command,) = [fix for each in found.findings for fix in each.fixes]
    assert f"{folder}#model" in command
    nn.Linear(3, 2).load_state_dict(torch.load(run_all(found), weights_only=True))
    line = next(line for line in str(found).splitlines() if "Or in Python: " in line)
    model = nn.Linear(3, 2)
    exec(line.partition("Or in Python: ")[2], {"model": model, "ckptool": ckptool})
    assert model.weight.equal(ckptool.load(folder)["model"]["weight"])


def test_of_several_models_of_a_folder_each_is_named(tmp_path: Path) -> None:
    save_dcp({"actor": nn.Linear(3, 2).state_dict(), "critic": nn.Linear(3, 1).state_dict()}, tmp_path / "x")
    said = str(ckptool.doctor(tmp_path / "x"))
    assert "2 sets of weights" in said and "x.fixed.pt#actor" in said


# Real files ----------------------------------------------------------------------------------------------------------


@looped("name", sorted(os.listdir(CORPUS)) if CORPUS.is_dir() else [])
def test_every_command_for_a_real_file_succeeds(name: str, tmp_path: Path) -> None:
    source = CORPUS / name
    copy = shutil.copytree if source.is_dir() else shutil.copyfile
    copy(source, tmp_path / name)
    found = ckptool.doctor(tmp_path / name)
    if out := run_all(found):
        again = ckptool.doctor(out)
        assert {finding.code for finding in again.findings if finding.blocks} <= {"prefix-module"}


NUMPY_FILES: dict[str, Any] = {
    "array.npy": lambda path: np.save(path, np.ones((2, 3), np.float32)),
    "dictionary.npy": lambda path: np.save(path, np.array({"a": 1}, dtype=object)),
    "texts.npy": lambda path: np.save(path, np.array(["a", "b"])),
    "lists.npy": lambda path: np.save(path, np.array([np.ones(2), np.ones(3)], dtype=object)),
    "beside.npz": lambda path: np.savez(
        path, w=np.ones(2), cfg=np.array({"a": 1}, dtype=object), names=np.array(["a"])
    ),
    "dates.npz": lambda path: np.savez(path, **{"a.w": np.ones(2), "when": np.array(["2020"], dtype="datetime64[s]")}),
}


@pytest.mark.parametrize("name", NUMPY_FILES)
def test_commands_for_arrays_that_have_no_plain_form_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    NUMPY_FILES[name](name)
    found = ckptool.doctor(name)
    assert not found.loads
    out = run_all(found)
    assert bool(out) == (name == "array.npy" or name.endswith(".npz"))
    if out:
        torch.load(out, weights_only=True)


def test_keys_that_would_become_one_are_no_problem_of_the_file(tmp_path: Path) -> None:
    found = ckptool.doctor(saved({**fc_weights(), Path("a"): torch.ones(1), "a": torch.ones(1)}, tmp_path / "two.pt"))
    assert "conflict" not in codes(found) and "weights-only" in codes(found)
    assert not any("ADDRESS" in fix for finding in found.findings for fix in finding.fixes)
    run_all(found)


def test_what_a_message_may_mean_is_likely_or_certain(run: Run) -> None:
    """Those that the code beside the file raises as well, in words of its own."""
    for message in (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: MPS backend out of memory (MPS allocated: 9.05 GB)",
        "AssertionError: Torch not compiled with CUDA enabled",
        "KeyError: 'model'",
        "ModuleNotFoundError: No module named 'mmcv'",
        "UnicodeDecodeError: 'utf-8' codec can't decode byte 0x80",
        "EOFError: Ran out of input",
        "AttributeError: 'dict' object has no attribute 'eval'",
    ):
        assert run("doctor", "--error", message).out.startswith("likely ["), message
        assert "cuda-location" not in run("doctor", "--error", message).out
    for message in (
        "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.",
        "RuntimeError: unexpected pos 64 vs 0",
    ):
        assert run("doctor", "--error", message).out.startswith("problem ["), message
