"""`diff --only`: compares what matches and nothing else, and says so; `-q` says nothing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.checkpoint.paths import matcher
from ckptool.checkpoint.tree import address, walk
from ckptool.cli import main
from tests.support.files import saved
from tests.support.looped import looped


def trees() -> tuple[dict[str, Any], dict[str, Any]]:
    def tree(number: int) -> dict[str, Any]:
        model = {f"h.{i}.{name}": torch.full((3,), 1.0 + i * number) for i in range(3) for name in ("weight", "bias")}
        state = {i: {"exp_avg": torch.full((3,), float(number)), "step": number} for i in range(3)}
        return {"model": model, "optimizer": {"state": state, "lr": [0.1, number]}, "epoch": number}

    left, right = tree(0), tree(1)
    left["gone"], right["model"]["new"] = {"a": torch.ones(2)}, torch.ones(2)
    return left, right


PATTERNS = (
    "h.0.*",
    "model",
    "model/h.1.weight",
    "*bias",
    "optimizer/*",
    "lr",
    "state/0",
    "gone/a",
    "new",
    "re:h\\.[12]",
    "*",
)


@looped("seed", range(30))
def test_it_finds_what_a_whole_diff_finds_in_what_matches(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    only = dice.sample(PATTERNS, dice.randint(1, 3))
    left, right = trees()
    a, b = saved(left, tmp_path / "a.pt"), saved(right, tmp_path / "b.pt")
    whole, part = ckptool.diff(a, b), ckptool.diff(a, b, only=only)

    def is_chosen(path: tuple[Any, ...]) -> bool:
        texts = [address(path[i:j]) for i in range(len(path)) for j in range(i + 1, len(path) + 1) if i == 0 or j]
        return any(matcher(pattern)(text) for pattern in only for text in texts)

    assert [c.address for c in part.changed] == [c.address for c in whole.changed if is_chosen(c.path)]
    for name in ("only_left", "only_right"):
        ends = {address((*path, *rest)) for path, node in getattr(part, name) for rest, _ in walk(node)}
        every = {(*path, *rest) for path, node in getattr(whole, name) for rest, _ in walk(node)}
        assert ends == {address(path) for path in every if is_chosen(path)}
    assert part.only == tuple(only) and part.to_dict()["only"] == only


def test_prefixes_and_ignored_ones(tmp_path: Path) -> None:
    plain = saved({"fc.w": torch.ones(2), "x": torch.ones(1)}, tmp_path / "a.pt")
    wrapped = saved({"module.fc.w": torch.ones(2), "module.x": torch.zeros(1)}, tmp_path / "b.pt")
    assert ckptool.diff(plain, wrapped, only="fc.*", ignore="prefix").same
    assert not ckptool.diff(plain, wrapped, only="x", ignore="prefix").same


@pytest.mark.parametrize("options", [[], ["--only", "h.0.*"], ["--stat"], ["--all"]])
def test_quiet_prints_nothing(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left, right = trees()
    a, b = str(saved(left, tmp_path / "a.pt")), str(saved(right, tmp_path / "b.pt"))
    for other in (a, b):
        expected = main(["diff", a, other, *options])
        capsys.readouterr()
        assert main(["diff", a, other, *options, "--quiet"]) == expected == main(["diff", a, other, "-q", *options])
        assert capsys.readouterr() == ("", "")
