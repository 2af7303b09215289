"""`explain`: what a code means, and a message from a pipe."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ckptool.cli import main
from ckptool.verbs._explain import all_codes
from tests.support.cli import Run, done
from tests.support.files import saved, weights
from tests.support.programs import TORCH, path_with, programs


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
