"""The commands that ckptool prints: each is one that its own parser takes, quoted once, with file names that follow
each other."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

import ckptool
from ckptool import cli
from ckptool.checkpoint import commands
from ckptool.checkpoint.commands import FILE, OUT, OUT_PT, Advice, Command, command, other_program
from ckptool.checkpoint.paths import parted
from ckptool.cli import COMMANDS
from ckptool.reports.error_texts import KNOWN
from ckptool.reports.fixes import Chain
from tests.support.looped import looped

SOURCE = Path(ckptool.__file__).parent


@cache
def parser(verb: str) -> Any:
    return cli.parser([verb]).commands[verb]


def parsed(words: list[str]) -> dict[str, Any]:
    """What the program's parser makes of a command line; it raises where the program would say `usage`."""
    assert words[0] == "ckptool" and words[1] in COMMANDS, words
    context: Any = parser(words[1]).make_context(words[1], words[2:])
    return dict(context.params)


# The builder ---------------------------------------------------------------------------------------------------------


def calls() -> list[tuple[str, ast.Call]]:
    """Every call of `command` in the program, with its place; in cli/ a command is another thing."""
    return [
        (f"{path.relative_to(SOURCE)}:{node.lineno}", node)
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).parts[0] != "cli"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "command"
    ]


@looped(("place", "call"), calls())
def test_every_command_in_the_source_is_one_of_the_parser(place: str, call: ast.Call) -> None:
    verb, *arguments = call.args
    assert isinstance(verb, ast.Constant) and verb.value in COMMANDS
    words = ["ckptool", verb.value, *("x.pt" for _ in arguments)]
    flags = {flag: option for option in parser(verb.value).params for flag in option.opts}
    for keyword in call.keywords:
        flag = commands._FLAGS.get(str(keyword.arg), f"--{str(keyword.arg).replace('_', '-')}")
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        named = isinstance(keyword.value, ast.Name)  # nothing here says whether it is a bool or a text
        assert named or flags[flag].is_flag is (value is True), flag
        text = value if isinstance(value, str) else {"on_mismatch": "skip"}.get(str(keyword.arg), "x.pt")
        words += [flag] if flags[flag].is_flag else [flag, text]
    assert parsed(words)
    writes = "-o" in flags and verb.value != "warm-start"  # which looks first
    assert not writes or any(keyword.arg == "out" for keyword in call.keywords)


def test_options_are_words() -> None:
    line = command("edit", "-a.pt", out=OUT, drop=["a b", "c"], all=True, at="", partial=False)
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
    assert words == ["ckptool", "convert", f"{prefix}{name}#state_dict/a b", "-o", f"{prefix}{stem}.fixed{suffix}"]


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
    advice = Advice("Save it: ", command("recover", "a b.pt", out=OUT), "; or copy it again.")
    assert advice == "Save it: ckptool recover 'a b.pt' -o OUT; or copy it again."
    assert advice.otherwise == "Or copy it again." and [str(c) for c in advice.commands] == [
        "ckptool recover 'a b.pt' -o OUT"
    ]
    unpack = other_program("gzip -dc", "a.gz", into="a b")
    assert str(unpack) == "gzip -dc a.gz > 'a b'"


# What stands in the source -------------------------------------------------------------------------------------------


def test_every_command_of_the_table_of_errors_parses() -> None:
    for known in KNOWN:
        advice = known.advice.commands if isinstance(known.advice, Advice) else ()
        for fix in (*known.fixes, *advice):
            assert isinstance(fix, Command) and parsed(shlex.split(str(fix)))


def texts() -> Iterator[tuple[str, str]]:
    """Every text in the program that is no docstring, with its place; X for what is filled in."""
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        left_out: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                left_out.add(id(node.value))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "examples":
                left_out |= {id(part) for part in ast.walk(node)}  # tests/cli/test_help.py runs them
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                left_out |= {id(part) for part in ast.walk(node) if isinstance(part, ast.Constant)}
                words = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
                yield f"{path.relative_to(SOURCE)}:{node.lineno}", "".join(map(str, words))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
                yield f"{path.relative_to(SOURCE)}:{node.lineno}", node.value


COMMAND = re.compile(rf"\bckptool ({'|'.join(map(re.escape, sorted(COMMANDS)))})(?![\w.])((?:'[^']*'|[^;'])*)")


def written_out() -> list[tuple[str, str]]:
    found = []
    for place, text in texts():
        for match in COMMAND.finditer(text):
            if text[: match.start()].rstrip()[-1:] not in ("", ":", "|", "see", "`", ".") and "For example" not in text:
                continue
            line = re.split(r"[`]|\. |, |\.$|\s\(|\s+(?:Resume it|Prove it)", match[0].split("\n")[0])[0].split("#  ")[
                0
            ]
            found.append((place, line.strip()))
    return found


@looped(("place", "line"), written_out())
def test_a_command_that_is_written_out_parses(place: str, line: str) -> None:
    words = [
        {"…": "X", "X": "2"}.get(word, word) for word in shlex.split(line.replace("> run.yaml", ""), comments=True)
    ]
    with suppress(typer.Exit):
        parsed(words)
