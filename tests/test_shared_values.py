"""What hostile files of at most 1 MB cost in every verb, above all values that are shared: a few bytes of dictionaries
that hold each other have more paths than atoms in the universe.

Walks visit an object once; what is listed by path, as the names of a tensor are, has a bound, and says so.
"""

import argparse
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.all_hostile import everything
from tests.support.budget import SMALL, command_meets_budget
from tests.support.cli import Run, command_lines
from tests.support.memory import PROMISED, peak_of


def doubled(leaf: Any, times: int, kind: type) -> Any:
    for _ in range(times):
        leaf = [leaf, leaf] if kind is list else kind(a=leaf, b=leaf)
    return leaf


def files(folder: Path) -> list[Path]:
    """Files of at most 150 kB whose objects share parts."""
    weights = {"w": torch.ones(3, 4), "v": torch.zeros(5)}
    itself: dict[str, Any] = {"state_dict": weights}
    itself["self"] = itself
    made: dict[str, Any] = {
        "cycle": itself,
        "names": {"state_dict": weights, "more": dict.fromkeys(range(20_000), weights)},
    }
    for kind in (dict, list, argparse.Namespace):
        for times in (14, 60):
            made[f"{kind.__name__}{times}"] = {"state_dict": weights, "extra": doubled({"x": 1}, times, kind)}
            made[f"tensors-{kind.__name__}{times}"] = doubled(weights, times, kind)
    made["lists"] = {"state_dict": weights, "extra": [list(range(200))] * 3000}
    for name, value in made.items():
        torch.save(value, folder / f"{name}.pt")
    torch.save({"w": torch.ones(3, 4)}, folder / "base.pt")
    return [folder / f"{name}.pt" for name in made]


COMMANDS = """
inspect FILE|inspect FILE --json|inspect FILE --all|inspect FILE --stats|show FILE|diff FILE FILE
diff FILE BASE|diff FILE BASE --json|verify FILE|doctor FILE|scan FILE
report FILE -o OUT.html|remap FILE --to cpu -o OUT
strip-module FILE -o OUT|add-module FILE -o OUT|rename FILE w=>q -o OUT|cast FILE --to bf16 -o OUT|slim FILE -o OUT
edit FILE --set zz=1 -o OUT|convert FILE -o OUT.safetensors|convert FILE --all -o OUT.safetensors|recover FILE -o OUT
convert FILE --weights-only -o OUT|convert FILE --all -o OUT.dcp|bundle m=FILE -o OUT.tar|average FILE FILE -o OUT
warm-start FILE --against BASE|spec FILE -o OUT.json
"""


def commands(file: Path, out: Path) -> list[list[str]]:
    lines = command_lines(COMMANDS)
    places = {"FILE": str(file), "BASE": str(file.with_name("base.pt")), "OUT": str(out)}
    return [[_placed(word, places) for word in line.split(" ")] for line in lines]


def _placed(word: str, places: dict[str, str]) -> str:
    for name, place in places.items():
        word = word.replace(name, place)
    return word


@pytest.mark.parametrize("share", [0.08, pytest.param(1.0, marks=pytest.mark.soak)])
def test_every_verb_meets_the_budget(share: float, tmp_path: Path) -> None:
    chosen = random.Random(3)
    for number, file in enumerate(files(tmp_path)):
        for place, words in enumerate(commands(file, tmp_path / f"out{number}")):
            if chosen.random() < share:
                out = tmp_path / f"out{number}-{place}"
                command_meets_budget(*(word.replace(f"out{number}", out.name) for word in words))


TOOK_LONGER = [("row 72-modules", "doctor"), ("row 72-modules", "report"), ("row one-key-of-many-dots", "report")]


@pytest.mark.parametrize(
    ("share", "part"), [(0.005, None), *(pytest.param(1.0, part, marks=pytest.mark.soak) for part in range(12))]
)
def test_every_verb_meets_the_budget_for_every_hostile_file(share: float, part: int | None, tmp_path: Path) -> None:
    """Ten thousand command lines, in a dozen parts."""
    chosen = random.Random(5)
    torch.save({"w": torch.ones(3, 4)}, tmp_path / "base.pt")
    hostile = [each for each in everything() if len(each[1]) <= SMALL]
    for number, (title, data) in enumerate(hostile if part is None else hostile[part::12]):
        file = tmp_path / f"{number}.pt"
        for place, words in enumerate(commands(file, tmp_path / "out")):
            if chosen.random() < share or (title, words[0]) in TOOK_LONGER:
                file.write_bytes(data)
                placed = (word.replace(f"{os.sep}out", f"{os.sep}out{place}") for word in words)
                command_meets_budget(*placed, characters=8 * SMALL)  # numbers in JSON are longer than in a pickle
        for path in tmp_path.glob("out*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        file.unlink(missing_ok=True)


def test_verify_counts_the_names_that_inspect_lists(tmp_path: Path, run: Run) -> None:
    weights = {"w": torch.ones(3), "v": torch.ones(2)}
    torch.save(dict.fromkeys(range(5_000), weights), tmp_path / "a.pt")
    count = len(json.loads(run("inspect", tmp_path / "a.pt", "--json").out)["tensors"])
    assert f"fine ({count:,} tensors, " in run("verify", tmp_path / "a.pt").out
    assert json.loads(run("verify", tmp_path / "a.pt", "--json").out)["tensors"] == count


def test_a_shared_value_is_printed_once(tmp_path: Path, run: Run) -> None:
    words = {f"word{number}": number for number in range(100)}
    group = {"betas": (0.9, 0.99)}
    torch.save({"w": torch.ones(3), "one": words, "two": words, "groups": [group, group]}, tmp_path / "a.pt")
    rows = json.loads(run("inspect", tmp_path / "a.pt", "--json").out)["entries"]
    again = [(row["path"], row["value"], row["same_as"]) for row in rows if "same_as" in row]
    assert again == [(["two"], None, ["one"]), (["groups", 1], None, ["groups", 0])]
    assert len(rows) == 100 + 2 + len(again)
    assert "\n  two               the same dict as one\n" in run("inspect", tmp_path / "a.pt", "--all").out
    assert "two/word7  7" in run("inspect", tmp_path / "a.pt", "--only", "two/word7").out


def test_a_container_that_holds_itself_says_so(tmp_path: Path, run: Run) -> None:
    itself: dict[str, Any] = {"w": torch.ones(3)}
    itself["self"] = itself
    torch.save(itself, tmp_path / "a.pt")
    assert "self  the same dict as (the whole file)" in run("inspect", tmp_path / "a.pt", "--all").out


@pytest.mark.parametrize("values", [100_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_memory_by_plain_values(values: int, tmp_path: Path) -> None:
    """64 MB, and 300 B for each plain value; `diff` holds those of two files."""
    for name in ("a.pt", "b.pt"):
        torch.save({"w": torch.ones(3), "words": {f"word{n}": n for n in range(values)}}, tmp_path / name)
    for call, files_ in (
        ("inspect('a.pt')", 1),
        ("verify('a.pt')", 1),
        ("diff('a.pt', 'b.pt')", 2),
        ("scan('a.pt')", 1),
    ):
        limit = (PROMISED + 300 * values * files_) * 4 // 3
        assert peak_of(f"ckptool.{call}", tmp_path) <= limit, call
