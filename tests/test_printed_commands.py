"""The commands that ckptool prints: each is one that its own parser takes, quoted once, with file names that follow
each other."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ckptool.analysis.findings import Chain
from ckptool.checkpoint.paths import parted
from ckptool.commands import FILE, OUT, OUT_PT, command, other_program
from ckptool.errors import Text


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
    advice = Text("Save it: ", command("recover", "a b.pt", out=OUT), "; or copy it again.")
    assert advice == "Save it: ckptool recover 'a b.pt' -o OUT; or copy it again."
    assert [*map(str, advice.commands)] == ["ckptool recover 'a b.pt' -o OUT"]
    unpack = other_program("gzip -dc", "a.gz", into="a b")
    assert str(unpack) == "gzip -dc a.gz > 'a b'"
