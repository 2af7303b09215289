"""`safetensors`: the stock library reads what is written, and what it would not write is refused or noticed."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from ckptool.checkpoint import Checkpoint
from ckptool.checkpoint.dtypes import DTYPES
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
from ckptool.formats import read, strict_json
from ckptool.formats import safetensors as ours
from ckptool.formats.safetensors import METADATA
from ckptool.formats.strict_json import parse_object
from fixtures.traps import TRAPS, values
from tests.formats import contract
from tests.support.budget import meets_budget
from tests.support.errors import unreadable
from tests.support.files import carry_out, torch_bytes, written
from tests.support.looped import looped
from tests.support.zips import honest


def converted(tree: Any, folder: Path) -> Path:
    return carry_out(ours.write(read(written(torch_bytes(tree), folder / "a.pt"))), folder / "a.safetensors")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    raw = [
        bytes(t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy())
        for t in (a, b)
    ]
    return a.dtype == b.dtype and a.shape == b.shape and raw[0] == raw[1]


# The law --------------------------------------------------------------------------------------------------------------


@looped("name", TRAPS)
def test_every_trap_is_written_bit_for_bit_or_refused_by_name(name: str, tmp_path: Path) -> None:
    value = TRAPS[name]()
    checkpoint = read(written(torch_bytes(value), tmp_path / "a.pt"))
    error = contract.refusal(lambda: ours.write(checkpoint))
    if error is not None:
        assert error.code == "unsupported"
        return
    contract.round_trip(
        ours, read(carry_out(ours.write(checkpoint), tmp_path / "a.safetensors")), tmp_path / "b.safetensors"
    )
    with safe_open(tmp_path / "a.safetensors", "pt") as stock:
        assert stock.metadata()["format"] == "pt"
        for key, tensor in value.items():
            stored = key if key in stock.keys() else stock.metadata()[key]  # noqa: SIM118 (not a dictionary)
            assert same_bits(stock.get_tensor(stored), tensor), key


@looped("dtype", [d for d in DTYPES if d.safetensors], ids=lambda d: d.name)
def test_what_safetensors_writes_is_read_in_every_dtype(dtype: Any, tmp_path: Path) -> None:
    tensors = {
        "w": values(4, 6, dtype=getattr(torch, dtype.torch)),
        "e": values(0, 2, dtype=getattr(torch, dtype.torch)),
    }
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", {"format": "pt", "note": "é"})
    checkpoint = read(tmp_path / "a.safetensors")
    assert checkpoint.metadata == {"format": "pt", "note": "é"}
    for name, tensor in tensors.items():
        entry = checkpoint.tree[name]
        assert entry.dtype is dtype and entry.shape == tuple(tensor.shape) and entry.stride == tensor.stride()
        assert entry.bytes() == bytes(tensor.reshape(-1).view(torch.uint8).numpy())
    contract.round_trip(ours, checkpoint, tmp_path / "b.safetensors")


def test_a_tensor_that_is_called_as_the_format_is_no_tie(tmp_path: Path) -> None:
    tensors = {"pt": values(3), "w": values(2)}
    safetensors.torch.save_file(tensors, tmp_path / "stock.safetensors", {"format": "pt"})
    for path in (tmp_path / "stock.safetensors", converted(tensors, tmp_path)):
        assert read(path).tree.keys() == safetensors.torch.load_file(path).keys() == tensors.keys()
    tied = {"pt": tensors["pt"], "format": tensors["pt"]}
    with pytest.raises(Unsupported, match="format"):
        converted(tied, tmp_path)


@pytest.mark.parametrize("name", ["\ud800", "a\udfff"])
def test_a_name_that_is_no_text_is_refused(name: str, tmp_path: Path) -> None:
    checkpoint = read(written(torch_bytes({"w": values(2)}), tmp_path / "a.pt"))
    with pytest.raises(Unsupported, match="not Unicode"):
        ours.write(Checkpoint({name: checkpoint.tree["w"]}, "torch-zip"))


def test_odd_names_reach_stock_unchanged(tmp_path: Path) -> None:
    names = ["", "é\n\x1b[31m", "\0", "a/b~", '"', "\\", "😀", " "]
    path = converted({name: values(2) for name in names}, tmp_path)
    with safe_open(path, "pt") as stock:
        assert set(stock.keys()) == set(names)
    assert list(read(path).tree) == names


# Headers that are read many members at once ---------------------------------------------------------------------------


KINDS = {"F32": 4, "BF16": 2, "I64": 8, "BOOL": 1, "F8_E4M3": 1, "F4": 0.5, "C64": 8}


def _header(rng: random.Random, count: int) -> dict[str, Any]:
    """A sound header of `count` tensors."""
    fields: dict[str, Any] = {METADATA: {"format": "pt"}} if rng.random() < 0.7 else {}
    at = 0
    for number in range(count):
        kind = rng.choice(list(KINDS))
        shape = [rng.choice((0, 1, 2, 4)) for _ in range(rng.randrange(4))]
        if kind == "F4":
            shape = [*shape, 4]
        size = KINDS[kind]
        for length in shape:
            size *= length
        fields[f"layer.{number}"] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + int(size)]}
        at += int(size)
    return fields


def _odd(rng: random.Random, fields: dict[str, Any]) -> str:
    """The header as JSON, with one thing in it that is not as writers write it."""
    name = rng.choice([name for name in fields if name != METADATA])
    entry, text = fields[name], json.dumps(fields, separators=rng.choice([(",", ":"), (", ", ": ")]))
    change = rng.randrange(14)
    if change == 0:
        entry["dtype"] = rng.choice(["F99", "f32", 3, None, ["F32"], {"F32": 1}, "F4"])
    elif change == 1:
        entry["shape"] = rng.choice([3, "ab", {"a": 1, "b": 2}, [True], [1.0], [-1], [[1]], [1 << 62], [0] * 65])
    elif change == 2:
        entry["data_offsets"] = rng.choice([[0], [0, 1, 2], "ab", {"a": 0, "b": 4}, [0.0, 4], [True, 4], [4, 0]])
    elif change == 3:
        fields[name] = dict(sorted(entry.items(), key=lambda item: rng.random()))
    elif change == 4:
        entry["extra"] = rng.choice([1, {"a": [1]}, "x" * rng.choice([5, 70_000])])
    elif change == 5:
        del entry[rng.choice(list(entry))]
    elif change == 6:
        fields[name] = rng.choice([[["dtype", "F32"], ["shape", []], ["data_offsets", [0, 4]]], 5, None, "text", []])
    elif change == 7:
        entry["data_offsets"] = [part + rng.choice([-1, 1, 8]) for part in entry["data_offsets"]]
    elif change == 8:
        fields[name + rng.choice(['},"', "},", '"', "\\", "\u00e9", "\ud800"])] = fields.pop(name)
    else:
        cut = rng.choice(['"shape"', "},", '"layer.', "[", "}"])
        at = rng.choice([i for i in range(len(text)) if text.startswith(cut, i)])
        put = {9: f'"{name}":{{}},', 10: "NaN,", 11: '"dtype":"F32",', 12: " \n\t", 13: ","}[change]
        return text[:at] + put + text[at:]
    return json.dumps(fields, separators=rng.choice([(",", ":"), (", ", ": ")]), ensure_ascii=rng.random() < 0.5)


def _judged(path: Path) -> Any:
    try:
        found = read(path)
    except CkptoolError as error:
        return type(error), error.what, error.why
    entries = [
        (name, entry.dtype, entry.shape, entry.stride, entry.storage.data.offset, entry.storage.data.length)
        for name, entry in found.tree.items()
    ]
    return entries, found.metadata, [note.message for note in found.notes]


@looped("seed", range(400), here=100)
def test_a_header_is_judged_as_member_by_member(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    fields = _header(rng, rng.choice([3, 40, 700]))
    length = max((entry["data_offsets"][1] for name, entry in fields.items() if name != METADATA), default=0)
    text = json.dumps(fields, separators=(",", ":")) if seed % 8 == 0 else _odd(rng, fields)
    raw = text.encode("utf-8", "surrogatepass")
    path = written(len(raw).to_bytes(8, "little") + raw + bytes(length), tmp_path / "x.safetensors")
    at_once = _judged(path)
    monkeypatch.setattr(strict_json, "_BATCH", 1 << rng.randrange(5, 15))
    in_small_batches = _judged(path)
    monkeypatch.setattr(strict_json, "_BATCH", 0)
    assert _judged(path) == at_once == in_small_batches
    assert seed % 8 or isinstance(at_once[0], list)


def test_the_name_that_stands_twice_is_said() -> None:
    assert parse_object(b'{"a": 1, "w": {"b": 2}}', "it") == {"a": 1, "w": {"b": 2}}
    for text in (b'{"a": 1, "w": 2, "w": 3}', b'{"x": {"a": 1, "w": 2, "w": 3}}'):
        with pytest.raises(Ambiguous, match="names w twice"):
            parse_object(text, "it")


# Hostile files --------------------------------------------------------------------------------------------------------
# Safetensors files whose header lies, is a bomb, or that are another file as well.


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
