"""What holds for every pickle program: a tree or an error of ours, for plain values Python's own, and the same again
when written."""

from __future__ import annotations

import io
import pickle
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptool.checkpoint import InlineBytes, Storage, StorageRef
from ckptool.checkpoint.dtypes import by_name
from ckptool.errors import CkptoolError, Corrupt
from ckptool.formats.nested_streams import BUILDERS
from ckptool.pickles.decode import Decoded, decode
from ckptool.pickles.encode import encode
from tests.support.looped import examples
from tests.support.pickle_programs import mutations, walks
from tests.support.pickled_graphs import as_tree
from tests.support.processes import soon
from tests.support.same import assert_same_tree

modest = settings(
    max_examples=examples(400),
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


def decoded_program(data: bytes) -> Decoded:
    storages: dict[str, StorageRef] = {}

    def persistent(pid: Any) -> Any:
        if not (type(pid) is tuple and len(pid) == 5 and type(pid[2]) is str):
            raise Corrupt("a persistent id that names no storage")
        return storages.setdefault(pid[2], StorageRef(Storage(InlineBytes(bytes(range(16)))), by_name("f32")))

    return decode(data, persistent, BUILDERS)


def again(decoded: Decoded) -> Any:
    """The tree that is read of what is written of it."""
    refs: dict[str, Storage] = {}

    def key_of(found: Storage) -> str:
        key = next((key for key, known in refs.items() if known is found), str(len(refs)))
        refs[key] = found
        return key

    data = encode(decoded.root, key_of)
    types = {"FloatStorage": "f32", "UntypedStorage": None}

    def persistent(pid: Any) -> StorageRef:
        dtype = types[pid[1].name]
        return StorageRef(refs[pid[2]], by_name(dtype) if dtype else None)

    return decode(data, persistent, BUILDERS).root


@modest
@given(st.one_of(walks(), mutations()))
def test_any_program_gives_a_tree_or_an_error_of_ours_soon(data: bytes) -> None:
    with soon(2):
        try:
            decoded = decoded_program(data)
        except CkptoolError as error:
            assert error.what
        else:
            try:
                found = again(decoded)
            except CkptoolError as error:
                assert error.code in ("conflict", "unsupported", "limit-exceeded", "bad-tensor"), error
            else:
                assert_same_tree(decoded.root, found)


class Restricted(pickle.Unpickler):
    """Python's own machine, with nothing to name."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name}")


@modest
@given(st.one_of(walks(plain=True), mutations()))
def test_plain_values_are_what_python_says(data: bytes) -> None:
    """Where both read a program, they read the same; what only Python reads are the cases that are refused on
    purpose."""
    try:
        expected = Restricted(io.BytesIO(data), encoding="utf-8", errors="strict").load()
    except Exception:  # noqa: BLE001 (Python's own refusals are of many kinds)
        return
    try:
        decoded = decoded_program(data)
    except CkptoolError as error:
        assert error.code in ("conflict", "corrupt", "limit-exceeded", "unsupported"), error
        return
    assert_same_tree(decoded.root, as_tree(expected))
