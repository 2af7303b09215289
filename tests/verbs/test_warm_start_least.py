"""A warm start that loads next to nothing is refused by every door, and what was asked for by name is done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import PlanRefused
from tests.support.cli import Run
from tests.support.files import load, saved


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 4))


def little(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of which one bias of 64 values fits, and a target of nearly 5,000."""
    state = {f"other{number}.w": torch.randn(3, number + 1) for number in range(4)}
    state["0.bias"] = torch.randn(64)
    return saved(state, tmp_path / "little.pt"), saved(net().state_dict(), tmp_path / "target.pt")


def test_next_to_nothing_is_refused_by_every_door(tmp_path: Path, run: Run) -> None:
    from ckptool.training.models import start_from

    file, target = little(tmp_path)
    out = tmp_path / "out.pt"
    for arguments in ([], ["-o", out], ["--json"], ["-o", out, "--on-mismatch", "skip"]):
        done = run("warm-start", file, "--against", target, *arguments)
        assert done.code == 1 and not out.exists(), done
        assert "1.28 %" in done.out and "--min-loaded" in done.out, done
    answer = json.loads(run("warm-start", file, "--against", target, "--json").out)
    assert [each["code"] for each in answer["refused"]] == ["min-loaded"] and not answer["accepted"]
    assert run("warm-start", file, "--against", target, "-o", out, "--min-loaded", "0.01").code == 0
    report = ckptool.warm_start(file, target, tmp_path / "python.pt")
    assert not report.accepted and not report.applied and not (tmp_path / "python.pt").exists()
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    doors: list[Any] = [
        lambda: ckptool.load_into(model, file),
        lambda: ckptool.load_into(model, load(file)),
        lambda: start_from(model, str(file), strict=False),
    ]
    for door in doors:
        with pytest.raises(PlanRefused, match="values asked for"):
            door()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert start_from(model, str(file), strict=False, min_loaded=0)
    assert ckptool.load_into(net(), file, min_loaded=0).applied
    assert ckptool.load_into(net(), file, only="0.bias").applied


def test_half_is_counted_over_what_is_asked_for() -> None:
    """Skipped shapes and excluded names do not count; missing ones do; suggested rules have to be taken."""
    whole = {f"{name}.weight": torch.randn(10, 10) for name in "abcdefghij"}
    for count in range(1, 11):
        some = dict(list(whole.items())[:count])
        rest = [name for name in whole if name not in some]
        other = {name: torch.randn(7, 9) for name in rest}
        for given, options, enough in (
            (some, {}, count >= 5),
            (some, {"exclude": rest}, True),
            (some, {"only": list(some)}, True),
            ({**some, **other}, {"on_mismatch": "skip"}, True),
            (some, {"min_loaded": 0}, True),
        ):
            report: Any = ckptool.warm_start(given, whole, dry_run=True, **options)
            assert report.accepted == enough, (count, options, report.refused)
    renamed = {name.replace("j.", "other_j."): value for name, value in whole.items()}
    shapes = {"j.weight": torch.randn(10, 11)}
    report = ckptool.warm_start({**renamed, "other_j.weight": torch.randn(10, 11)}, {**whole, **shapes}, dry_run=True)
    better = any(each.rules and each.unambiguous for each in report.suggestions)
    assert better and [each.code for each in report.refused] == ["min-loaded"]


def test_a_new_resolution_and_a_new_head_together(tmp_path: Path, run: Run) -> None:
    old = {"pos_embed": torch.randn(1, 17, 6), "body.weight": torch.randn(30, 30), "head.weight": torch.randn(10, 6)}
    new = {"pos_embed": torch.zeros(1, 26, 6), "body.weight": torch.zeros(30, 30), "head.weight": torch.zeros(3, 6)}
    file, target = saved(old, tmp_path / "old.pt"), saved(new, tmp_path / "new.pt")
    resize = "pos_embed=bicubic(cls=1)"
    done = run(
        "warm-start", file, "--against", target, "--resize", resize, "--on-mismatch", "skip", "-o", tmp_path / "o.pt"
    )
    assert done.code == 0, done
    made = load(tmp_path / "o.pt")
    assert torch.equal(made["body.weight"], old["body.weight"]) and torch.equal(made["head.weight"], new["head.weight"])
    assert torch.equal(made["pos_embed"][:, :1], old["pos_embed"][:, :1]) and made["pos_embed"][:, 1:].any()
