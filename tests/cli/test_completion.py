"""Completion, with real shells as judges: what they pass on where TAB and Enter are pressed."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckptool
from ckptool.checkpoint.tree import address, children, find, segment_text, walk
from ckptool.cli.completion import VALUES, addresses, candidates
from ckptool.cli.parser import HELP_FLAGS, parse, typed_parameters
from ckptool.commands import VERBS, function_of
from ckptool.errors import CkptoolError
from tests.support.cli import Run, done
from tests.support.looped import examples, looped
from tests.support.processes import HANG, soon
from tests.support.programs import programs
from tests.support.programs import programs as quick_programs

# Real shells at a terminal: what is typed at their prompt, and what the programs that they start are given.

STARTED = {
    "bash": ["bash", "--noprofile", "--norc", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
QUIET = {
    "bash": "PS1='> '; bind 'set enable-bracketed-paste off'; bind 'set bell-style none'\r",
    "zsh": "PS1='> '; unsetopt BEEP PROMPT_SP; zstyle ':completion:*' menu no\r",
    "fish": "function fish_prompt; echo '> '; end; set -g fish_greeting; set -g fish_autosuggestion_enabled 0\r",
}
PROGRAM = """#!/bin/sh
if [ "$1" = --complete ]; then exec {ckptool} "$@"; fi
for word in "$@"; do printf '%s\\0' "$word"; done > given.part; mv given.part given
"""


class Shell:
    """An interactive shell in a folder, in which `ckptool` completes, and otherwise only notes what it was given."""

    def __init__(self, name: str, folder: Path) -> None:
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
        self.name, self.folder, self.shown = name, folder, ""
        programs, own = folder / ".programs", quick_programs() / "ckptool"
        programs.mkdir(exist_ok=True)
        (programs / "ckptool").write_text(PROGRAM.format(ckptool=own))
        (programs / "ckptool").chmod(stat.S_IRWXU)
        script = subprocess.run([own, "completion", name], check=True, capture_output=True)
        (programs / "script").write_bytes(script.stdout)
        self.process, self.terminal = pty.fork()
        if self.process == 0:  # pragma: no cover (the shell)
            os.chdir(folder)
            home = {"HOME": str(folder), "PATH": f"{programs}:{os.environ['PATH']}", "TERM": "dumb", "LANG": "C.UTF-8"}
            os.execvpe(STARTED[name][0], STARTED[name], {**home, "COLUMNS": "200", "PYTHONPATH": os.getcwd()})
        self.type(QUIET[name])
        self.type(f"source {shlex.quote(str(programs))}/script; echo rea''dy\r")
        self.read(until="ready")

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode(errors="surrogateescape"))

    def read(self, seconds: float = 20, until: str = "", quiet: float = 60) -> str:
        """What the terminal shows, until it shows a text, or nothing new for a while."""
        end, text = time.monotonic() + seconds, ""
        while time.monotonic() < end and not (until and until in text):
            if not select.select([self.terminal], [], [], quiet if not until else 0.2)[0]:
                if not until:
                    break
                continue
            try:
                text += os.read(self.terminal, 65536).decode(errors="replace")
            except OSError:
                break
        self.shown += text
        return text

    def given(self, typed: str) -> list[str]:
        """What the program is given where a text is typed, and Enter pressed."""
        given = self.folder / "given"
        given.unlink(missing_ok=True)
        self.type(typed + "\r")
        end, shown = time.monotonic() + 20, ""
        while not (given.exists() and "> " in shown) and time.monotonic() < end:  # zsh may lose what is typed ahead
            shown += self.read(0.05, quiet=0.05)
        assert given.exists(), self.shown[-2000:]
        return [os.fsdecode(word) for word in given.read_bytes().split(b"\0")[:-1]]

    def close(self) -> None:
        os.close(self.terminal)
        os.kill(self.process, 9)
        os.waitpid(self.process, 0)


NAMES = [
    "weight", "a b", "it's", 'say "x"', "$(touch x)", "`touch x`", "${HOME}", "a;touch x", "a&touch x", "a|touch x",
    "a>x", "<x", "line\nbreak", "tab\there", "esc\x1b[31m", "bell\x07", "del\x7f", "c1\x9b", "back\\slash", "sla/sh",
    "til~de", "~", "#", "a#b", "a:b", "a::b", "=ls", "a=b", "!!", "hi!there", "*", "?", "[a]", "{a,b}", "(x)", "^x",
    "%1", "-x", "--at", "é", "→", "\u202eevil", "\udcff", "'", '"', "\\", "\n", "$'x'", "@host", ",", "x\r",
    "; touch x #",
]  # fmt: skip

FILES = 1


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for each name, with a tensor of that name, and some with others."""
    folder = tmp_path_factory.mktemp("hostile")
    for number, name in enumerate(NAMES):
        torch.save({"d": {name: torch.ones(1)}}, folder / f"{number}.pt")
    layers = {f"layers.{number}.{name}.weight": torch.ones(1) for number in range(3) for name in ("fc", "norm")}
    torch.save({"epoch": 3, "model": layers, "lr": [0.1, 0.2]}, folder / "a model.pt")
    return folder


@pytest.fixture(params=STARTED)
def shell(request: pytest.FixtureRequest, hostile: Path) -> Iterator[Shell]:
    started = Shell(request.param, hostile)
    yield started
    started.close()


def test_only_names_that_are_themselves_to_a_shell_are_offered_and_nothing_runs(shell: Shell) -> None:
    before = set(os.listdir(shell.folder))
    for number, name in enumerate(map(segment_text, NAMES)):
        offered = name if re.fullmatch(r"[\w+@%,:=-]+", name) else ""
        assert shell.given(f"ckptool show {number}.pt#d/\t") == ["show", f"{number}.pt#d/{offered}"]
    for quote in ("'", '"'):
        assert shell.given(f"ckptool show {quote}0.pt#d/\t") == ["show", "0.pt#d/weight"]
    assert set(os.listdir(shell.folder)) - before <= {"given"}


# What is typed, and what the program is given then.
TYPED = {
    "ckptool insp\t\\~": ["inspect", "~"],
    "ckptool lora me\tx": ["lora", "merge", "x"],
    "ckptool convert --ti\tco\t": ["convert", "--ties", "copy"],
    "ckptool convert --ties=co\t": ["convert", "--ties=copy"],
    "ckptool diff --ignore device,req\t": ["diff", "--ignore", "device,requires_grad"],
    "ckptool remap x --to m\t": ["remap", "x", "--to", "mps"],
    "ckptool show a\\ mo\t": ["show", "a model.pt"],
    "ckptool show 'a model.pt'#e\t": ["show", "a model.pt#epoch"],
    "ckptool show a\\ model.pt#m\tl\t1\tf\t": ["show", "a model.pt#model/layers.1.fc.weight"],
    "ckptool show a\\ model.pt --at lr/\t": ["show", "a model.pt", "--at", "lr/"],
    "ckptool show a\\ model.pt --at=ep\t": ["show", "a model.pt", "--at=epoch"],
    "ckptool show ~/0.pt#\t\t": ["show", "{home}/0.pt#d/weight"],
    "ckptool bundle net=0.pt#\t\t": ["bundle", "net=0.pt#d/weight"],
    "ckptool scan 0.pt#\tx": ["scan", "0.pt#x"],
}


@pytest.mark.parametrize("name", STARTED)
def test_what_people_type(name: str, hostile: Path) -> None:
    shell, wrong = Shell(name, hostile), []
    for typed, expected in TYPED.items():
        given = shell.given(typed)
        if given != [word.format(home=hostile) for word in expected]:
            wrong.append((typed, given))
    shell.close()
    assert not wrong


@pytest.mark.parametrize("name", STARTED)
def test_the_script_is_well_formed(name: str, tmp_path: Path, run: Run) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    (tmp_path / "script").write_text(done(run("completion", name)))
    checked = subprocess.run([name, "-n", tmp_path / "script"], capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


# The answer to a shell ------------------------------------------------------------------------------------------------


def asked(line: str, folder: Path) -> tuple[int, list[str]]:
    """The exit code and the words that come as an answer; nothing is ever told."""
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [programs() / "ckptool", "--complete", "fish", line]
    ended = subprocess.run(command, capture_output=True, check=False, cwd=folder, env=environment, timeout=HANG)
    assert ended.stderr == b"", ended.stderr
    return ended.returncode, [os.fsdecode(each.split(b"\t")[0]) for each in ended.stdout.split(b"\0")[:-1]]


def test_what_cannot_be_opened_is_passed_over_in_silence(hostile: Path) -> None:
    whole = (hostile / "0.pt").read_bytes()
    (hostile / "cut.pt").write_bytes(whole[:-30])
    (hostile / "empty.pt").touch()
    (hostile / "bomb.pkl").write_bytes(b"\x80\x02]q\x00" + b"(h\x00h\x00e" * 300_000 + b".")
    (hostile / "runs.pkl").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    os.mkfifo(hostile / "pipe")
    for name in ("cut.pt", "empty.pt", "pipe", "none.pt", ".", "/dev/zero", "/proc/self/mem"):
        assert asked(f"ckptool show {name}#", hostile) == (FILES, []), name
    with soon(8):
        for name in ("bomb.pkl", "runs.pkl"):
            asked(f"ckptool show {name}#", hostile)
    assert not (hostile / "ran").exists()
    for line in ("ckptool", "ckptool nothing ", "ckptool show 'x", "ckptool show \\", "ckptool show 0.pt#d/x/y/"):
        assert asked(line, hostile)[1] == []
    assert asked("ckptool completion ", hostile) == (0, ["bash", "fish", "zsh"])
    assert (
        subprocess.run([sys.executable, "-m", "ckptool", "--complete"], capture_output=True, check=False).stderr == b""
    )


# Everything that is offered is taken ----------------------------------------------------------------------------------

SEGMENT = st.text("ab./~#0 ", max_size=5)
LEAVES = st.integers(0, 9)
TREES = st.dictionaries(
    SEGMENT | st.integers(0, 3) | st.sampled_from("0123"),
    st.recursive(LEAVES, lambda below: st.dictionaries(SEGMENT, below, max_size=4) | st.lists(below, max_size=3)),
    max_size=5,
)


@settings(max_examples=examples(100))
@given(TREES)
def test_following_what_is_offered_leads_to_everything(tree: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "f.pt")
        torch.save(tree, path)
        opened = ckptool.open(path).tree
        found, waiting = set(), [""]
        while waiting:
            typed = waiting.pop()
            for each in addresses(path, typed):
                assert each.text.startswith(typed) and (each.final or len(each.text) > len(typed))
                if each.final:
                    find(opened, each.text)
                    found.add(each.text)
                else:
                    waiting.append(each.text)
    ends = Counter(address(where) for where, node in walk(opened) if where and not [*children(node)])
    assert found == {text for text in ends if reachable(opened, text)}


def reachable(tree: Any, text: str) -> bool:
    """True for an address that names one thing, and has no empty segment, which a shell's user would not see."""
    parts = text.split("/")
    try:
        return all(parts) and all(find(tree, "/".join(parts[:depth])) for depth in range(1, len(parts) + 1))
    except CkptoolError:
        return False


@looped("verb", VERBS)
def test_every_option_and_value_offered_is_one_of_the_verb(verb: str) -> None:
    options = {flag: each for each in typed_parameters(function_of(verb)) for flag in each.option.flags}
    offered = {each.text for each in candidates([verb], "-") or ()}
    assert offered == {name for name, each in options.items() if not each.option.hidden} | set(HELP_FLAGS)
    for name, each in options.items():
        is_flag, metavar = each.kind is bool, each.option.metavar
        values = [] if is_flag else candidates([verb, name], "") or []
        assert all(value.final and value.text for value in values)
        assert is_flag or [f"{name}={value.text}" for value in values] == [
            value.text for value in candidates([verb], f"{name}=") or []
        ]
        assert not values or metavar in VALUES or f"'{values[-1].text}'" in refused(verb, name)


def refused(verb: str, option: str) -> str:
    """What is said about a value that an option does not take."""
    with pytest.raises(CkptoolError) as caught:
        parse(verb, typed_parameters(function_of(verb)), [option, "no such value"])
    return str(caught.value)


def test_a_file_may_stand_in_the_place_of_a_command(hostile: Path) -> None:
    assert asked("ckptool a", hostile)[1] == ["add-module", "average"] and asked("ckptool a\\ m", hostile) == (
        FILES,
        [],
    )
    for words in ("help show --", "./a\\ model.pt --st"):
        verb, typed = ("show", "--") if "help" in words else ("inspect", "--st")
        assert asked(f"ckptool {words}", hostile) == asked(f"ckptool {verb} {typed}", hostile) != (0, []), words
