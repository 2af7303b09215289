"""Pickled arrays and their types, as numpy writes them and as it takes them: judged by numpy."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy._core.multiarray import _reconstruct, scalar

import ckptool
from ckptool.checkpoint.numpy_arrays import array, array_type
from ckptool.checkpoint.numpy_arrays import scalar as scalar_of
from ckptool.formats import read
from tests.support.hidden_effects import Call, torch_saved
from tests.support.looped import looped

TYPES = tuple(("i1 u1 u2 >i4 f2 f4 >f8 c8 c16 S1 S5 V1 V3 U1 >U2 M8[ns] m8 ?").split())


def any_type(rng: random.Random, depth: int = 0) -> np.dtype[Any]:
    """A type of numbers, texts or dates; of records of these too, with gaps or without, aligned or not."""
    if depth == 2 or rng.random() < 0.7:
        return np.dtype(rng.choice(TYPES))
    fields = [(f"f{number}", any_type(rng, depth + 1)) for number in range(rng.randint(1, 3))]
    return np.dtype(fields, align=rng.random() < 0.5)


def any_array(rng: random.Random, kind: np.dtype[Any]) -> np.ndarray:
    shape = [rng.randint(0, 4) for _ in range(rng.randint(0, 3))]
    many = np.frombuffer(rng.randbytes(kind.itemsize * 64), "u1") % 100 // 97  # what any type can be, texts too
    made = np.resize(many.view(kind), shape)
    return made if rng.random() < 0.5 else np.asfortranarray(made)


@looped("seed", range(60))
def test_arrays_and_scalars_of_any_type(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    given = any_array(rng, any_type(rng))
    one = any_array(rng, np.dtype(rng.choice([text for text in TYPES if not {*"SUV?"} & {*text}]))).flatten()[:1]
    data = pickle.dumps({"a": given, "one": [*one], "kind": given.dtype}, rng.randint(0, 5))
    (tmp_path / "a.pkl").write_bytes(data)
    tree, again = read(tmp_path / "a.pkl").tree, pickle.loads(data)  # our own
    found = array(tree["a"])
    assert (str(found.type), found.shape) == (str(array_type(tree["kind"])), again["a"].shape)
    assert bytes(found.data) == again["a"].tobytes("F" if found.fortran else "C")
    for mine, theirs in zip(tree["one"], again["one"], strict=True):
        assert bytes(scalar_of(mine).data) == theirs.tobytes()
    loaded = ckptool.load(tmp_path / "a.pkl")["a"]
    assert (loaded.dtype, loaded.shape, loaded.tobytes()) == (given.dtype, given.shape, given.tobytes())


@pytest.mark.parametrize("name", [text.strip("<>").removesuffix("[ns]") for text in TYPES])
def test_a_type_without_a_state_is_of_this_machine(name: str, tmp_path: Path) -> None:
    kind = np.dtype(name)
    data = bytes(2 * kind.itemsize - 1) + b"\1"
    made = Call(_reconstruct, (np.ndarray, (0,), b"b"), (1, (2,), Call(np.dtype, (name,)), False, data))
    (tmp_path / "a.pt").write_bytes(torch_saved(made))
    found = array(read(tmp_path / "a.pt").tree["x"])
    assert (found.type.itemsize, found.type.order) == (kind.itemsize, kind.byteorder.replace("=", "<"))
    assert ckptool.load(tmp_path / "a.pt")["x"].tobytes() == data


F4 = np.dtype("f4")


@pytest.mark.parametrize(
    ("kind", "data", "fine"), [(F4, bytes(4), True), (F4, bytes(5), False), (F4, "abcd", True), (F4, [1], False)]
)
def test_a_scalar_has_the_bytes_of_its_type_or_is_said(kind: Any, data: Any, fine: bool, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(torch_saved(Call(scalar, (kind, data))))
    assert (not ckptool.scan(tmp_path / "a.pt").findings) == fine
