"""One root as plain tensors: what is kept, what is left behind, what is only noted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptool
from ckptool.errors import Conflict, NoMatch, Unsupported, UsageError
from fixtures.traps import TRAPS
from tests.support.files import saved, weights
from tests.support.looped import looped


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
