"""Messages name options as the command line has them; what Python shows names the arguments that they are there."""

import inspect
import pickle
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import ckptool
from ckptool import errors
from ckptool.analysis.findings import Chain
from ckptool.checkpoint.paths import parted
from ckptool.cli import main
from ckptool.cli.parser import typed_parameters
from ckptool.commands import (
    FILE,
    FOLDER,
    MODEL,
    NAME,
    OUT,
    OUT_PT,
    VERBS,
    Command,
    arg,
    command,
    flag,
    function_of,
    other_program,
    signature_of,
)
from ckptool.errors import CkptoolError, Text, TextLines, UsageError, counted, form, printable
from tests.lint import NO_PLURAL
from tests.support.cli import command_lines
from tests.support.errors import of_a_shell
from tests.support.looped import looped


@looped("verb", [name for name, verb in VERBS.items() if verb.in_python])
def test_every_option_of_a_function_is_spelled_as_it_is_declared(verb: str) -> None:
    function = function_of(verb)
    arguments = signature_of(function).parameters
    for option in typed_parameters(function):
        if option.name in arguments and option.option.flags and (verb, option.name) != ("average", "scale"):
            assert flag(option.name) in option.option.flags, option


SPELLINGS = {
    arg(overwrite=True): ("-f", "overwrite=True"),
    arg(folder="gan2"): ("-d gan2", "folder='gan2'"),
    arg(on_mismatch="skip"): ("--on-mismatch skip", "on_mismatch='skip'"),
    arg("only"): ("--only", "only"),
    arg("out"): ("-o", "out"),
    arg(drop="opt*", set={"epoch": 3}): ("--drop 'opt*' --set epoch=3", "drop='opt*', set={'epoch': 3}"),
    arg(drop=["a", "b c"]): ("--drop a --drop 'b c'", "drop=['a', 'b c']"),
    arg(to="cpu"): ("--to cpu", "to='cpu'"),
    arg(moves={"cuda:1": "cuda:0"}): ("--map cuda:1=cuda:0", "moves={'cuda:1': 'cuda:0'}"),
    arg(container="safetensors"): ("--to safetensors", "container='safetensors'"),
    arg(exclude=NAME): ("--exclude NAME", "exclude=NAME"),
    arg(ema=0.999, rank=32): ("--ema 0.999 --rank 32", "ema=0.999, rank=32"),
    arg(rename="a => b"): ("--rename 'a => b'", "rename='a => b'"),
    arg(drop=""): ("--drop ''", "drop=''"),
    arg(drop="a\nb"): ("--drop $'a\\x0ab'", r"drop='a\nb'"),
}  # fmt: skip


@looped("words", SPELLINGS)
def test_an_option_is_spelled_for_a_shell_and_for_python(words: Command) -> None:
    shell, python = SPELLINGS[words]
    assert (str(words), words.python) == (shell, python)
    error = UsageError(f"{words} is odd", f"Not {words}.", f"Say: {words}; or {words}.")
    assert (error.what, error.why, error.fix) == (f"{shell} is odd", f"Not {shell}.", f"Say: {shell}; or {shell}.")
    assert str(error) == f"{python} is odd\nNot {python}.\nSay: {python}; or {python}."
    again = pickle.loads(pickle.dumps(error.within("a.pt")))
    assert again.what == f"a.pt: {shell} is odd" and str(again) == f"a.pt: {error}" and again.fix.commands == ()


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
    command("warm-start", FILE, against=MODEL, min_loaded=0.5): "warm_start(FILE, against=MODEL, min_loaded=0.5)",
    command("scan", FOLDER, latest_only=True): "scan(FOLDER, latest_only=True)",
    command("average", "a.pt", "b.pt", out=OUT): "average(['a.pt', 'b.pt'], out=OUT)",
    command("lora merge", "a.pt", "b.pt", out=OUT): "lora_merge('a.pt', 'b.pt', out=OUT)",
    command("bundle", members={"g": "G.pt", "d": "D.pt#sd"}, values={"e": 3}): (
        "bundle(members={'g': 'G.pt', 'd': 'D.pt#sd'}, values={'e': 3})"
    ),
    command("bundle", file=FILE, drop=NAME, out=OUT): "bundle(file=FILE, drop=NAME, out=OUT)",
}


@pytest.mark.parametrize(("typed", "call"), AS_CALLS.items(), ids=str)
def test_a_command_is_a_call_in_python(typed: Command, call: str) -> None:
    text = Text(f"Do: {typed}; or not.")
    assert text == Text("Do: ", typed, "; or not.") == f"Do: {typed!s}; or not."
    assert text.python == f"Do: ckptool.{call}; or not." and text.commands == (typed,)
    assert fits(f"ckptool.{call}")


def test_what_no_function_does_stays_a_command() -> None:
    for line in (command("translate", list=True), command("demo", "x"), other_program("gzip -dc", "a.gz", into="a")):
        assert line.python == str(line)
    assert command("inspect", FILE, all=True).python == "ckptool.inspect(FILE)"  # whose report has all


def test_a_name_that_looks_like_a_command_in_a_text_stays_a_name() -> None:
    mark = errors._MARK
    for name in (f"\ue000{'0' * 16}(a\ue000{'0' * 16}-b\ue000{'0' * 16})", mark[:-1], "\ue000", mark.upper() + "(x"):
        error = UsageError(f"{name}: {arg(all=True)}", "", f"{arg(exclude=name)}")
        assert error.what == f"{printable(name)}: --all" and str(error).startswith(f"{printable(name)}: all=True\n")
        assert all(text.isprintable() for text in (error.what, error.fix, str(error).replace("\n", "")))
    for cut in range(1, len(f"{arg(all=True)}")):  # what is left of one, wherever it was cut
        assert (
            UsageError(f"{arg(all=True)}"[:cut]).what.isprintable()
            and printable(f"{arg(all=True)}"[cut:]).isprintable()
        )


def test_a_text_that_reaches_no_error_has_the_words_of_the_shell() -> None:
    assert printable(f"see {arg(all=True)}, {command('show', FILE / 'a b')}") == "see --all, ckptool show 'FILE#a b'"
    lines = TextLines(f"with {arg(all=True)}", "a\nb")
    assert lines == "with --all\na\\nb" and lines.python == "with all=True\na\\nb"
    assert UsageError("x", lines).why == lines and pickle.loads(pickle.dumps(UsageError("x", lines))).why == lines


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


INPUTS = [*"none.pt notes.txt empty.pt cut.pt odd.pt one.pt#zzz two.pt#sd . there.pt".split(), "", 7, None]
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
            Path("new.pt").unlink(missing_ok=True)
    assert [text for text in errors if of_a_shell(text)] == []
    calls = re.compile(r"ckptool\.\w+\((?:'[^']*'|[^'()])*\)")
    for call in calls.findall("\n".join(errors)):
        assert fits(call), call
    options = {word for text in errors for word in re.findall(r"(?<![\w.'(])([a-z]\w*)=", calls.sub("", text))}
    assert options <= inspect.signature(function).parameters.keys(), errors


@looped("name", PUBLIC)
def test_what_is_of_another_type_is_told_at_the_door(name: str) -> None:
    function = getattr(ckptool, name)
    parameters = inspect.signature(function).parameters
    for each in parameters.values():
        own = each.name == "out" and "make_folder" in parameters  # which the verbs look at themselves
        if not own and re.fullmatch(r"(?:str|int|float|None|(?:PathLike|Sequence)\[\w+\]| \| )+", str(each.annotation)):
            with pytest.raises(UsageError, match=f"was given object as {each.name}\nIt has to be a"):
                function(**{each.name: object()})


class Bytes:
    """A path that is no text."""

    def __init__(self, name: object) -> None:
        self.name = name

    def __fspath__(self) -> object:
        return self.name


@looped("name", PUBLIC)
def test_paths_and_names_are_text(name: str) -> None:
    function = getattr(ckptool, name)
    parameters = inspect.signature(function).parameters
    kinds = {each.name: str(each.annotation) for each in parameters.values() if not each.kind.name.startswith("VAR_")}
    needed: dict[str, Any] = {}
    for each in parameters.values():
        if each.default is each.empty and each.name in kinds:
            words = re.search(r"Literal\['(\w+)'", kinds[each.name])
            needed[each.name] = words[1] if words else 1 if kinds[each.name] == "int" else "a"
    for each, kind in kinds.items():
        for path in (Bytes(b"m.pt"), Bytes(3)):
            with pytest.raises(UsageError, match="was given"):
                function(**{**needed, each: path})
        if re.fullmatch(r"str( \| None)?", kind):
            with pytest.raises(UsageError, match=f"was given tuple as {each}"):
                function(**{**needed, each: ()})
        if re.search(r"\b(Mapping|dict)\[str\b", kind) and "Any" not in kind.replace("[str, Any]", ""):
            with pytest.raises(UsageError, match=f"given dict as {each}\nIts keys have to be strings"):
                function(**{**needed, each: {1: 2}})


def test_the_same_error_on_the_command_line_advises_options(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strip-module", "one.pt", "-o", "there.pt"]) == 2
    assert "Overwrite it: -f, or" in capsys.readouterr().err
    with pytest.raises(CkptoolError, match="overwrite=True"):
        ckptool.strip_module("one.pt", "there.pt")


# Commands that are printed -------------------------------------------------------------------------------------------


def test_options_are_words() -> None:
    line = command("edit", "-a.pt", drop=["a b", "c"], all=True, at="", partial=False, out=OUT)
    assert str(line) == "ckptool edit ./-a.pt --drop 'a b' --drop c --all -o OUT"


@pytest.mark.parametrize(
    "name", ["two words.pt", "it's.pt", "-dash.pt", "a\nb.pt", "$HOME.pt", "a#b.pt", "ünï.pt", "*.pt", "~x"]
)
def test_a_name_is_quoted_once(name: str) -> None:
    line = str(Chain(name).fill(command("convert", FILE / "state_dict/a b", out=OUT)))
    said = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True).stdout
    words = said.split("\0")[:-1]
    prefix = "./" if name.startswith("-") else ""
    stem, suffix = parted(name)
    mark = "." if suffix else "-"  # what stands behind a dot has to be a container's
    assert words == ["ckptool", "convert", f"{prefix}{name}#state_dict/a b", "-o", f"{prefix}{stem}{mark}fixed{suffix}"]


def test_the_output_of_one_command_is_the_input_of_the_next(tmp_path: Path) -> None:
    (tmp_path / "x.fixed2.pth.tar").touch()
    chain = Chain(str(tmp_path / "x.pth.tar"))
    steps = [command("strip-module", FILE, out=OUT), command("inspect", FILE), command("convert", FILE, out=OUT_PT)]
    lines = [str(chain.fill(step)).replace(f"{tmp_path}/", "") for step in steps]
    assert lines == [
        "ckptool strip-module x.pth.tar -o x.fixed.pth.tar",
        "ckptool inspect x.fixed.pth.tar",
        "ckptool convert x.fixed.pth.tar -o x.fixed.pt",
    ]
    assert str(chain.fill(steps[0])).endswith("x.fixed2.pt"), "what was written last has that suffix"


@pytest.mark.parametrize(
    ("path", "stem"),
    [("m.pt", "m"), ("a/x.pth.tar", "a/x"), ("m.safetensors.index.json", "m"), ("noend", "noend"), ("a.b/c", "a.b/c")],
)
def test_double_suffixes_stay_together(path: str, stem: str) -> None:
    assert parted(path) == (stem, path[len(stem) :])


def test_what_is_written_for_a_folder_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    convert = command("convert", FILE, out=OUT_PT)
    assert str(Chain(".").fill(convert)) == "ckptool convert . -o ../run.fixed.pt"
    assert str(Chain("../run/").fill(convert)) == "ckptool convert ../run/ -o ../run.fixed.pt"


def test_advice_knows_its_commands() -> None:
    advice = Text("Save it: ", command("recover", "a b.pt", out=OUT), "; or copy it again.")
    assert advice == "Save it: ckptool recover 'a b.pt' -o OUT; or copy it again."
    assert [*map(str, advice.commands)] == ["ckptool recover 'a b.pt' -o OUT"]
    unpack = other_program("gzip -dc", "a.gz", into="a b")
    assert str(unpack) == "gzip -dc a.gz > 'a b'"


# Counts of one are told as one ---------------------------------------------------------------------------------------


ONE = re.compile(r"(?<![\d.,:×x-])\b1 (?!of\b)(?:more )?([a-z]+s)\b(?! of a)|\b1 [a-z]+ (are|were|have)\b")


def test_counts_and_the_words_that_go_with_them() -> None:
    assert [counted(n, "name is", "names are") for n in (0, 1, 2)] == ["0 names are", "1 name is", "2 names are"]
    assert [counted(n, "storage") for n in (1, 1234)] == ["1 storage", "1,234 storages"]
    assert [form(n, "is", "are") for n in (0, 1, 2)] == ["are", "is", "are"]


LINES = command_lines("""
inspect one.pt --all --stats|inspect one.pt|verify one.pt|verify one.pt --digest|doctor one.pt|report one.pt|scan .
scan one.pt|diff one.pt other.pt|show one.pt|strip-module one.pt -o a.pt|rename one.pt 'module.a => b' -o b.pt
remap cuda.pt --to cpu -o c.pt|cast one.pt --dtype bf16 -o d.pt|edit one.pt --drop epoch -o e.pt
convert one.pt -o f.safetensors|convert one.pt --all -o g.safetensors|slim one.pt -o h.pt|recover cut.pt -o i.pt
bundle a=one.pt -o j.pt|unbundle j.pt -d k|warm-start one.pt --against other.pt|spec one.pt -o l.json
convert one.pt -o m --shard-size 5GB
""")


@pytest.fixture
def ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files with one of everything."""
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": {"module.a": torch.tensor([1.00001])}, "epoch": 3}, "one.pt")
    torch.save({"state_dict": {"a": torch.tensor([2.0])}, "epoch": 3}, "other.pt")
    with mock.patch("torch.serialization.location_tag", lambda storage: "cuda:0"):
        torch.save({"a": torch.ones(1)}, "cuda.pt")
    Path("cut.pt").write_bytes(Path("one.pt").read_bytes()[:-300])
    return tmp_path


def test_reports_of_one_of_everything_have_no_plural_of_one(ones: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in LINES:
        main(shlex.split(line))
        out, err = capsys.readouterr()
        for told in (out + err).splitlines():
            found = ONE.search(told)
            assert not found or found[1] in NO_PLURAL, f"{line}: {told}"
