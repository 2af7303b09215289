"""One root as plain tensors: what is kept, what is left behind, what is only noted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptool.conventions.state_dicts import one_state_dict
from ckptool.errors import CkptoolError, NoMatch, Unsupported
from ckptool.formats import read
from ckptool.transforms.flatten import Exported, export
from fixtures.make import make
from fixtures.traps import TRAPS
from tests.support.errors import three_parts
from tests.support.files import opened, weights


def exported(value: Any, folder: Path, at: str | None = None, **options: Any) -> Exported:
    checkpoint = opened(value, folder)
    return export(checkpoint, one_state_dict(checkpoint, at)[0], **options)


def codes(done: Exported) -> list[str]:
    return [note.code for note in done.notes]


def test_one_root_and_what_stays_behind(tmp_path: Path) -> None:
    checkpoint = read(make("training.pt", tmp_path))
    done = export(checkpoint, one_state_dict(checkpoint)[0])
    assert done.checkpoint.tree == dict(checkpoint.tree["model_state_dict"]) and done.checkpoint.tensors_only
    beside = [key for key in checkpoint.tree if key != "model_state_dict"]
    assert done.left_behind == ("model_state_dict/_metadata", *beside)
    assert done.notes == ()


def test_what_stays_behind_beside_every_level(tmp_path: Path) -> None:
    value = {"a": 1, "models": [{"G": {**weights("x.w"), "n": 3}, "D": 0}, "more"]}
    assert exported(value, tmp_path).left_behind == ("models/0/G/n", "a", "models/1", "models/0/D")


def test_a_bare_state_dict_leaves_nothing(tmp_path: Path) -> None:
    done = exported(weights("a.w", "b.w"), tmp_path)
    assert list(done.checkpoint.tree) == ["a.w", "b.w"] and done.left_behind == ()


def test_entries_that_are_no_tensors_are_listed(tmp_path: Path) -> None:
    done = exported({**weights("a.w"), "fc._extra_state": {"scale": 2.0}, "note": "x"}, tmp_path)
    assert list(done.checkpoint.tree) == ["a.w"]
    assert done.left_behind == ("fc._extra_state", "note")


def test_entries_that_hold_tensors_are_refused_unless_they_are_left_out(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"fc\._extra_state \(a dictionary with 1 tensor\)"):
        exported(TRAPS["19-extra-state"](), tmp_path)
    done = exported(TRAPS["19-extra-state"](), tmp_path, exclude=["*._extra_state"])
    assert done.left_behind == ("fc._extra_state", "fp8._extra_state")


def test_only_and_exclude(tmp_path: Path) -> None:
    done = exported(weights("a.w", "a.b", "c.w"), tmp_path, only=["a.*"], exclude=["*.b"])
    assert (list(done.checkpoint.tree), done.left_behind) == (["a.w"], ("a.b", "c.w"))
    with pytest.raises(NoMatch):
        exported(weights("a.w"), tmp_path, only=["z"])


@pytest.mark.parametrize(
    "name", ["11-sparse-coo", "11-nested", "09-qint8-per-tensor", "11-subclass", "11-meta", "11-tensor-with-attributes"]
)
def test_what_is_no_plain_tensor_is_refused_by_name(name: str, tmp_path: Path) -> None:
    value = {"fc.weight": torch.ones(1), **TRAPS[name]()}
    with pytest.raises(Unsupported, match=r"safetensors cannot hold w \(") as caught:
        exported(value, tmp_path)
    assert "--exclude" in three_parts(caught.value)[1] + caught.value.fix and "--all" in caught.value.fix
    assert list(exported(value, tmp_path, exclude=["w", *(["p"] if "p" in value else [])]).checkpoint.tree) == [
        "fc.weight"
    ]


@pytest.mark.parametrize("name", ["06-expanded", "06-sliding-windows"])
def test_expanded_views_are_written_out_and_noted(name: str, tmp_path: Path) -> None:
    done = exported(TRAPS[name](), tmp_path)
    assert done.checkpoint.tree["w"].shape == (3, 4) and "resolved-views" in codes(done)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("01-full-tie", []),
        ("01-full-tie-by-view", []),
        ("02-partial-overlap", ["sharing-lost"]),
        ("02-overlap-of-two-parts", ["sharing-lost"]),
        ("03-disjoint-views", []),
        ("04-two-shapes", ["sharing-lost"]),
        ("05-transposed-tie", ["sharing-lost"]),
        ("07-slice-of-a-big-storage", []),
        ("08-conj", ["sharing-lost", "resolved-views"]),
        ("08-neg", ["sharing-lost", "resolved-views"]),
        ("10-empty-view-of-a-full-storage", []),
    ],
)
def test_lost_sharing_and_resolved_views_are_noted(name: str, expected: list[str], tmp_path: Path) -> None:
    assert codes(exported(TRAPS[name](), tmp_path)) == expected


def test_notes_name_what_they_are_about(tmp_path: Path) -> None:
    x = torch.arange(9.0)
    value = {"a.w": x[:3], "b.w": x[3:6], "c.w": x[5:], "d.w": torch.ones(1)}
    (note,) = exported(value, tmp_path).notes
    assert "b.w, c.w" in note.message and "d.w" not in note.message


def test_copied_ties_share_nothing(tmp_path: Path) -> None:
    for name in ("01-full-tie", "02-partial-overlap"):
        done = exported(TRAPS[name](), tmp_path, copy_ties=True)
        storages = [entry.storage for entry in done.checkpoint.tree.values()]
        assert len(set(map(id, storages))) == len(storages) and "sharing-lost" not in codes(done)


def test_the_input_is_not_touched(tmp_path: Path) -> None:
    checkpoint = opened(TRAPS["01-full-tie"](), tmp_path)
    before = list(checkpoint.tree.values())
    export(checkpoint, one_state_dict(checkpoint)[0], copy_ties=True)
    assert all(a is b for a, b in zip(before, checkpoint.tree.values(), strict=True))


def test_names_are_escaped(tmp_path: Path) -> None:
    with pytest.raises(CkptoolError) as caught:
        exported({"a.w": torch.ones(1), "\x1b[31m": torch.ones(1, 2).expand(1 << 28, 2)}, tmp_path)
    assert "is an expanded view" in str(caught.value) and "\x1b" not in str(caught.value)
