"""Every option of every command, as its worst user gives it: never a traceback, a hang, another exit code, or a file
half written.

The commands and their options are the program's own, so that a new one is tried, too. A seeded part is tried in the
normal run.
"""

from __future__ import annotations

import io
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ckptool.cli import main
from ckptool.commands import VERBS as COMMANDS
from tests.support.small_files import HARNESS, PLAIN, Option, kinds_and_bytes, options_of, plain_words

LONG = ("--steps", "--kills")  # of `prove`: they take their time when all is well
SECONDS, SECONDS_OF_RUNS = 10, 40

# For an option that takes a value: words that are no sense, other sense, too much sense.
VALUES = (
    *("", " ", "-", "--", "~", "#", "=", "=>", "*", "[", ":", ",", ",,", "a\nb.pt", "\x1b[31mred.pt", "a\0b"),
    *"m.pt out.pt there . .. missing.pt missing/out.pt m.pt/x there/ text.txt m.pt# m.pt#sd sd/a.weight".split(),
    *("-x.pt", 'it\'s "so".pt', "模型é.pt", "\udcff.pt", "\u202eflip.pt", "x" * 300, "9" * 5000, "a:=" + "[" * 3000),
    *"0 -1 3 1.5 nan inf -inf 1e999 true 0x10 1_000 5GB 0B -5GB 1e3 0.5,0.5 0:1,: ... ::0 device,dtype".split(),
    *"a=b a:=1 a:={ epoch:=NaN sd/a.weight=v.npy re:( re:.* {n} sd/* cpu cuda:0=cpu meta bf16 i8".split(),
    *("5 XB", "a => b", "* => x", "safetensors", "file.py:build", "link.pt", "loop.pt", "broken.pt", "pipe", "s3://a/b"),
    *"/dev/null /proc/self/mem /dev/full v.npy rules.yaml run.yaml run device=tpu".split(),
    *"train.steps=3 train.steps= nonsense=1 optim=3 save.every=-1".split(),
)  # fmt: skip


class Stuck(BaseException):
    """A command that takes too long."""


def _stuck(number: int, frame: object) -> NoReturn:
    raise Stuck


@pytest.fixture
def folder(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place of its own for every try; what `..` would write stays below the test's."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"RuntimeError: size mismatch for fc.weight")))
    for name in ("CKPTOOL_DEBUG", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    here = os.getcwd()
    yield tmp_path
    os.chdir(here)


def fresh(small: Path, folder: Path) -> Path:
    """A copy of the files below `folder`, in which the command is run."""
    place = folder / "a" / "b"
    os.chdir(folder)
    shutil.rmtree(folder / "a", ignore_errors=True)
    place.mkdir(parents=True)
    subprocess.run(["cp", "-a", f"{small}/.", str(place)], check=True)
    os.chdir(place)
    return place


def options(command: str) -> list[Option]:
    return [option for option in options_of(command) if option.flag not in LONG]


def given(option: Option, value: str) -> list[str]:
    """The option as it is typed. Joined by `=`, a value may begin with a dash."""
    if option.is_flag:
        return [option.flag]
    return [f"{option.flag}={value}"] if value.startswith("-") else [option.flag, value]


def without(words: list[str], option: Option) -> list[str]:
    """The words without this option and its value."""
    short = {"--out": "-o", "--dir": "-d"}.get(option.flag, "")
    for flag in (option.flag, short):
        if flag and flag in words:
            at = words.index(flag)
            words = words[:at] + words[at + (1 if option.is_flag else 2) :]
    return words


def tries(rng: random.Random | None = None, count: int = 0) -> Iterator[tuple[str, ...]]:
    """Command lines: all with one value in the place of one option or argument; or so many at random, with several."""
    if rng is None:
        for command in COMMANDS:
            for option in options(command):
                for value in ("",) if option.is_flag else VALUES:
                    yield (command, *_with(command, option, value))
        return
    for _ in range(count):
        command = rng.choice([name for name in COMMANDS if name not in HARNESS] * 3 + list(HARNESS))
        known = options(command)
        words = plain_words(command)
        for option in rng.sample(known, min(rng.choice((1, 1, 1, 2, 3)), len(known))):
            words = _with(command, option, rng.choice(option.choices or VALUES) if rng.random() < 0.9 else "", words)
        yield (command, *words)


def _with(command: str, option: Option, value: str, words: list[str] | None = None) -> list[str]:
    words = plain_words(command) if words is None else words
    if option.flag:
        return without(words, option) + given(option, value)
    return [value if value[:1] != "-" or value == "-" else f"./{value}", *words[1:]]


def problem_of(command: tuple[str, ...], small: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What is wrong with how a command line ends; empty where nothing is."""
    place = fresh(small, folder)
    before = kinds_and_bytes(place)
    capsys.readouterr()
    signal.alarm(SECONDS_OF_RUNS if command[0] in HARNESS else SECONDS)
    try:
        code: Any = main(command)
    except Stuck:
        return "hangs"
    except BaseException as error:  # noqa: BLE001 (that is what is looked for)
        return f"raises {type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    out, err = capsys.readouterr()
    told = re.sub(r'seen as: .*|"says": "[^"]*"', "", out + err)  # what torch says, as doctor quotes it
    if code not in ((0, 1, 2, 3, 130, 143) if command[0] in HARNESS else (0, 1, 2)):
        return f"ends with {code}"
    for word in ("Traceback", "is a bug in ckptool", "error[bug]", "Value error", "Possible options", "Errno"):
        if word in told and not ("Traceback" in word and "user-code" in told):
            return f"says {word!r}: {told[:300]}"
    if raw := {c for c in told if not c.isprintable()} - {"\n"}:
        return f"prints {raw!r}"
    if code == 2 and not told.strip():
        return "says nothing"
    after = kinds_and_bytes(place)
    if left := [name for name in after if "/.ckptool-" in f"/{name}"]:
        return f"leaves {left}"
    if code == 2 and command[0] not in HARNESS and after != before:
        changed = sorted(name for name in after.keys() | before.keys() if after.get(name) != before.get(name))
        return f"changes {changed} though it ends with 2: {told[:300]}"
    return ""


def _all_tried(
    commands: Iterator[tuple[str, ...]], small: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> int:
    was = signal.signal(signal.SIGALRM, _stuck)
    wrong, count = [], 0
    try:
        for command in commands:
            count += 1
            if problem := problem_of(command, small, folder, capsys):
                shown = " ".join(word if len(word) < 80 else f"{word[:40]}…" for word in map(repr, command))
                wrong.append(f"{shown}\n    {problem}")
    finally:
        signal.signal(signal.SIGALRM, was)
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:40])
    return count


def test_a_seeded_part_of_what_the_worst_user_types(
    small: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _all_tried(tries(random.Random(9), 80), small, folder, capsys) == 80


def test_a_name_that_no_file_can_have(small: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [(command, *_with(command, options(command)[0], "a\0b")) for command in COMMANDS]
    lines.append(("bundle", "a=a\0b", "-o", "out.pt"))
    _all_tried(iter(lines), small, folder, capsys)


@pytest.mark.soak
def test_all_that_the_worst_user_types(small: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _all_tried(tries(), small, folder, capsys) > 5_000


@pytest.mark.soak
def test_many_combinations_of_what_the_worst_user_types(
    small: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _all_tried(tries(random.Random(10), 10_000), small, folder, capsys)


def test_every_command_has_a_line_that_ends_well(small: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(PLAIN) == set(COMMANDS)
    for command in COMMANDS:
        if command not in ("prove", "prune", "browse"):  # the last needs a terminal
            fresh(small, folder)
            if command == "train":
                shutil.rmtree("run")
            assert main([command, *plain_words(command)]) in (0, 1), capsys.readouterr()
