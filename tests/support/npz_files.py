"""Archives of arrays and bare pickles, as numpy and Python write them, and what numpy reads."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SAVERS = {"stored": np.savez, "deflated": np.savez_compressed}


each_saver = pytest.mark.parametrize("how", SAVERS)


def sample_arrays() -> dict[str, Any]:
    return {
        "w": np.arange(12, dtype="f4").reshape(3, 4), "W": np.ones((2, 3), ">f8"),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "scalar": np.float32(3),
        "empty": np.zeros((0, 3)), "truths": np.array([True, False]), "complex": np.array([1 + 2j], "c8"),
        "layer/0/kernel": np.arange(5, dtype="u2"), "ключ": np.arange(3, dtype="i8"),
        "large": np.arange(100_000, dtype="i8"),
    }  # fmt: skip


def numpy_file(path: Path, how: str = "stored", **contents: Any) -> Path:
    SAVERS[how](path, **contents)
    return path


def numpy_sees(path: Path, **options: Any) -> dict[str, Any]:
    """What numpy itself loads; a warning is an error."""
    with np.load(path, **options) as opened:
        return {name: opened[name] for name in opened.files}


def same_bits(found: Any, expected: Any) -> bool:
    expected = np.asarray(expected)
    native = expected.astype(expected.dtype.newbyteorder("="))
    return found.dtype == native.dtype and found.shape == native.shape and found.tobytes() == native.tobytes()


each = pytest.mark.parametrize("protocol", range(6))


def pickle_to(value: Any, path: Path, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(value, protocol))
    return path


def arrays_model() -> dict[str, np.ndarray[Any, Any]]:
    """Arrays below and above the size from which they stay in the file, of several kinds."""
    rng = np.random.default_rng(0)
    large = rng.integers(0, 256, 300_000, dtype="u1")
    return {
        "small.weight": rng.standard_normal((3, 4), dtype="f4"),
        "large.weight": rng.standard_normal((200, 300)),
        "fortran.weight": np.asfortranarray(rng.standard_normal((200, 300), dtype="f4")),
        "turned.weight": np.arange(50_000, dtype=">i4"),
        "bytes.weight": large,
        "tied.weight": large,
        "zeros.weight": np.zeros(100_000, "f2"),
        "scalar": np.array(1.5),
        "empty": np.zeros((0, 5), "i8"),
        "truths": np.array([True, False]),
        "complex": np.array([1 + 2j]),
    }
