"""Safetensors files whose header lies, is a bomb, or that are another file as
well."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

from ckptool.checkpoint import Checkpoint
from ckptool.errors import (
    Ambiguous,
    BadTensor,
    CkptoolError,
    Corrupt,
    LimitExceeded,
    NotACheckpoint,
    Truncated,
    Unsupported,
)
from ckptool.formats import read
from tests.support.budget import meets_budget
from tests.support.errors import unreadable
from tests.support.files import written
from tests.support.looped import looped
from tests.support.zip_layouts import honest

W = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
DATA = b"\0\0\x80\x3f"
ONE = json.dumps({"w": W}).encode()
LIMIT = 100_000_000


def made(header: Any, data: bytes = DATA, size: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if size is None else size).to_bytes(8, "little") + raw + data


def one(**fields: Any) -> bytes:
    return made({"w": W | fields})


@pytest.fixture
def put(tmp_path: Path) -> Callable[[bytes], Path]:
    return lambda data: written(data, tmp_path / "a.safetensors")


Put = Callable[[bytes], Path]


def accepted(path: Path, *codes: str) -> Checkpoint:
    checkpoint = read(path)
    assert checkpoint.container == "safetensors" and checkpoint.tree["w"].bytes() == DATA
    assert {note.code for note in checkpoint.notes} == set(codes)
    return checkpoint


def stock_takes(path: Path) -> bool:
    """True if the stock library opens it and reads a tensor called w."""
    try:
        with safe_open(path, "numpy") as file:
            file.get_tensor("w")
    except (SafetensorError, TypeError, ValueError):
        return False
    return True


def test_what_the_rows_start_from_is_read(put: Put) -> None:
    accepted(put(made(ONE)))
    accepted(put(made(ONE + b" \t\r\n")))
    assert stock_takes(put(made(ONE)))


def ranged(length: int, *ranges: tuple[int, int]) -> bytes:
    """Tensors of these bytes, in data of this length."""
    tensors = {
        name: {"dtype": "F32", "shape": [1 if end - begin else 0], "data_offsets": [begin, end]}
        for name, (begin, end) in zip("wv", ranges, strict=True)
    }
    return made(tensors, bytes(length))


DEEP = 100_000
REPEATED = ONE[:-1] + b"," + ONE[1:]
NO_JSON = [
    *b"""{,}|{w:1}|{'w':1}|{"w":}|{"w"}|{"w":1 "v":2}|{"w": NaN}|{"w": Infinity}|{"w": nul}""".split(b"|"),
    *b'{"w": 4}|{"w": []}|{"w": null}|{"w": {}}|{"\\x": 1}|{"\\ud800": 1}|{"w": "\xed\xa0\x80"}|{"a\nb":1}'.split(b"|"),
]
LARGE = (LIMIT + 1, 1 << 32, 1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1)
DEEP_HEADERS = [b'{"w":' + b"[" * DEEP, b'{"w":' + b"[" * 30_000 + b"]" * 30_000 + b"}"]
for name in (b"w", b"__metadata__"):
    DEEP_HEADERS += [b'{"%b":' % name + b"[" * DEEP + b"]" * DEEP + b"}"]
    DEEP_HEADERS += [b'{"%b":' % name + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}"]
REFUSED: dict[tuple[type[CkptoolError], str], list[bytes]] = {
    (Truncated, ""): [
        *(made(ONE)[:size] for size in (2, 3, 4, 5, 6, 7, 8)), *(made(ONE, DATA[:size]) for size in range(4)),
        *(made(ONE, size=size) for size in (0, 1, len(ONE) + 5, 1000, LIMIT))],
    (LimitExceeded, ""): [made(ONE, size=size) for size in LARGE],
    (NotACheckpoint, ""): [b'var x = {"a": 1};'],
    (Corrupt, ""): [
        *(made(header) for header in (*NO_JSON, b'{"w\xff": ' + json.dumps(W).encode() + b"}", b"\xef\xbb\xbf" + ONE,
            b"[" + ONE + b"]", b'"w"' + b" " * 20, b'{"w" ' + ONE[5:], ONE[:-1], ONE + b"x", ONE + b"{}", ONE + b"\0",
            ONE[:-1] + b",}", *DEEP_HEADERS)),
        ranged(4, (0, 4), (0, 4)), ranged(6, (0, 4), (2, 6)), ranged(12, (0, 4), (8, 12)), ranged(12, (4, 8), (8, 12)),
        ranged(8, (0, 4), (1 << 62, (1 << 62) + 4)), ranged(4, (0, 4), (6, 6)),
        *(made({"__metadata__": metadata, "w": W})
          for metadata in ({"a": 1}, {"a": None}, {"a": {"b": "c"}}, {"a": ["b"]}, [], "text", 3, None, True)),
        one(payload="x" * 100_000), one(data_offsets=[False, 4])],
    (Corrupt, "after its last tensor"): [made(ONE, DATA + bytes(more)) for more in (1, 8, 70_000)],
    (Ambiguous, "w twice"): [made(REPEATED), made(ONE[:-1] + b',"\\u0077":' + ONE[5:])],
    (Ambiguous, ""): [
        made(b'{"w": {"dtype": "F32", "dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}'),
        made(b'{"__metadata__": {"a": "1", "a": "2"}}', b""),
        made(b'{"__metadata__": {}, "__metadata__": {"a": "2"}}', b"")],
    (Unsupported, "F6_E2M3"): [one(dtype="F6_E2M3")],
}  # fmt: skip
ALL = [(data, *told) for told, each in REFUSED.items() for data in each]


@looped(("data", "kind", "words"), ALL)
def test_what_lies_is_refused_as_what_it_is(data: bytes, kind: type[CkptoolError], words: str, put: Put) -> None:
    unreadable(put(data), kind, words)


@looped("data", [data for data, kind, _ in ALL if kind is LimitExceeded or len(data) > DEEP])
def test_what_asks_for_much_is_refused_within_the_budget(data: bytes) -> None:
    outcome = meets_budget(data, ".safetensors")
    assert outcome.code in ("limit-exceeded", "corrupt") and outcome.megabytes < 64


def test_the_stock_library_takes_one_of_two_tensors_of_one_name(put: Put) -> None:
    assert stock_takes(put(made(REPEATED)))


NO_SIZES = (-1, 1.0, 1e300, True, "1", None, [], 1 << 64, 10**400, -(10**400))
NO_OFFSETS = ([4, 0], [-4, 0], [0, 4, 4], [0], [], "04", ["0", "4"], [0.0, 4.0], {}, None)


@looped("fields", [*({"shape": [size]} for size in NO_SIZES), *({"data_offsets": each} for each in NO_OFFSETS)])
def test_sizes_and_offsets_that_are_no_natural_numbers_are_corrupt(fields: dict[str, Any], put: Put) -> None:
    path = put(one(**fields))
    assert not stock_takes(path)
    with pytest.raises(Corrupt):
        read(path)


@pytest.mark.parametrize("number", [b"9" * 5000, b"1e999", b"-0", b"1.5", b"9" * 60_000, b"9" * 900_000])
def test_absurd_numbers_in_the_header_are_refused_quickly(number: bytes) -> None:
    for header in (
        b'{"w": {"dtype": "F32", "shape": [' + number + b'], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, ' + number + b"]}}",
        b'{"w": {"dtype": "F32", "shape": [0, ' + number + b'], "data_offsets": [0, 0]}, "v": '
        b'{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}',
    ):
        assert meets_budget(made(header), ".safetensors").code in ("corrupt", "bad-tensor")
    sizes = b",".join([b"2305843009213693952"] * 3000)  # whose product would take minutes
    header = b'{"w":{"dtype":"F32","shape":[' + sizes + b'],"data_offsets":[0,4]}}'
    assert meets_budget(made(header), ".safetensors").code == "bad-tensor"


CONTRADICTIONS: list[dict[str, Any]] = [
    *({"shape": shape} for shape in ([2], [1 << 32, 1 << 32], [1 << 61, 8], [0], [1] * 65)),
    *({"dtype": "F4", "shape": shape} for shape in ([7], [], [8, 3])),
    *({"dtype": dtype} for dtype in ("F64", "banana", "", "f32", "\x1b[31m")),
    {"shape": [], "dtype": "U8"},
]


@looped("fields", CONTRADICTIONS)
def test_a_shape_that_contradicts_its_bytes_is_a_bad_tensor(fields: dict[str, Any], put: Put) -> None:
    path = put(one(**fields))
    assert not stock_takes(path)
    assert "\x1b" not in str(unreadable(path, BadTensor))


def test_a_megabyte_of_metadata_is_read_within_the_budget() -> None:
    many = {f"{n:06}": "x" for n in range(70_000)}
    for metadata in ({"a": "x" * 1_000_000}, {"a": '"' * 499_000}, {"é" * 200_000: "😀" * 140_000}, many):
        raw = json.dumps({"__metadata__": metadata, "w": W}, ensure_ascii=False, separators=(",", ":")).encode()
        outcome = meets_budget(made(raw)[: 1 << 20] if len(raw) < 1_048_000 else made(raw), ".safetensors")
        assert outcome.code == "" and outcome.megabytes < 64


def test_unknown_fields_are_refused_by_name(put: Put) -> None:
    with pytest.raises(Unsupported, match="fields that the format does not define \\(offset, payload\\)"):
        read(put(one(payload="hidden\x1b[31m", offset=7)))
    with pytest.raises(Unsupported) as caught:
        read(put(one(**{f"\x1b{n}" * 20: n for n in range(200)})))
    assert "\x1b" not in caught.value.what and len(caught.value.what) < 600


def tensors_without_elements(count: int) -> bytes:
    entry = b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    return made(b"{" + b",".join([entry % n for n in range(count)]) + b"}", b"")


def test_many_tensors_without_elements_are_read_within_the_budget() -> None:
    assert meets_budget(tensors_without_elements(18_000), ".safetensors").code == ""


@pytest.mark.soak
def test_millions_of_tensors_without_elements_exceed_the_limit(put: Put) -> None:
    path = put(tensors_without_elements(1_700_000))
    outcome = meets_budget(path, seconds=20, megabytes=64 + 2 * 1000)
    assert outcome.code == "limit-exceeded"
    path = put(tensors_without_elements(1_900_000))  # over 100 MB, as ten million would be
    assert meets_budget(path).code == "limit-exceeded"


BOMBS = {"lists": b"[],", "objects": b"{},", "numbers": b"1.5,", "texts": b'"",', "integers": b"1234567,"}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize(
    "before", [b'{"w":[', b'{"w":{"dtype":"F32","shape":[', b'{"__metadata__":{"a":[', b'{"__metadata__":[']
)
def test_a_header_of_many_values_takes_no_more_than_its_size(name: str, before: bytes, put: Put) -> None:
    unit = BOMBS[name]
    for length in (1_000_000, 20_000_000):
        header = before + unit * ((length - len(before)) // len(unit))
        outcome = meets_budget(put(made(header)), megabytes=10 + 4 * length / 1e6)
        assert outcome.code == "corrupt"


# Two files in one ----------------------------------------------------------------------------------------------------


def test_a_zip_archive_behind_the_tensors_is_ambiguous_and_before_them_only_data(put: Put) -> None:
    archive, last = honest().build(), {"dtype": "U8", "shape": [0], "data_offsets": [4, 4]}

    def with_archive_as_data(data: bytes) -> bytes:
        """A valid safetensors file whose last tensor's bytes are an archive."""
        return made({"w": W, "z": last | {"shape": [len(data)], "data_offsets": [4, 4 + len(data)]}}, DATA + data)

    whole = with_archive_as_data(archive)
    assert stock_takes(put(whole)) and "archive/data.pkl" in zipfile.ZipFile(io.BytesIO(whole)).namelist()
    shift = len(whole) - len(archive)
    for data in (
        whole,
        with_archive_as_data(replace(honest(), shift=shift).build()),
        with_archive_as_data(replace(honest(zip64=True), shift=shift).build()),
        made(ONE) + archive,
        made(ONE) + honest(comment=b"x").build(),
    ):
        unreadable(put(data), Ambiguous, "zip archive")
    tensors = {"w": {**W, "data_offsets": [len(archive), len(archive) + 4]}}
    tensors["z"] = {"dtype": "U8", "shape": [len(archive)], "data_offsets": [0, len(archive)]}
    accepted(put(made(tensors, archive + DATA)))
