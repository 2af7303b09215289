"""`cast`: model weights in another floating type, and what it says about the values that it changed.

The bits of each cast are tested in `tests/transforms/test_casting.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import Conflict, NoMatch
from fixtures.make import make
from fixtures.traps import TRAPS
from tests.support.errors import three_parts
from tests.support.files import load, saved
from tests.support.looped import looped
from tests.support.same import assert_same_tree


def casted(value: Any, folder: Path, dtype: object, **options: Any) -> Any:
    """What comes of a file with this value, opened."""
    ckptool.cast(saved(value, folder / "in.pt"), folder / "out.pt", dtype=dtype, overwrite=True, **options)
    return ckptool.open(folder / "out.pt").tree


def test_views_keep_their_strides(tmp_path: Path) -> None:
    values = torch.cat([torch.randn(200) * 10.0 ** torch.randint(-6, 6, (200,)), torch.tensor([0.0, -0.0, torch.inf])])
    for source in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2):
        state = {"w": values.to(source), "t": values[:200].reshape(10, 20).to(source).t()}
        casted(state, tmp_path, "f16")
        for key, found in load(tmp_path / "out.pt").items():
            assert found.stride() == state[key].stride() and torch.equal(found, state[key].half()), source


W = torch.ones(3)
CODES, FLOAT8 = torch.zeros(8, dtype=torch.uint16), torch.zeros(8, dtype=torch.float8_e4m3fn)
MOMENTS = {"state": {0: {"exp_avg": W, "exp_avg_sq": W}}, "param_groups": []}


@looped(
    ("value", "options", "error", "says"),
    [
        ({"a.w": W, "b.w": W}, {"exclude": "b.w"}, Conflict, r"a\.w shares its storage with b\.w, which is not cast"),
        ({"a.w": W, "b.w": W}, {"exclude": "re:b"}, Conflict, r"a\.w shares its storage with b\.w, which is not cast"),
        ({"m": {"a.w": W}, "optimizer": MOMENTS}, {}, Conflict, "optimizer/state/0/exp_avg, which is not cast"),
        ({"a.w": CODES, "b.w": CODES.view(torch.float8_e5m2)}, {}, Conflict, "shares its storage with a.w, which is"),
        ({"a.w": FLOAT8, "b.w": FLOAT8.view(torch.float8_e5m2)}, {}, Conflict, "seen as two types"),
        ({"a.w": W}, {"only": "c.*"}, NoMatch, r"'c\.\*' matches no key"),
        ({"a.w": W}, {"exclude": "c.*"}, NoMatch, r"'c\.\*' matches no key"),
    ],
)
def test_what_would_change_something_else_or_nothing_is_refused(
    value: Any, options: Any, error: type[Exception], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says) as caught:
        casted(value, tmp_path, "f16", **options)
    three_parts(caught.value)
    assert not (tmp_path / "out.pt").exists()
    assert "--exclude" in getattr(caught.value, "fix", "") or "which is not cast" not in str(caught.value)


UNTOUCHED = (
    "int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex32 complex64 complex128 bits8 float4_e2m1fn_x2"
).split()
COMPOSITES = ["09-qint8-per-tensor", "11-sparse-coo", "11-nested", "11-subclass", "11-parameter-with-attributes"]


@looped("name", [*(f"09-{name}" for name in UNTOUCHED), *COMPOSITES])
def test_what_is_no_plain_float_is_not_cast(name: str, tmp_path: Path) -> None:
    file = saved(TRAPS[name](), tmp_path / "in.pt")
    done = ckptool.cast(file, tmp_path / "out.pt", dtype="bf16", keep_unknown=True, overwrite=True)
    assert done.facts["tensors"] == 0
    assert [fact["path"] for fact in done.facts["skipped"]] == (["w"] if name in COMPOSITES else [])
    assert_same_tree(ckptool.open(file), ckptool.open(tmp_path / "out.pt"))


def test_what_has_the_type_already_is_left_alone(tmp_path: Path) -> None:
    file = make("bf16.safetensors", tmp_path)
    done = ckptool.cast(file, tmp_path / "out.safetensors", dtype="bf16")
    assert done.how == "copy" and done.summary.startswith("already clean")
    assert (tmp_path / "out.safetensors").read_bytes() == file.read_bytes()
    done = ckptool.cast({"a.w": torch.ones(2).half(), "b.w": torch.ones(2)}, dtype="f16", dry_run=True)
    assert done.facts["tensors"] == 1 and done.facts["bytes_before"] == 8


def test_what_was_lost(tmp_path: Path) -> None:
    state = {"a.w": torch.tensor([1.0, 1.001, 70000.0, float("inf")]), "b.w": torch.tensor([1e-9, 2.0])}
    state |= {"c.w": torch.tensor([0.5]), "tied": state["a.w"]}
    done = ckptool.cast(saved(state, tmp_path / "in.pt"), tmp_path / "out.pt", dtype="f16")
    facts = {fact["storage_of"]: fact for fact in done.facts["lossy"]}
    assert list(facts) == ["a.w", "b.w"] and facts["a.w"]["overflowed"] == 1 and facts["b.w"]["underflowed"] == 1
    assert (facts["a.w"]["elements"], facts["a.w"]["changed"]) == (4, 2)
    assert (done.facts["tensors"], done.facts["bytes_before"], done.facts["bytes_after"]) == (4, 28, 14)
    assert done.details[0].startswith("values rounded in 2 of 3 storages")
    assert "1 value became infinite or NaN" in done.details and "1 value became zero" in done.details
    exact = ckptool.cast(saved({"c.w": state["c.w"]}, tmp_path / "c.pt"), tmp_path / "exact.pt", dtype="f16")
    assert exact.details == ("no value was changed",) and exact.facts["lossy"] == []
    dry = ckptool.cast(tmp_path / "in.pt", tmp_path / "dry.pt", dtype="f16", dry_run=True)
    assert dry.details == ()


@looped(
    ("given", "dtype"),
    [
        *((given, torch.bfloat16) for given in (torch.bfloat16, "bfloat16", "torch.bfloat16", "bf16")),
        *(("float16", torch.float16), ("half", torch.float16), ("fp32", torch.float32)),
        ("float8_e4m3fn", torch.float8_e4m3fn),
    ],
)
def test_the_dtype_is_torchs_own_or_any_name_of_it(given: object, dtype: torch.dtype) -> None:
    assert ckptool.cast({"a.w": torch.ones(3).double()}, dtype=given)["a.w"].dtype is dtype
