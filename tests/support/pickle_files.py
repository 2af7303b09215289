"""What the tests of bare pickles share: values pickled in a protocol, and compared."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PROTOCOLS = range(6)


each = pytest.mark.parametrize("protocol", PROTOCOLS)


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


def same_array(found: Any, expected: Any) -> bool:
    native = expected.astype(expected.dtype.newbyteorder("="))
    return found.dtype == native.dtype and found.shape == native.shape and found.tobytes() == native.tobytes()
