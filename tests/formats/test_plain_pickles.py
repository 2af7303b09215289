"""Plain pickles of torch before 0.4, whose storages are lists of numbers, and keys that
are given twice: the last value counts, as in Python."""

from __future__ import annotations

import io
import pickle
import random
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool
from ckptool.errors import Conflict
from ckptool.formats.nested_streams import BUILDERS
from ckptool.pickles.decode import REPEATED_KEY, decode, no_storage

KINDS = ("Double", "Float", "Half", "Long", "Int", "Short", "Char", "Byte")


class Storage:
    def __init__(self, kind: str, values: list[float]) -> None:
        self.made = getattr(torch, f"{kind}Storage"), (values,)

    def __reduce__(self) -> Any:
        return self.made


class Tensor:
    def __init__(self, storage: Storage, *view: Any) -> None:
        self.made = torch._utils._rebuild_tensor, (storage, *view)

    def __reduce__(self) -> Any:
        return self.made


def saved(seed: int) -> dict[str, Tensor]:
    chosen = random.Random(seed)
    tensors = {}
    for kind in KINDS:
        rows, columns = chosen.randint(1, 5), chosen.randint(1, 5)
        low = 0 if kind == "Byte" else -100
        whole = kind not in ("Double", "Float", "Half")
        values = [chosen.randint(low, 100) if whole else chosen.uniform(-9, 9) for _ in range(rows * columns)]
        storage = Storage(kind, values)  # type: ignore[arg-type]
        tensors[f"{kind}.weight"] = Tensor(storage, 0, (rows, columns), (columns, 1))
        tensors[f"{kind}.turned"] = Tensor(storage, 0, (columns, rows), (1, columns))
        tensors[f"{kind}.row"] = Tensor(storage, (rows - 1) * columns, (columns,), (1,))
    return tensors


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("protocol", [0, 1, 2])
def test_every_tensor_is_read_as_torch_makes_it(protocol: int, tmp_path: Path) -> None:
    file, out = tmp_path / "old.pkl", tmp_path / "new.pt"
    for seed in range(20):
        data = pickle.dumps({"model": saved(seed), "epoch": 3}, protocol)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = pickle.loads(data)["model"]
        file.write_bytes(data)
        assert ckptool.verify(file).tensors == len(expected) == 3 * len(KINDS)
        ckptool.convert(file, out, overwrite=True)
        found = torch.load(out)["model"]
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key].dtype is value.dtype and found[key].stride() == value.stride(), key
            assert torch.equal(found[key], value), key
        first, second = (found[f"Float.{name}"].untyped_storage().data_ptr() for name in ("weight", "turned"))
        assert first == second


@pytest.mark.parametrize("values", [["x"], [None], [300], [1 << 70]])
def test_what_is_no_list_of_numbers_stays_a_call(values: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "a.pkl"
    file.write_bytes(pickle.dumps({"w": Tensor(Storage("Byte", values), 0, (1,), (1,))}, 2))
    assert not ckptool.inspect(file).tensors


# Keys that are repeated -----------------------------------------------------------------------------------------------


KEYS: list[Any] = ["a", "b", 0, 1, True, 1.0, (1, "a"), None]
VALUES: list[Any] = [1, 1.0, "x", [1, 2], {"a": [1]}, None, (1,), b"x"]


def part(value: Any) -> bytes:
    return pickle.dumps(value, 2)[2:-1].replace(b"q\0", b"").replace(b"q\1", b"")


def pickled(items: list[tuple[Any, Any]], batches: bool) -> bytes:
    pairs = [part(key) + part(value) for key, value in items]
    if batches:
        return b"\x80\x02}(" + b"".join(pairs) + b"u."
    return b"\x80\x02}" + b"".join(pair + b"s" for pair in pairs) + b"."


def test_the_last_value_counts_as_in_python_and_is_noted_where_they_differ() -> None:
    draw = random.Random(3)
    for case in range(400):
        items = [(draw.choice(KEYS), draw.choice(VALUES)) for _ in range(draw.randrange(7))]
        data = pickled(items, batches=bool(case % 2))
        found = decode(data, no_storage, BUILDERS)
        assert repr(found.root) == repr(pickle.loads(data)), items
        seen: dict[Any, str] = {}
        differs = False
        for key, value in items:
            differs |= seen.get(key, repr(value)) != repr(value)
            seen[key] = repr(value)
        assert [note.code for note in found.notes] == [REPEATED_KEY] * differs


def test_a_value_that_was_replaced_is_still_judged(tmp_path: Path) -> None:
    path = tmp_path / "a.pkl"
    path.write_bytes(b"\x80\x02}(X\1\0\0\0acposix\nsystem\nX\2\0\0\0id\x85RX\1\0\0\0aK\1u.")
    assert "posix.system" in str(ckptool.scan(path).to_dict())
    assert "repeated-key" in {note.code for note in ckptool.inspect(path).notes}


def test_a_file_with_equal_values_is_written_and_one_with_two_is_not(tmp_path: Path) -> None:
    """As dill fills a function's globals twice; with two tensors one would be lost."""
    for same in (True, False):
        stream = io.BytesIO()
        weights = torch.arange(4.0)
        torch.save({"w.weight": weights, "v.weight": weights if same else weights + 1}, stream)
        path, out = tmp_path / f"{same}.pt", tmp_path / f"{same}.safetensors"
        path.write_bytes(_as_one_dictionary(stream.getvalue()))
        loaded = torch.load(path, weights_only=True)
        assert loaded["w.weight"].tolist() == (weights if same else weights + 1).tolist()
        assert ckptool.load(path)["w.weight"].tolist() == loaded["w.weight"].tolist()
        if same:
            ckptool.convert(path, out=out)
            assert out.exists()
        else:
            with pytest.raises(Conflict, match="given twice"):
                ckptool.convert(path, out=out)
            with pytest.raises(Conflict, match="given twice"):
                ckptool.rename(path, ["w.weight => v.weight"], in_place=True)
            assert not out.exists()


def _as_one_dictionary(content: bytes) -> bytes:
    """A file of which the second key is made the first."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info).replace(b"v.weight", b"w.weight"))
    return made.getvalue()
