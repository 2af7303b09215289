"""What goes wrong is told in three parts, with the right exit code, and changes nothing on disk."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptool
from ckptool import errors
from ckptool.cli import output
from tests.support.cli import Ran
from tests.support.looped import looped

Run = Callable[..., Ran]


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
    "what to convert to": ("convert dp.pt -d out", 2, "usage"),
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
    assert "None of the files was written" in ran.err and "text.pt" in ran.err
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


def test_an_interrupt_ends_with_130(files: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptool.verbs.inspect.listing", stopped)
    assert run("inspect", "dp.pt") == Ran(130, "", "interrupted\n")


def test_nothing_hostile_reaches_the_terminal(hostile: Path, run: Run) -> None:
    lines = (
        "inspect {f}; inspect {f} --all; inspect {f} --stats; inspect {f} --json; inspect '{f}#{e}'; show {f}; "
        "show {f}#text; show {f}#state_dict --json; rename {f} '*weight => *w{e}' -o {o}; diff {f} {o}; "
        "diff {f} {o} --json; rename {f} '* => x' -o {o} -f; edit {f} --drop text -o {o} -f; "
        "convert {f} -o {o}.safetensors; remap {f} --to '{e}' -o {o} -f; inspect 'missing{e}\n.pt'; '{e}'; "
        "inspect '--{e}'"
    ).format(f=hostile, o=hostile.with_name("out.pt"), e="\x1b[5m")
    for command in map(shlex.split, lines.split("; ")):
        ran = run(*command)
        raw = {c for c in ran.out + ran.err if not c.isprintable()} - {"\n"}
        assert not raw, f"{command}: {raw}"
        assert "break" not in [line.strip() for line in ran.out.split("\n")]
