"""Plain pickles of torch before 0.4, whose storages are lists of numbers: `torch.DoubleStorage([1.0, 2.0])`."""

from __future__ import annotations

import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptool

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
