"""`safetensors`: a JSON header of names, types, shapes and byte ranges, then the bytes.

Source: https://github.com/huggingface/safetensors#format. Read more strictly than the stock library does (duplicate names are
refused, as two readers could take two different tensors); written so that it and every loader that expects `format: pt` can read it.
The header lists tensors in the order of their keys; the data is sorted by item size, so that every tensor is aligned to it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from ckptool.checkpoint import (
    Checkpoint,
    Crc,
    FileRange,
    Literal,
    Note,
    Plan,
    Segment,
    Storage,
    Summed,
    TensorEntry,
    row_major_strides,
)
from ckptool.dtypes import BY_SAFETENSORS
from ckptool.errors import (
    Ambiguous,
    BadTensor,
    Corrupt,
    LimitExceeded,
    Truncated,
    Unsupported,
    is_text,
    listed,
    printable,
)
from ckptool.files import Input, Source
from ckptool.formats import carried

NAME = "safetensors"
SUFFIXES = (".safetensors", ".sft")
MAX_HEADER = 100_000_000  # the stock library's limit
METADATA = "__metadata__"
MAX_TENSORS = 1_000_000


def detect(head: bytes, source: Input) -> bool:
    return (
        len(head) > 9
        and head[8:9] == b"{"
        and (head[9:10] in b'" }\n\t\r')
        and int.from_bytes(head[:8], "little") < 1 << 40
    )


def read(source: Source) -> Checkpoint:
    """The checkpoint in a safetensors file. Reads the header only.

    Tensors that stock `save_model` left out as tied (`{dropped: kept}` in the metadata) are there again, tied. A file that `convert --all`
    made gives its whole tree back. Raises `Truncated`, `Corrupt`, `Ambiguous`, `BadTensor` or `LimitExceeded`.
    """
    size = int.from_bytes(source.read(0, 8), "little")
    if size > MAX_HEADER:
        raise LimitExceeded(f"{source}: a header of {size:,} bytes", f"safetensors allows {MAX_HEADER:,}.")
    if 8 + size > source.size:
        raise Truncated(
            f"{source} ends inside its header, which has {size:,} bytes",
            "The file was cut off.",
            "Copy or download it again.",
        )
    header = _parse(source, source.read(8, size))
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(type(value) is str for value in metadata.values()):
        raise Corrupt(f"{source}: its metadata is not a list of texts")
    if len(header) > MAX_TENSORS:
        raise LimitExceeded(f"{source}: {len(header):,} tensors")
    tree = _entries(source, header, 8 + size)
    notes: tuple[Note, ...] = ()
    whole_tree = carried.KEY in metadata
    if whole_tree:
        tree = carried.unpack(source, tree, metadata)
        metadata = {key: value for key, value in metadata.items() if key != carried.KEY}
    else:
        ties = {dropped: kept for dropped, kept in metadata.items() if kept in tree and dropped not in tree}
        tree.update({dropped: _alias(tree[kept]) for dropped, kept in ties.items()})
        metadata = {key: value for key, value in metadata.items() if key not in ties}
        if ties:
            notes = (
                Note(
                    "ties-recorded",
                    f"{len(ties):,} names are stored as ties of others: {listed([printable(name) for name in ties], 3)}",
                ),
            )
    return Checkpoint(tree, NAME, metadata, source, notes=notes, tensors_only=not whole_tree)


def _alias(entry: TensorEntry) -> TensorEntry:
    return TensorEntry(entry.storage, entry.dtype, entry.shape, entry.stride)


def _parse(source: Source, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise Ambiguous(
                f"{source}: its header names {printable(_repeated(pairs))} twice", "Readers take one or the other."
            )
        return found

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{source}: its header is not valid JSON ({printable(str(error))[:100]})") from None
    if not isinstance(header, dict):
        raise Corrupt(f"{source}: its header is not a JSON object")
    if b"\\u" in raw and not is_text(json.dumps(header, ensure_ascii=False)):
        raise Corrupt(f"{source}: its header has texts that are not Unicode (half a surrogate pair)")
    return header


def _repeated(pairs: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    return next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _entries(source: Source, header: dict[str, Any], base: int) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    ranges = []
    for name, fields in header.items():
        try:
            dtype, shape, (begin, end) = BY_SAFETENSORS[fields["dtype"]], fields["shape"], fields["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise _bad_fields(source, name, fields) from None
        if dtype.name == "f4_e2m1fn_x2":
            shape = _pairs(source, name, shape)
        if type(shape) is not list or type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
            raise _bad_fields(source, name, fields)
        stride, count = _contiguous(shape)
        if count * dtype.itemsize != end - begin:
            raise BadTensor(f"{source}: {printable(name)} of type {dtype} and shape {shape} has {end - begin:,} bytes")
        storage = Storage(FileRange(source, base + begin, end - begin))
        entries[name] = TensorEntry(storage, dtype, tuple(shape), stride)
        ranges.append((begin, end))
    _check_cover(source, ranges, source.size - base)
    return entries


def _bad_fields(source: Source, name: str, fields: Any) -> Corrupt | Unsupported:
    if isinstance(fields, dict) and isinstance(fields.get("dtype"), str) and fields["dtype"] not in BY_SAFETENSORS:
        return Unsupported(f"{source}: {printable(name)} has the unknown type {printable(fields['dtype'])}")
    return Corrupt(f"{source}: the header's entry for {printable(name)} is damaged")


def _contiguous(shape: list[Any]) -> tuple[tuple[int, ...], int]:
    """Row-major strides, and the number of elements (-1 for sizes that are none)."""
    if any(type(size) is not int or not 0 <= size < 1 << 62 for size in shape):
        return (), -1
    return row_major_strides(tuple(shape)), math.prod(shape)


def _pairs(source: Source, name: str, shape: Any) -> Any:
    """The shape of packed 4-bit values as torch has it, two to an element; the file counts them singly."""
    if type(shape) is not list or not shape or type(shape[-1]) is not int or shape[-1] % 2:
        raise BadTensor(
            f"{source}: {printable(name)} of 4-bit values has the shape {shape}, which is not of whole bytes"
        )
    return [*shape[:-1], shape[-1] // 2]


def _check_cover(source: Source, ranges: Iterable[tuple[int, int]], size: int) -> None:
    at = 0
    for begin, end in sorted(ranges):
        if begin != at:
            raise Corrupt(f"{source}: tensors {'overlap' if begin < at else 'leave a hole'} at byte {at:,} of the data")
        at = end
    if at > size:
        raise Truncated(
            f"{source} ends {at - size:,} bytes before the data that its header promises",
            "The file was cut off.",
            "Copy or download it again.",
        )
    if at < size:
        raise Corrupt(
            f"{source} has {size - at:,} bytes after its last tensor",
            "No tensor owns them; another file may be hidden there.",
        )


# Writing -------------------------------------------------------------------------------------------------------------


def write(checkpoint: Checkpoint, *, keep_unknown: bool = False) -> Plan:
    """The plan of a safetensors file: the tree must be a dictionary of texts to tensors that the format can hold.

    A tree that was read from a file of `convert --all` is carried again.
    Exact ties are stored once and recorded as stock `save_model` does. Raises `Unsupported` naming everything that cannot be kept.
    """
    if checkpoint.container == NAME and not checkpoint.tensors_only:
        checkpoint = carried.pack(checkpoint)  # it was read from a file with a whole tree, and stays one
    tensors = _holdable(checkpoint)
    stored, ties = _without_ties(tensors)
    metadata = {
        key: text for key, text in checkpoint.metadata.items() if checkpoint.container == NAME or key == carried.KEY
    }
    if clash := sorted(set(metadata) & set(ties)):
        raise Unsupported(
            f"the tied tensor {printable(clash[0])} has the name of an entry of the metadata",
            "Both would be recorded in one place.",
        )
    metadata.setdefault("format", "pt")
    metadata.update(ties)
    places, at = {}, 0
    in_order = sorted(stored, key=lambda name: -stored[name].dtype.itemsize)
    for name in in_order:
        places[name] = (at, at + stored[name].nbytes)
        at += stored[name].nbytes
    header = _header(stored, places, metadata)
    segments: list[Segment] = [Literal(header)]
    checks: list[Storage] = []
    for name in in_order:
        _add(stored[name], segments, checks)
    return Plan({"": segments}, checks)


def append(checkpoint: Checkpoint, *, keep_unknown: bool = False) -> None:
    """A safetensors file cannot be edited in place: its header comes first, and has no room to grow."""
    return


def _header(stored: dict[str, TensorEntry], places: dict[str, tuple[int, int]], metadata: dict[str, str]) -> bytes:
    fields: dict[str, Any] = {METADATA: metadata}
    for name, entry in stored.items():
        fields[name] = {"dtype": entry.dtype.safetensors, "shape": _file_shape(entry), "data_offsets": places[name]}
    raw = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    if len(raw) > MAX_HEADER:
        raise Unsupported(f"the header would have {len(raw):,} bytes", f"safetensors allows {MAX_HEADER:,}.")
    return len(raw).to_bytes(8, "little") + raw


def _file_shape(entry: TensorEntry) -> tuple[int, ...]:
    return (*entry.shape[:-1], entry.shape[-1] * 2) if entry.dtype.name == "f4_e2m1fn_x2" else entry.shape


def _add(entry: TensorEntry, segments: list[Segment], checks: list[Storage]) -> None:
    """The tensor's bytes; the stored checksum of what they come from is checked on the way."""
    storage, data = entry.storage, carried.resolved(entry).row_major()
    if data is storage.data and storage.crc is not None:
        segments.append(Summed(data, Crc(expected=storage.crc, name=f"the storage of a {entry!r}")))
        return
    if storage.crc is not None:
        checks.append(storage)
    segments.append(data)


def _holdable(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """The tensors to write, or `Unsupported` with everything that a safetensors file cannot hold."""
    tree = checkpoint.tree
    if not isinstance(tree, dict):
        raise Unsupported(
            "a safetensors file holds a dictionary of tensors, nothing else",
            "",
            "Choose a part: convert FILE#ADDRESS, or keep everything: --all",
        )
    wrong = [f"{printable(str(name))} ({why})" for name, value in tree.items() if (why := _why_not(name, value))]
    if wrong:
        raise Unsupported(
            f"a safetensors file cannot hold {listed(wrong)}",
            "It has names for plain tensors of its own types, and nothing for the rest.",
            "Leave them out: ckptool convert --exclude NAME; or keep everything: convert --all",
        )
    return tree


def _why_not(name: Any, value: Any) -> str:
    if type(name) is not str:
        return f"a {type(name).__name__} as a name"
    if name == METADATA:
        return "a reserved name"
    if not is_text(name):
        return "a name that is not Unicode text"
    if not isinstance(value, TensorEntry):
        return (
            getattr(value, "kind", "") + " tensor"
            if hasattr(value, "kind")
            else f"{type(value).__name__}, not a tensor"
        )
    if value.dtype.name == "f4_e2m1fn_x2" and not value.shape:
        return "packed 4-bit values without a dimension"
    return "" if value.dtype.safetensors else f"type {value.dtype}"


def _without_ties(tensors: dict[str, TensorEntry]) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors to store, and for each other name the one that it is an exact tie of."""
    first: dict[Any, str] = {}
    stored, ties = {}, {}
    for name, entry in tensors.items():
        view = (
            id(entry.storage),
            entry.dtype,
            entry.shape,
            entry.stride,
            entry.offset,
            entry.flags.conj,
            entry.flags.neg,
        )
        kept = first.setdefault(view, name) if entry.nbytes else name
        if kept == name:
            stored[name] = entry
        else:
            ties[name] = kept
    return stored, ties
