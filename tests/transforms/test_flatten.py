"""One root as plain tensors: what is kept, what is left behind, what is only noted."""

import shlex
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckptool
from ckptool.errors import Conflict, NoMatch, Unsupported, UsageError
from fixtures.traps import TRAPS
from tests.support.cli import Run
from tests.support.files import saved, weights
from tests.support.looped import looped
from tests.support.same import assert_same_objects


def exported(value: Any, folder: Path, **options: Any) -> tuple[list[str], list[str], list[str]]:
    """The names of the tensors in safetensors, what stays behind, and the codes of the notes."""
    file, out = saved(value, folder / "in.pt"), folder / "out.safetensors"
    done = ckptool.convert(file, out, overwrite=True, keep_unknown=True, **options)
    return sorted(load_file(out)), list(done.facts["left_behind"]), [note.code for note in done.notes]


EXTRA = TRAPS["19-extra-state"]()


@looped(
    ("value", "options", "names", "behind"),
    [
        (weights("a.w", "b.w"), {}, ["a.w", "b.w"], []),
        (
            {"a": 1, "models": [{"G": {**weights("x.w"), "n": 3}, "D": 0}, "more"]},
            {},
            ["x.w"],
            ["models/0/G/n", "a", "models/1", "models/0/D"],  # beside every level
        ),
        ({**weights("a.w"), "fc._extra_state": {"scale": 2.0}, "note": "x"}, {}, ["a.w"], ["fc._extra_state", "note"]),
        (weights("a.w", "a.b", "c.w"), {"only": ["a.*"], "exclude": ["*.b"]}, ["a.w"], ["a.b", "c.w"]),
        (
            EXTRA,
            {"exclude": ["*._extra_state"]},
            sorted(key for key, value in EXTRA.items() if isinstance(value, torch.Tensor)),
            ["fc._extra_state", "fp8._extra_state"],
        ),
    ],
)
def test_what_is_kept_and_what_stays(
    value: Any, options: Any, names: list[str], behind: list[str], tmp_path: Path
) -> None:
    assert exported(value, tmp_path, **options)[:2] == (names, behind)


@looped(
    ("value", "options", "error", "says"),
    [
        (EXTRA, {}, Unsupported, r"fc\._extra_state \(a dictionary with 1 tensor\)"),
        (weights("a.w"), {"only": ["z"]}, NoMatch, "'z' matches no key"),
        ({"a.w": torch.ones(1), "\x1b[31m": torch.ones(1, 2).expand(1 << 28, 2)}, {}, Conflict, "is an expanded view"),
    ],
)
def test_what_is_refused(value: Any, options: Any, error: type[Exception], says: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=says) as caught:
        exported(value, tmp_path, **options)
    assert "\x1b" not in str(caught.value)


@looped(
    ("name", "expected"),
    [
        ("01-full-tie", []),
        ("01-full-tie-by-view", []),
        ("02-partial-overlap", ["sharing-lost"]),
        ("02-overlap-of-two-parts", ["sharing-lost"]),
        ("03-disjoint-views", []),
        ("04-two-shapes", ["sharing-lost"]),
        ("05-transposed-tie", ["sharing-lost"]),
        ("06-expanded", ["resolved-views"]),
        ("06-sliding-windows", ["resolved-views"]),
        ("07-slice-of-a-big-storage", []),
        ("08-conj", ["sharing-lost", "resolved-views"]),
        ("08-neg", ["sharing-lost", "resolved-views"]),
        ("10-empty-view-of-a-full-storage", []),
    ],
)
def test_lost_sharing_and_resolved_views_are_noted(name: str, expected: list[str], tmp_path: Path) -> None:
    value = TRAPS[name]()
    _, _, codes = exported(value, tmp_path)
    assert [code for code in codes if code in ("sharing-lost", "resolved-views")] == expected
    assert "sharing-lost" not in exported(value, tmp_path, ties="copy")[2]


def test_ties_are_copied_only_where_each_name_has_values_of_its_own(tmp_path: Path) -> None:
    file = saved(TRAPS["01-full-tie"](), tmp_path / "in.pt")
    for out, options in (("o.pt", {}), ("o.dcp", {}), ("o.safetensors", {"all": True})):
        with pytest.raises(UsageError, match="weights only"):
            ckptool.convert(file, tmp_path / out, ties="copy", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pt"]


def random_model(random: Random, depth: int = 3) -> nn.Module:
    """Submodules of submodules, each with a layer of its own."""
    model = nn.Module()
    model.add_module("fc", nn.Linear(2, random.randint(1, 3)))
    for number in range(random.randint(1, 3) if depth else 0):
        model.add_module(random.choice("abc") + str(number), random_model(random, depth - 1))
    return model


def in_parts(model: nn.Module, random: Random) -> dict[str, Any]:
    """The state dicts of its submodules, saved apart at random levels."""
    return {
        name: in_parts(part, random) if random.random() < 0.6 and not isinstance(part, nn.Linear) else part.state_dict()
        for name, part in model.named_children()
    }


@looped("seed", range(12))
@pytest.mark.parametrize("entry", ["", "net"])
def test_parts_of_a_model_that_were_saved_apart_are_one(entry: str, seed: int, tmp_path: Path, run: Run) -> None:
    """The judge is the state dict of the whole model."""
    model, other = (random_model(Random(seed)) for _ in range(2))
    parts = in_parts(model, Random(seed + 1))
    file = saved({entry: parts, "epoch": 3} if entry else parts, tmp_path / "in.pt")
    whole, name = saved(model.state_dict(), tmp_path / "whole.pt"), f"{file}#{entry or '/'}"
    ckptool.convert(name, tmp_path / "out.safetensors")
    assert_same_objects(
        dict(model.state_dict()), {k: load_file(tmp_path / "out.safetensors")[k] for k in model.state_dict()}
    )
    ckptool.load_into(other, name)
    assert_same_objects(dict(model.state_dict()), dict(other.state_dict()))
    found = ckptool.doctor(file, against=whole)
    assert [each.code for each in found.findings][:1] == ["nested-weights"], found
    assert run("doctor", str(file), "--against", str(whole), "--fix", "-o", str(tmp_path / "fixed.pt")).code == 0
    assert_same_objects(dict(model.state_dict()), dict(torch.load(tmp_path / "fixed.pt")))
    for advice in [each.advice for each in ckptool.doctor(file).findings if each.code == "several-weights"]:
        words = advice.partition("joined by dots: ckptool ")[2]
        subprocess.run(["sh", "-c", f"{shlex.quote(sys.executable)} -m ckptool {words}"], check=True, cwd=tmp_path)
        assert load_file(tmp_path / "in.fixed.safetensors").keys() == model.state_dict().keys()
        (tmp_path / "in.fixed.safetensors").unlink()


def test_what_is_more_than_parts_of_a_model_is_not_joined(tmp_path: Path) -> None:
    sets = {"G": weights("a.w", "b.w"), "D": weights("a.w", "b.w")}
    file = saved({**sets, "epoch": 3}, tmp_path / "in.pt")
    with pytest.raises(Unsupported, match="a dictionary with 2 tensors"):
        ckptool.convert(f"{file}#/", tmp_path / "out.safetensors")
    with pytest.raises(UsageError) as caught:
        ckptool.convert(file, tmp_path / "out.safetensors")
    assert "joined" not in caught.value.fix
    two_of_one_name = {"a": {"b": weights("w", "v"), "b.w": torch.ones(2)}}
    for value in (two_of_one_name, {"model.pt": weights("a.w"), "dense/model.pt": weights("a.w")}):
        file = saved(value, tmp_path / "other.pt")
        with pytest.raises(Unsupported):
            ckptool.convert(f"{file}#/", tmp_path / "out.safetensors")
