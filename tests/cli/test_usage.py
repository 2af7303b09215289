"""Option values that make no sense, and names that are nearly right: told with what is allowed."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cli import Ran
from tests.support.elsewhere import READS
from tests.support.looped import looped
from tests.support.programs import programs

Run = Callable[..., Ran]
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
        if "--tensor" in command and "://" in place:
            assert "is a URL, not a .npy file" in ran.err
        else:
            assert ("stands for standard" if command in WRITES else NO_FILES[place]) in ran.err, (command, ran)
    assert sorted(files.rglob("*")) == there


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
