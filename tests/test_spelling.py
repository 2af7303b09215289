"""Messages name options as the command line has them; what Python shows names the arguments that they are there."""

from __future__ import annotations

import inspect
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.cli import main
from ckptool.commands import (
    FILE,
    FOLDER,
    MODEL,
    OUT,
    OUT_PT,
    VERBS,
    Advice,
    command,
    function_name,
    other_program,
)
from ckptool.errors import NAMES, VALUED, CkptoolError, in_python
from ckptool.verbs import _save
from tests.support.command_options import options_of
from tests.support.looped import looped

FLAG = re.compile(r"(?<![\w'-])--?[a-z][a-z-]*")
# Those that no function does.
OTHER_COMMANDS = re.compile(r"(?:pip|torchrun) [^;]*|ckptool (?:inspect \S+ --all|translate --list|average --help)")
# What only a shell needs: how much is printed, and how.
SHELL_ONLY = {
    "--json",
    "--format",
    "--skip-refused",
    "--depth",
    "--stat",
    "--init",
    "--schema",
    "--all",
    "--add",
}


def arguments_of(command: str) -> set[str]:
    function = getattr(ckptool, function_name(command))
    known = inspect.signature(function).parameters
    more = re.search(r"Unpack\[(\w+)\]", str(known["options"].annotation)) if "options" in known else None
    return {
        *known,
        *(getattr(_save, more[1]).__annotations__ if more else ()),
    }


@looped("command", [name for name, verb in VERBS.items() if verb.in_python])
def test_every_option_has_a_spelling_in_python_that_its_function_takes(command: str) -> None:
    for option in options_of(command):
        if not option.flag or option.flag in SHELL_ONLY or option.flag in ("--quiet", "--dir", "--exhaustive"):
            continue
        assert (option.flag in VALUED) != option.is_flag, option
        name = NAMES.get(option.flag, option.flag.lstrip("-").replace("-", "_"))
        if option.flag == "--to" and command != "remap":
            name = "container"
        # A function of its own; none.
        if (command, name) in (
            ("train", "dry_run"),
            ("translate", "list"),
            ("translate", "find"),
            ("verify", "container"),
        ):
            continue
        if option.flag == "--jobs" and command not in ("scan", "verify"):  # a function is for one file
            continue
        if (command, option.flag) == ("warm-start", "--optimizer"):
            name = "optimizer"
        assert name in arguments_of(command), (option, name)


def test_the_spellings() -> None:
    for typed, python in {
        "Overwrite it: -f, or choose another name.": "Overwrite it: overwrite=True, or choose another name.",
        "Name a file; or use -d for the folder": "Name a file",
        "For example: -d gan2": "For example: folder='gan2'",
        "Keep the target's: --on-mismatch skip": "Keep the target's: on_mismatch='skip'",
        "go without --optimizer": "go without optimizer=True",
        "--all keeps everything; --only and --exclude do not": "all=True keeps everything; only and exclude do not",
        "For example: --drop 'optimizer*', --set epoch:=3": "For example: drop=['optimizer*'], set={'epoch': 3}",
        "--to cpu, or --map cuda:1=cuda:0": "to='cpu', or moves={'cuda:1': 'cuda:0'}",
        "--to safetensors": "container='safetensors'",
        "See: ckptool inspect FILE --all; or --exclude NAME": "See: ckptool inspect FILE --all; or exclude=[NAME]",
        "Start another: --set run=OTHER": "Start another: set=['run=OTHER']",
        "For example: --ema 0.999": "For example: ema=0.999",
        "--rename 'a => b'": "rename=['a => b']",
        "a well-known half-way house of -1 to -3": "a well-known half-way house of -1 to -3",
        "ulimit -a": "ulimit -a",
    }.items():
        assert in_python(typed) == python


class Called:
    """Stands for `ckptool` where a call that an error advises is tried: it fits the function, which is not called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return inspect.signature(getattr(ckptool, name)).bind


def fits(call: str) -> bool:
    names = {word: word for word in re.findall(r"\b[A-Z]+\b", call)}
    return bool(eval(call, {"ckptool": Called(), **names}))


AS_CALLS = {
    command("convert", FILE, weights_only=True, out=OUT_PT): "convert(FILE, weights_only=True, out='OUT.pt')",
    command("edit", "a b.pt", drop=["x", "y"], out=OUT): "edit('a b.pt', drop=['x', 'y'], out=OUT)",
    command("rename", FILE, "OLD => NEW", out=OUT): "rename(FILE, 'OLD => NEW', out=OUT)",
    command("remap", "it's.pt", to="cpu", out=OUT): """remap("it's.pt", to='cpu', out=OUT)""",
    command("warm-start", FILE, against=MODEL, min_loaded="0.5"): "warm_start(FILE, against=MODEL, min_loaded=0.5)",
    command("scan", FOLDER, latest_good=True): "scan(FOLDER, latest_only=True)",
    command("average", "a.pt", "b.pt", out=OUT): "average(['a.pt', 'b.pt'], out=OUT)",
    command("lora merge", "a.pt", "b.pt", out=OUT): "lora_merge('a.pt', 'b.pt', out=OUT)",
    command("bundle", "g=G.pt", "d=D.pt#sd", "e:=3"): "bundle(members={'g': 'G.pt', 'd': 'D.pt#sd'}, values={'e': 3})",
    command("bundle", FILE, drop="NAME", out=OUT): "bundle(file=FILE, drop=[NAME], out=OUT)",
}


@pytest.mark.parametrize(("typed", "call"), AS_CALLS.items(), ids=str)
def test_a_command_is_a_call_in_python(typed: Any, call: str) -> None:
    assert in_python(Advice("Do: ", typed)) == in_python(f"Do: {typed}") == f"Do: ckptool.{call}"
    assert fits(f"ckptool.{call}")


@pytest.mark.parametrize(
    "text",
    [
        "See: ckptool inspect FILE --all",
        "See: ckptool translate --list",
        "For example: ckptool bundle NAME=FILE … -o OUT",
        "this is what ckptool reads of FILE",
        "they are equal: ckptool keeps them apart, stock torch.load ties them",
        str(other_program("gzip -dc", "a.gz", into="a")),
    ],
)
def test_what_no_function_does_stays_a_command(text: str) -> None:
    assert in_python(text) == text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    state = {"module.a": torch.ones(2), "b": torch.ones(3)}
    torch.save({"sd": state, "ema": state, "epoch": 1}, "two.pt")
    torch.save({"sd": {"module.a": torch.ones(2)}, "epoch": 1}, "one.pt")
    torch.save({"a": torch.ones(3), "b": torch.ones(1).expand(10_000)}, "flat.pt")
    torch.save({"w": torch.zeros(2, 2), "x": torch.nn.Linear}, "odd.pt")
    shutil.copy("one.pt", "there.pt")
    return tmp_path


CALLS: dict[str, Callable[[], Any]] = {
    "exists": lambda: ckptool.strip_module("one.pt", "there.pt"),
    "the input": lambda: ckptool.strip_module("one.pt", "one.pt"),
    "nowhere": lambda: ckptool.strip_module("one.pt"),
    "both": lambda: ckptool.strip_module("one.pt", "x.pt", in_place=True),
    "some keys": lambda: ckptool.strip_module("two.pt", "x.pt", at="sd"),
    "no prefix": lambda: ckptool.strip_module("one.pt", "x.pt", prefix="zzz."),
    "empty prefix": lambda: ckptool.strip_module("one.pt", "x.pt", prefix=""),
    "two roots": lambda: ckptool.convert("two.pt", "x.safetensors", at="epoch"),
    "no rule": lambda: ckptool.rename("one.pt", [], "x.pt"),
    "not a rule": lambda: ckptool.rename("one.pt", "a", "x.pt"),
    "no match": lambda: ckptool.rename("one.pt", "a => b", "x.pt"),
    "no device": lambda: ckptool.remap("one.pt", "x.pt"),
    "bad device": lambda: ckptool.remap("one.pt", "x.pt", to="gpu"),
    "nothing to edit": lambda: ckptool.edit("one.pt", "x.pt"),
    "nothing to drop": lambda: ckptool.edit("one.pt", "x.pt", drop="zzz"),
    "shards": lambda: ckptool.convert("one.pt", "x.pt", shard_size="5GB"),
    "all and only": lambda: ckptool.convert("one.pt", "x.safetensors", all=True, only="a"),
    "expanded": lambda: ckptool.convert("flat.pt", "x.safetensors"),
    "in place to another": lambda: ckptool.cast("one.pt", dtype="bf16", in_place=True, container="npz"),
    "one to average": lambda: ckptool.average(["one.pt"], "x.pt"),
    "decay": lambda: ckptool.average(["one.pt", "one.pt"], "x.pt", ema=3),
    "slim in place": lambda: ckptool.slim("one.pt", in_place=True),
    "unbundle": lambda: ckptool.unbundle("one.pt"),
    "recover": lambda: ckptool.recover("one.pt", "there.pt"),
    "digest": lambda: ckptool.verify("one.pt", write_digest="there.pt"),
    "spec": lambda: ckptool.spec("one.pt", "there.pt"),
    "report": lambda: ckptool.report("one.pt", out="there.pt"),
    "load_into": lambda: ckptool.load_into(torch.nn.Linear(2, 2), "flat.pt"),
    "remote": lambda: ckptool.convert("one.pt", "s3://a/b.safetensors"),
    "stdout": lambda: ckptool.convert("one.pt", "-"),
}


@looped("name", CALLS)
def test_an_error_in_python_advises_arguments(name: str, folder: Path) -> None:
    with pytest.raises(CkptoolError) as caught:
        CALLS[name]()
    text = str(caught.value)
    assert not FLAG.search(OTHER_COMMANDS.sub("", text)), text
    assert all(fits(call) for call in re.findall(r"ckptool\.\w+\((?:'[^']*'|[^'()])*\)", text)), text


INPUTS = ["none.pt", "notes.txt", "empty.pt", "cut.pt", "odd.pt", "one.pt#zzz", "two.pt#sd", ".", "there.pt", 7]
PUBLIC = [name for name in ckptool.__all__ if inspect.isfunction(getattr(ckptool, name))]


@looped("name", sorted({*PUBLIC} - {"train", "resume", "prove", "spec", "save_for_cpu"}))
def test_every_function_speaks_python_of_every_input(name: str, folder: Path) -> None:
    Path("notes.txt").write_text("nothing")
    Path("empty.pt").touch()
    Path("cut.pt").write_bytes(Path("two.pt").read_bytes()[:-400])
    function = getattr(ckptool, name)
    values: dict[str, Any] = {"rank": 2, "dtype": "bf16", "to": "peft", "rules": "a => b", "model": torch.nn.ReLU()}
    errors = []
    for given in INPUTS:
        for out in ("there.pt", "new.pt", None):
            arguments = {
                each.name: out if each.name == "out" else values.get(each.name, given)
                for each in inspect.signature(function).parameters.values()
                if each.name == "out" or (each.default is each.empty and not each.kind.name.startswith("VAR_"))
            }
            try:
                function(**arguments)
            except CkptoolError as error:
                errors.append(str(error))
            except TypeError:
                assert given == 7
            Path("new.pt").unlink(missing_ok=True)
    assert not [text for text in errors if FLAG.search(OTHER_COMMANDS.sub("", text))]
    for call in re.findall(r"ckptool\.\w+\((?:'[^']*'|[^'()])*\)", "\n".join(errors)):
        assert fits(call), call


def test_the_same_error_on_the_command_line_advises_options(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strip-module", "one.pt", "-o", "there.pt"]) == 2
    assert "Overwrite it: -f, or" in capsys.readouterr().err
    with pytest.raises(CkptoolError, match="overwrite=True"):
        ckptool.strip_module("one.pt", "there.pt")
