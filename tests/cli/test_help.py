"""The help: what it shows, and that its examples run."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckptool
from ckptool.cli import main
from ckptool.commands import VERBS as COMMANDS
from ckptool.commands import function_of, parameters_of
from ckptool.verbs._explain import all_codes
from fixtures.readme import make_readme_files
from tests.support.cli import Ran, Run, done
from tests.support.files import saved, weights
from tests.support.looped import looped
from tests.support.programs import TORCH, path_with, programs

EXAMPLES = {name: function_of(name).verb.examples for name in COMMANDS}
# tests/training runs them; here only their options are looked at; browse needs a terminal
TRAINING = ("train", "resume", "eval", "prove", "prune", "plot")
MODEL = """
from safetensors.torch import save_file
from torch import nn

def build():
    return nn.ModuleDict({"conv1": nn.Conv2d(3, 64, 3), "fc": nn.Linear(128, 10)})
"""


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_readme_files(tmp_path)
    tree = torch.load(tmp_path / "model.pt", map_location="cpu", weights_only=True)
    torch.save({key.removeprefix("module."): value for key, value in tree["state_dict"].items()}, tmp_path / "other.pt")
    for name in ("a.pt", "b.pt", "c.pt"):
        torch.save(nn.Linear(3, 2).state_dict(), tmp_path / name)
    torch.save({"G": nn.Linear(3, 2).state_dict(), "D": nn.Linear(2, 1).state_dict(), "epoch": 3}, tmp_path / "gan.pt")
    torch.save(
        {"a.weight_g": torch.ones(2, 1), "a.weight_v": torch.ones(2, 3), "a.bias": torch.ones(2)},
        tmp_path / "normed.pt",
    )
    for name, rows in (("old.pt", 4), ("new.pt", 6)):
        torch.save({"wte.weight": torch.ones(rows, 3), "fc.weight": torch.ones(2, 3)}, tmp_path / name)
    (tmp_path / "fp8").mkdir()
    codes = {"fc.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "fc.weight_scale_inv": torch.ones(1, 1)}
    save_file(codes, tmp_path / "fp8" / "model.safetensors")
    facts = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "fp8" / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": facts}))
    (tmp_path / "cut.pt").write_bytes((tmp_path / "model.pt").read_bytes()[:-5000])
    (tmp_path / "net.py").write_text(MODEL)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"RuntimeError: size mismatch for fc.weight")))
    return tmp_path


def test_every_command_has_examples_that_fit_a_terminal() -> None:
    for name, lines in EXAMPLES.items():
        assert lines and all(f"ckptool {name} " in line for line, _ in lines)
        assert max(len(part) for line in lines for part in line) <= 78
        comments = [purpose for _, purpose in lines if name != "completion"]  # which zsh takes for a command
        assert not re.search(r"[^\w\s.,:%#/-]", " ".join(comments)), comments


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in (*TRAINING, "browse")])
def test_the_examples_run(command: str, examples: Path) -> None:
    for line, _ in EXAMPLES[command]:
        if "gan.pt -o" in line or line.endswith("-o gan.pt"):
            os.unlink("gan.pt")
        words = shlex.split(line.rpartition("| ")[2].replace("resize adapter --rank 8", "resize adapter --rank 1"))
        asks = {"diff", "doctor", "scan", "verify", "recover"} | ({"warm-start"} if "-o" not in words else set())
        asks |= {"translate"} if "--find" in words else set()  # a.pt and b.pt are of two models
        assert main(words[1:]) in ((0, 1) if command in asks else (0,)), line
        if "-o" in words and "-n" not in words:
            assert os.path.exists(words[words.index("-o") + 1]), line


@looped("command", COMMANDS)
def test_the_help_shows_the_examples_and_asks_flags_for_nothing(command: str, run: Run) -> None:
    text = done(run(command, "--help"))
    assert all(line in text for line, _ in EXAMPLES[command])
    assert "<bool>" not in text
    for line, _ in EXAMPLES[command]:
        named = [word for word in shlex.split(line.rpartition("| ")[2]) if re.fullmatch(r"-[a-z]|--[a-z-]+", word)]
        assert all(re.search(rf"(?<![\w-]){word}(?![\w-])", text) for word in named), (named, text)


def test_what_is_usual_fits_a_screen_and_the_rest_follows_it(run: Run) -> None:
    """Help is written for 80 columns where there is no terminal."""
    for command in COMMANDS:
        text = done(run("help", *command.split()))
        usual, more, rare = text.partition("\n\nMore options\n")
        assert usual.partition("\n\nExample")[0].count("\n") < 50, command
        rows = re.findall(r"^  -", rare.partition("\n\n")[0], re.MULTILINE)
        assert bool(more) == (len(rows) > 1) and len(re.findall(r"^  (?:-h, )?--help", usual, re.MULTILINE)) == 1
        assert text == done(run(*command.split(), "--help"))


def test_help_and_version_are_words_too(run: Run) -> None:
    for words, same in (
        (["help"], ["--help"]), (["-h"], ["--help"]), (["cast", "-h"], ["cast", "--help"]),
        (["help", "lora"], ["lora", "--help"]), (["version"], ["--version"]),
    ):  # fmt: skip
        assert done(run(*words)) == done(run(*same))
    assert done(run("--version")) == f"ckptool {ckptool.__version__}\n"
    assert "Did you mean 'convert'?" in told(run("help", "conver")) and "ckptool --help" in told(run())


@pytest.mark.parametrize("command", ["convert", "warm-start", "lora merge"])
def test_the_lines_of_a_text_stand_below_each_other(command: str, run: Run) -> None:
    for title, *lines in (block.splitlines() for block in run(*command.split(), "--help").out.split("\n\n")):
        if title in ("Arguments", "Options", "More options"):
            matches = (re.match(r" {5,}|  \S.*?  +(?=\S)", line) for line in lines)  # of names that are short
            assert len({found.end() for found in matches if found}) == 1, lines


# What people mistype -------------------------------------------------------------------------------------------------


def told(ran: Ran) -> str:
    assert ran.code == 2 and ran.out == "", ran
    return ran.err


MISTYPED = {
    "inspect mdel.pt": "did you mean model.pt?",
    "show model.pt#state_dict.module.fc.weight": "Did you mean state_dict/module.fc.weight?",
    "strip-module model.pt -o new/": "or keep everything: -o OUT.pt, or -d DIR",
    "rename model.pt 'module.* -> *' -n -o x.pt": "neither a file nor a rule",
    "rename model.pt module.fc.weight=fc.weight -n -o x.pt": "neither a file nor a rule",
    "rename model.pt module.* -n -o x.pt": "'a.* => b.*'",
    "rename model.pt '* => x' -n -o x.pt": "and 13 more would all be 'x'",
    "inspect -gan.pt": "For the file: ./-gan.pt",
    "inspct a.pt": "Did you mean 'inspect'?",
    "stripmodule a.pt": "See: ckptool strip-module --help",
    "inf a.pt": "Did you mean 'info'?",
    "verify model.pt --shard-size 1": "It is an option of translate, convert.",
}


def test_what_was_meant_is_told_in_one_line(examples: Path, run: Run) -> None:
    os.rename("gan.pt", "-gan.pt")
    for line, words in MISTYPED.items():
        text = told(run(*shlex.split(line)))
        assert words in text and len(text.split("\n")[0]) < 200 and text.count("No such file") <= 1, (line, text)
    assert "did you mean" not in told(run("inspect", "nothing-like-it.bin"))


@pytest.mark.parametrize("verb", COMMANDS)
def test_an_option_by_its_name_in_python_is_led_to_its_own(verb: str, run: Run) -> None:
    params = parameters_of(function_of(verb))
    flags = {flag for param in params for flag in param.option.flags}
    for param in params:
        typed = f"--{param.name.replace('_', '-')}"
        if param.option.flags and typed not in flags:
            shown = told(run(*verb.split(), typed))
            assert f"Did you mean {param.option.flags[-1]}?" in shown or "It is an option of" in shown, (typed, shown)


@pytest.mark.parametrize("suffix", [".safetensor", ".safetensors2", ".onnx", ".gguf", ".npy"])
def test_a_suffix_that_stands_for_nothing(suffix: str, examples: Path, run: Run) -> None:
    for command in ("convert", "strip-module"):
        text = told(run(command, "model.pt", "-o", f"out{suffix}"))
        assert "To write a torch file of that name: --to torch-zip" in text and not os.path.exists(f"out{suffix}")
        assert ("Did you mean .safetensors?" in text) == suffix.startswith(".safe")
    assert run("convert", "model.pt", "-o", f"out{suffix}", "--to", "torch-zip").code == 0
    assert "epoch" in torch.load(f"out{suffix}", map_location="cpu", weights_only=True)


def test_a_suffix_of_ones_own(examples: Path, run: Run) -> None:
    os.rename("model.pt", "model.zip")
    for out in ("a.state", "a", "b.zip", "step.100"):
        assert run("strip-module", "model.zip", "-o", out).code == 0


# Explaining -----------------------------------------------------------------------------------------------------------
# `explain`: what a code means, and a message from a pipe.


def piped(line: str, folder: Path) -> tuple[int, str]:
    """The exit code of a line of bash, and what it printed."""
    found = os.environ | {"PATH": f"{programs(*TORCH)}:{path_with()}"}
    ended = subprocess.run(["bash", "-c", line], cwd=folder, env=found, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def test_every_code_is_explained(run: Run) -> None:
    listed = done(run("explain"))
    for name, code in all_codes().items():
        text = done(run("explain", name))
        assert text.startswith(f"{name} ({code.kind})\n") and name in listed
        assert json.loads(done(run("explain", name, "--json")))["codes"][0]["facts"] == code.facts
        assert code.facts["what it means"].endswith((".", "." + "`"))


@pytest.mark.parametrize("typed", ["error[io]", "problem [io]", "IO", "io:"])
def test_a_code_may_be_pasted_as_it_was_printed(typed: str, run: Run) -> None:
    assert done(run("explain", typed)).startswith("io (Errors)")


def test_our_own_output_is_explained_through_a_pipe(tmp_path: Path) -> None:
    saved({f"module.{key}": value for key, value in weights("a", "b").items()}, tmp_path / "a.pt")
    for line, codes in (
        ("ckptool inspect nothing.pt", ["io"]),
        ("ckptool inspect a.pt", ["prefix-module"]),
        ("ckptool doctor a.pt", ["prefix-module"]),
        ("FORCE_COLOR=1 ckptool inspect a.pt", ["prefix-module"]),
        ("ckptool strip-module a.pt nothing.pt -o x.pt", ["usage"]),
    ):
        code, text = piped(f"{line} 2>&1 | ckptool explain - --json", tmp_path)
        assert code == 0 and [each["code"] for each in json.loads(text)["codes"]] == codes, (line, text)


def test_a_message_of_torch_gets_what_doctor_says(tmp_path: Path) -> None:
    script = "import torch; torch.nn.Linear(2, 3).load_state_dict({'module.weight': torch.ones(3, 2)})"
    line = f"python -c {shlex.quote(script)} 2>&1 | ckptool"
    code, text = piped(f"{line} explain -", tmp_path)
    assert code == 0 and "ckptool strip-module FILE -o OUT" in text
    assert text == piped(f"{line} doctor --error -", tmp_path)[1]
    coloured = "import torch; torch.save(torch.nn.ReLU(), 'm.pt'); torch.load('m.pt')"  # torch's own, in a pipe too
    shown = piped(f"python -c {shlex.quote(coloured)} 2>&1 | ckptool explain -", tmp_path)[1]
    assert "seen as: _pickle.UnpicklingError: Weights only" in shown and "x1b" not in shown


@pytest.mark.parametrize("text", ["usage: train.py [-h]", "io: nothing", "Segmentation fault", "error[nothing]: x"])
def test_what_nobody_knows_is_not_guessed(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode() + b"\xff\x1b[31m")))
    assert main(["explain", "-"]) == 1
    told = capsys.readouterr()
    assert "does not know this message" in told.err and "ckptool doctor FILE" in told.err and "\x1b" not in told.err


def test_a_message_beside_its_file_is_judged_by_its_devices(files: Path, run: Run) -> None:
    message = "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False."
    for file, told in {"cuda.pt": "cuda.pt was saved on cuda:", "dp.pt": "the message is about another file"}.items():
        assert told in run("doctor", file, "--error", message).out, file
