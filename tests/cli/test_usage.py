"""The first minute, and what is typed wrong: told in three parts, with the right exit code; nothing on disk changed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptool
from ckptool import errors
from ckptool.cli import main, output
from tests.support.cli import Ran, Run, done
from tests.support.elsewhere import READS
from tests.support.looped import looped
from tests.support.programs import path_with, programs

FOREIGN = ("Possible options", "Value error", "No such")


def usage_error(ran: Ran) -> str:
    assert (ran.code, ran.out) == (2, "") and ran.err.startswith("error[usage]: "), ran
    assert not any(word in ran.err for word in FOREIGN), ran.err
    return ran.err


def test_a_file_in_the_place_of_a_command_is_inspected(files: Path, run: Run) -> None:
    for line in ("dp.pt", "dp.pt#epoch", ".", "dp.pt training.pt --json", "dp.pt --depth 1", "dp.pt -h"):
        assert run(*line.split()) == run("inspect", *line.split()), line
    for url in ("s3://bucket/model.pt", "hf://org/model/model.pt"):
        assert run(url) == run("inspect", url) and "no command" not in run(url).err
    Path("report").write_bytes(Path("dp.pt").read_bytes())  # a verb's name wins
    assert "needs FILE" in usage_error(run("report")) and run("./report").out.startswith("./report: torch-zip")
    assert "Did you mean 'training.pt'?\n  See: ckptool training.pt\n" in usage_error(run("trainin.pt"))
    assert "Did you mean 'training.pt'?\n  See: ckptool training.pt\n" in usage_error(run("training"))


# Rules that a shell took apart ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "typed",
    [
        "rename dp.pt module.* => x.* -o out.pt",
        "rename dp.pt fc1=>fc2 -o out.pt",
        "rename dp.pt module.*=> x.* -o out.pt",
        "warm-start dp.pt --against dp.pt --rename a.* => b.*",
        "warm-start dp.pt --against dp.pt --rename a=>b",
    ],
)
def test_a_rule_without_quotes_is_explained_after_a_real_shell(typed: str, files: Path) -> None:
    import subprocess

    script = f"{programs() / 'ckptool'} {typed}"
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and "quotes" in ran.stderr and ">" in ran.stderr, ran.stderr
    assert not Path("out.pt").exists()


# Places that are no files --------------------------------------------------------------------------------------------

NO_FILES = {
    "s3://bucket/model.pt": "pip install s3fs",
    "hf://org/model/model.pt": "pip install huggingface_hub",
    "s3:/bucket/model.pt": "s3://bucket/model.pt",
    "-": "Save it first",
}
WRITES = ("strip-module dp.pt -o {0}", "strip-module dp.pt -d {0}", "convert dp.pt -o {0} --to safetensors")
WRITES += ("convert dp.pt -o {0} --to sharded", "unbundle gan.pt -d {0}", "bundle a=dp.pt -o {0}", "spec dp.pt -o {0}")
WRITES += ("verify dp.pt --write-digest {0}",)


@pytest.mark.parametrize("place", NO_FILES)
def test_what_cannot_be_read_or_written_is_said(
    place: str, files: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shlex

    for package in ("s3fs", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, package, None)
    there = sorted(files.rglob("*"))
    for command in (*READS, *(WRITES if place == "-" else ())):
        ran = run(*shlex.split(command.format(place)))
        assert ran.code == 2 and "There is no folder" not in ran.err and "such file" not in ran.err, (command, ran)
        assert ("stands for standard" if command in WRITES else NO_FILES[place]) in ran.err, (command, ran)
    assert sorted(files.rglob("*")) == there


@pytest.mark.parametrize("dash", "‐‑–—−")
def test_a_dash_or_quotation_mark_of_a_word_processor_is_told(dash: str, files: Path, run: Run) -> None:
    """As a command comes out of a chat or a web page; what is to be typed runs."""
    for words, meant in (
        (["strip-module", "dp.pt", f"{dash}in-place"], "--in-place"),
        (["strip-module", "dp.pt", f"{dash}{dash}in-place"], "--in-place"),
        (["strip-module", "dp.pt", "-o", "o.pt", f"{dash}f"], "-f"),
        ([f"{dash}-help"], "--help"),
    ):
        ran = run(*words)
        assert ran.code == 2 and f"Type {meant}\n" in ran.err, ran
        assert run(*words[:-1], meant).code == 0
    ran = run("rename", "dp.pt", "‘module.*", "=>", "*’", "-o", "p.pt")
    assert ran.code == 2 and "‘module.* begins with a quotation mark" in ran.err
    (files / f"{dash}a.pt").write_bytes((files / "dp.pt").read_bytes())
    assert (
        run("inspect", f"{dash}a.pt").code == run("doctor", "--error", "“Missing key(s) in state_dict”").code - 1 == 0
    )


def test_a_comment_after_a_command_which_zsh_passes_on_is_none_of_its_words(files: Path, run: Run) -> None:
    assert run("inspect", "dp.pt", "#", "what", "is", "in", "it", "--nothing") == run("inspect", "dp.pt")


def test_a_name_that_may_be_of_a_hub_is_offered_as_one_but_for_a_file(files: Path, run: Run) -> None:
    for name, is_of_hub in (("org/model", True), ("org/model-1.5", True), ("runs/a.pt", False), ("a/b.ckpt", False)):
        ran = run("inspect", name)
        assert ran.code == 2 and (f"ckptool inspect hf://{name}" in ran.err) == is_of_hub, ran


@pytest.mark.parametrize("verb", ["convert", "strip-module", "cast --dtype bf16"])
def test_an_output_that_is_given_as_to_cp_is_named_in_the_error(verb: str, files: Path, run: Run) -> None:
    name, *options = verb.split()
    assert "A new file: -o 'a b.pt'" in run(name, "dp.pt", "a b.pt", *options).err
    assert "A new file: -o OUT" in run(name, "dp.pt", "dp.pt#/", *options).err
    assert "hf://org/model" in run(name, "org/model", "-o", "out.pt", *options).err


@pytest.fixture
def special(files: Path) -> Iterator[list[str]]:
    """Things that are opened like files, and are none: reading one would wait for ever, or never end."""
    os.mkfifo("pipe.pt")
    server = socket.socket(socket.AF_UNIX)
    server.bind("socket.pt")
    Path("folder.pt").mkdir()
    main, terminal = os.openpty()
    yield ["pipe.pt", "socket.pt", "folder.pt", "/dev/zero", "/dev/null", os.ttyname(terminal)]
    for fd in (main, terminal, server.detach()):
        os.close(fd)


def test_what_is_no_regular_file_is_refused_at_once_wherever_a_file_is_taken(special: list[str], run: Run) -> None:
    import shlex
    import time

    for place in special:
        for command in (*READS, "train {0}", "prove {0}", "warm-start dp.pt --against ./{0}.py:build"):
            if place == "folder.pt" and command.startswith(("scan", "bundle")):
                continue
            began = time.monotonic()
            ran = run(*shlex.split(command.format(place)))
            told = ran.err + ran.out if command == "doctor {0}" else ran.err  # there it is an answer
            assert ran.code in (1, 2) and "bug" not in told and told.startswith(("error[", "problem [")), (command, ran)
            assert time.monotonic() - began < 60, (command, place)  # /dev/zero would fill the memory first
    assert not Path("out.pt").exists()


ODD_RULES = [f"- a => b\n- c{character} => d\n" for character in "\0\x1b\x7f\x01\ufffe\ud800"]
ODD_RULES += ["[" * 600, "a: &a [*a]\n", "&a {*a : 1}\n", "- {a: b}\n- [c]\n", "!!python/object:os.system x\n"]


@looped("text", ODD_RULES)
def test_odd_yaml_is_no_rules(text: str, files: Path, run: Run) -> None:
    Path("rules.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    told = usage_error(run("rename", "dp.pt", "--rules", "rules.yaml", "-o", "out.pt"))
    assert "rules.yaml" in told and ("line 2" in told or "not a text file" in told or "- c" not in text)


def state_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


BAD = {
    "empty file": ("inspect empty.pt", 2, "truncated"),
    "cut-off zip": ("inspect cut.pt", 2, "truncated"),
    "unknown root": ("strip-module training.pt --at nothing -o x.pt", 2, "usage"),
    "address of a value": ("strip-module training.pt --at epoch -o x.pt", 2, "usage"),
    "address in a tensor": ("show dp.pt#module.fc1.weight/x", 2, "usage"),
    "bad slice": ("show dp.pt#module.fc1.weight --slice 99", 2, "usage"),
    "output is a folder": ("strip-module dp.pt -o folder", 2, "io"),
    "OUT exists": ("strip-module dp.pt -o compiled.pt", 2, "output-exists"),
    "OUT exists, dry": ("strip-module dp.pt -o compiled.pt -n", 2, "output-exists"),
    "IN as OUT by a link": ("strip-module dp.pt -o link.pt", 2, "conflict"),
    "in place through a link": ("strip-module link.pt --in-place", 2, "conflict"),
    "no output": ("strip-module dp.pt", 2, "usage"),
    "same names": ("strip-module dp.pt other/dp.pt -d out", 2, "conflict"),
    "the same twice": ("strip-module dp.pt ./dp.pt --in-place", 2, "conflict"),
    "folder is a file": ("strip-module dp.pt -d compiled.pt", 2, "io"),
    "exists in the folder": ("strip-module compiled.pt dp.pt -d other", 2, "output-exists"),
    "no such prefix": ("strip-module dp.pt --prefix nothing. -o x.pt", 1, "no-match"),
    "rule that matches nothing": ("rename dp.pt 'a => b' -o x.pt", 1, "no-match"),
    "rule that is none": ("rename dp.pt 'a =>' -o x.pt", 2, "usage"),
    "no rule": ("rename dp.pt -o x.pt", 2, "usage"),
    "no file": ("rename 'a => b' -o x.pt", 2, "usage"),
    "colliding rule": ("rename dp.pt '*weight => w' -o x.pt", 2, "conflict"),
    "missing rules": ("rename dp.pt --rules missing.yaml -o x.pt", 2, "io"),
    "bad device": ("remap cuda.pt --to gpu -o x.pt", 2, "usage"),
    "device that cannot be": ("remap cuda.pt --to cpu:7 -o x.pt", 2, "usage"),
    "nothing there": ("remap cuda.pt --map cuda:3=cpu -o x.pt", 1, "no-match"),
    "half a map": ("remap cuda.pt --map cuda:3 -o x.pt", 2, "usage"),
    "no device": ("remap cuda.pt -o x.pt", 2, "usage"),
    "bad dtype": ("cast dp.pt --dtype i8 -o x.pt", 2, "usage"),
    "pattern that matches nothing": ("cast dp.pt --dtype bf16 --only nothing -o x.pt", 1, "no-match"),
    "nothing to drop": ("edit dp.pt --drop nothing -o x.pt", 1, "no-match"),
    "not JSON": ("edit training.pt --set epoch:=x -o x.pt", 2, "usage"),
    "several roots": ("convert gan.pt -o x.safetensors", 2, "usage"),
    "a container to convert to": ("convert dp.pt -d out", 2, "usage"),
    "bad container": ("convert dp.pt -o x --to onnx", 2, "usage"),
    "ignore nonsense": ("diff dp.pt dp.pt --ignore nonsense", 2, "usage"),
    "no argument": ("inspect", 2, "usage"),
    "not a number": ("inspect dp.pt --depth many", 2, "usage"),
    "no such order": ("convert dp.pt --ties colour", 2, "usage"),
}


@pytest.fixture
def folder(files: Path) -> Path:
    (files / "empty.pt").touch()
    (files / "text.pt").write_text("just some words\n")
    (files / "cut.pt").write_bytes((files / "training.pt").read_bytes()[:9_000])
    (files / "folder").mkdir()
    (files / "other").mkdir()
    (files / "other" / "dp.pt").write_bytes((files / "dp.pt").read_bytes())
    os.symlink("dp.pt", files / "link.pt")
    return files


@looped("name", BAD)
def test_every_error_has_three_parts_and_changes_nothing(name: str, folder: Path, run: Run) -> None:
    command, code, kind = BAD[name]
    before = state_of(folder)
    ran = run(*shlex.split(command))
    assert (ran.code, ran.out) == (code, "")
    first, *rest = ran.err.rstrip("\n").split("\n")
    assert first.startswith(f"error[{kind}]: ") and len(first) > len(kind) + 12
    assert rest and all(line.startswith("  ") and line.strip() for line in rest), "what it means, or what to type"
    assert "Traceback" not in ran.err and "\x1b" not in ran.err
    if name not in ("no file", "no argument"):
        assert not re.search(r"ckptool [a-z-]+ FILE\b", ran.err), "the name is known"
    assert state_of(folder) == before


def test_what_a_fix_refuses_says_what_mends_it(folder: Path) -> None:
    with pytest.raises(errors.Unsupported) as caught:
        ckptool.doctor("cut.pt", fix=True, out="x.pt")
    assert caught.value.fix == "ckptool recover cut.pt -o cut.fixed.pt"


def test_of_several_files_with_one_that_is_refused_none_is_written(files: Path, run: Run) -> None:
    (files / "text.pt").write_text("just some words\n")
    words = ("strip-module", "dp.pt", "text.pt", "compiled.pt", "-d", "out")
    ran = run(*words)
    assert ran.code == 2 and ran.out == "" and not (files / "out").exists()
    assert "None of the files were written; to write the others: --skip-refused.\n" in ran.err and "text.pt" in ran.err
    found = json.loads(run(*words, "--json").out)
    assert found["code"] == "not-a-checkpoint" and "done" not in found
    ran = run(*words, "--skip-refused")
    assert ran.code == 1 and "strip-module: 9 of 9 keys renamed → out/dp.pt" in ran.out


def test_a_fault_of_ours_is_told_in_words(files: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> None:
        raise KeyError("\x1b[31m")

    monkeypatch.setattr("ckptool.verbs.inspect.listing", broken)
    ran = run("inspect", "dp.pt")
    assert ran.code == 2 and ran.err.startswith("error[bug]: KeyError: ") and "bug in ckptool" in ran.err
    assert "\x1b" not in ran.err and "Traceback" not in ran.err
    monkeypatch.setenv("CKPTOOL_DEBUG", "1")
    with pytest.raises(KeyError):
        run("inspect", "dp.pt")


@pytest.mark.parametrize("error", [MemoryError(), RecursionError(), OSError(28, "No space left on device")])
def test_limits_of_the_machine_are_told_in_words(error: Exception) -> None:
    told = output.in_words(error)
    assert told.exit_code == 2 and told.code in ("limit-exceeded", "io") and told.why


def test_every_error_of_a_verb_keeps_its_code(files: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are errors of Python's, too, which the parser takes for a user who wants to stop."""
    classes = [errors.CkptoolError]
    for each in classes:
        classes += [kind for kind in each.__subclasses__() if kind.__module__ == "ckptool.errors"]
    assert any(issubclass(each, EOFError) for each in classes)
    places = {"inspect dp.pt": "inspect.open_file", "cast dp.pt --dtype bf16 -o x.pt": "cast.begin_change"}
    places |= {"translate --find dp.pt dp.pt": "translate.open_whole", "translate --list": "translate.shipped"}
    for each in classes:
        error = each("it failed")
        for line, place in places.items():

            def fails(*_: object, error: errors.CkptoolError = error, **__: object) -> None:
                raise error

            with monkeypatch.context() as patched:
                patched.setattr(f"ckptool.verbs.{place}", fails)
                ran = run(*line.split())
            assert ran.code == each.exit_code and ran.err.startswith(f"error[{each.code}]: it failed"), (line, each)


# Demo ----------------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(100, 32)
        self.h = nn.ModuleList(Layer(32) for _ in range(6))


def printed(text: str) -> list[str]:
    return [line.strip() for line in text.split("\n") if line.startswith("  ckptool ")]


@pytest.mark.parametrize("folder", ["ckptool-demo", "a folder/with 'quotes'", "-x"])
def test_every_command_that_a_demo_prints_runs_as_it_stands(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a folder").mkdir()
    environment = os.environ | {"PATH": path_with()}

    def sh(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True)

    made = sh(f"ckptool demo -- {shlex.quote(folder)}")
    lines = printed(made.stdout)
    assert made.returncode == 0 and made.stderr == "" and len(lines) >= 3
    for line in lines:
        ran = sh(line)
        assert ran.returncode == (1 if line.split()[1] in ("doctor", "diff") else 0), (line, ran)
        assert ran.stderr == ""
        if line.split()[1] == "diff":
            assert "h.{3..5}" in ran.stdout and re.search("[▁▂▃▄▅▆▇█]{3}", ran.stdout)
    assert sh(f"ckptool demo -f -- {shlex.quote(folder)}").returncode == 0  # over what these commands wrote


def test_torch_reads_the_files_of_a_demo(tmp_path: Path) -> None:
    folder = str(tmp_path / "demo")
    assert main(["demo", folder]) == 0
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load(f"{folder}/model.pt", map_location="cpu", weights_only=True)
    devices = []
    tree = torch.load(
        f"{folder}/model.pt", map_location=lambda data, device: devices.append(device) or data, weights_only=False
    )
    assert set(devices) == {"cuda:0", "cpu"}
    net = Net()
    nn.DataParallel(net).load_state_dict(tree["state_dict"])
    net.load_state_dict(tree["ema_state_dict"])
    optimizer = torch.optim.Adam(net.parameters())
    optimizer.load_state_dict(tree["optimizer"])
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert float(tree["best_loss"]) == 2.7183 and type(tree["best_loss"]).__module__ == "numpy"
    net.load_state_dict(torch.load(f"{folder}/finetuned.pt", weights_only=True))


def test_a_demo_replaces_nothing_unless_it_is_told_to(tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "demo"
    done(run("demo", str(folder)))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    ran = run("demo", str(folder))
    assert ran.code == 2 and "error[output-exists]" in ran.err
    done(run("demo", str(folder), "-f"))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before  # the same bytes, too
    (folder / "mine.txt").write_text("x")
    assert run("demo", str(folder), "-f").code == 2 and (folder / "mine.txt").read_text() == "x"
    (tmp_path / "file").write_text("x")
    assert run("demo", str(tmp_path / "file")).code == 2 and run("demo", str(tmp_path / "no" / "where")).code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "file"]
