"""Several files at once: where one is refused, none is written; or the others are, where that was asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.cli import Run
from tests.support.files import saved, weights

REFUSED = {
    "strip-module": ["--partial"],
    "cast": ["--dtype", "bf16"],
    "convert": ["--to", "safetensors"],
    "rename": ["a.* => b.*"],
}


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files, and between them one that has no weights."""
    monkeypatch.chdir(tmp_path)
    for name in ("one.pt", "three.pt"):
        saved(weights("module.a.w", "a.b"), tmp_path / name)
    saved({"epoch": 3}, tmp_path / "two.pt")
    return tmp_path


FILES = ("one.pt", "two.pt", "three.pt")


@pytest.mark.parametrize("verb", REFUSED)
def test_where_one_is_refused_none_is_written(verb: str, three: Path, run: Callable[..., object]) -> None:
    before = {path.name: path.read_bytes() for path in three.iterdir()}
    for where in (["-d", "out"], ["--in-place"] if verb != "convert" else ["-d", "new/out"]):
        ran = run(verb, *FILES, *REFUSED[verb], *where)
        assert ran.code == 2 and "two.pt" in ran.err and "None of the files was written" in ran.err, ran.err
        assert {path.name: path.read_bytes() for path in three.iterdir()} == before


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ([], ("needs to know where to write", "Nothing is written unless you name an output.")),
        (["-d", "out", "--in-place"], ("was given -d and --in-place", "They are mutually exclusive.")),
    ],
)
def test_one_place_to_write_is_named(where: list[str], words: list[str], three: Path, run: Run) -> None:
    before = sorted(three.iterdir())
    ran = run("strip-module", *FILES, *where)
    assert ran.code == 2 and all(each in ran.err for each in words), ran.err
    assert sorted(three.iterdir()) == before


@pytest.mark.parametrize("verb", REFUSED)
def test_the_others_are_written_where_that_was_asked_for(verb: str, three: Path, run: Callable[..., object]) -> None:
    ran = run(verb, *FILES, *REFUSED[verb], "-d", "out", "--skip-refused")
    assert ran.code == 1 and "two.pt" in ran.out
    assert {path.stem for path in (three / "out").iterdir()} == {"one", "three"}


def test_as_json_each_file_has_its_object(three: Path, run: Callable[..., object]) -> None:
    ran = run("strip-module", *FILES, "--partial", "-d", "out", "--skip-refused", "--json")
    results = json.loads(ran.out)["results"]
    assert ran.code == 1 and [each["schema"].partition("/")[0] for each in results].count("ckptool.error") == 1
    assert len(results) == 3


def test_all_are_written_where_none_is_refused(three: Path, run: Callable[..., object]) -> None:
    assert run("strip-module", "one.pt", "three.pt", "--partial", "-d", "out", "--skip-refused").code == 0
    assert list(torch.load(three / "out" / "one.pt")) == ["a.w", "a.b"]
