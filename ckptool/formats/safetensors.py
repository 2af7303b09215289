"""`safetensors`: a JSON header of names, types, shapes and byte ranges, then the bytes.

Source: https://github.com/huggingface/safetensors#format. Read more strictly than the stock library does: duplicate
names are refused, as two readers could take two different tensors, and unknown fields; written so
that it and every loader that expects `format: pt` can read it. The header lists tensors in the order of their keys; the
data is sorted by item size, so that every tensor is aligned to it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from ckptool.checkpoint import (
    Checkpoint,
    Composite,
    Computed,
    FileRange,
    InlineBytes,
    Note,
    Storage,
    TensorEntry,
    row_major_strides,
)
from ckptool.checkpoint.arrays import resolved
from ckptool.checkpoint.blocks import Checksummed, Crc, Plan, Segment
from ckptool.checkpoint.dtypes import BY_SAFETENSORS
from ckptool.checkpoint.files import Input, Readable, Source
from ckptool.checkpoint.nodes import with_article
from ckptool.commands import DIR, FILE, OUT, OUT_PT, OUT_SAFETENSORS, Command, Slot, arg, command, input_of
from ckptool.errors import Ambiguous, BadTensor, Corrupt, LimitExceeded, Truncated, Unsupported, is_text, listed
from ckptool.formats import marks
from ckptool.formats.checksums import checksummed
from ckptool.formats.marks import noted
from ckptool.formats.strict_json import Pairs, members

NAME = "safetensors"
SUFFIXES = (".safetensors", ".sft")
MAX_HEADER = 100_000_000  # the stock library's limit
METADATA = "__metadata__"
MAX_TENSORS = 1_000_000
MAX_RANK = 64
_OTHERS = Command(("-d", DIR), "container='torch-zip'")  # how else a torch file is written
_FIELDS = {"dtype", "shape", "data_offsets"}
_AS_WRITTEN = (tuple, "dtype", "shape", "data_offsets", list)
_WHOLE_BYTES = {name: dtype for name, dtype in BY_SAFETENSORS.items() if dtype.name != "f4_e2m1fn_x2"}


def detect(head: bytes, source: Input) -> bool:
    if not isinstance(source, Source) or len(head) <= 8:
        # Too short to tell; the name may say what it was to be.
        return b"\0" in head and bool(head.strip(b"\0")) and str(source).lower().endswith(SUFFIXES)
    size, start = int.from_bytes(head[:8], "little"), head[8:10]
    if start[:1] == b"{" and start[1:] in b'" }\n\t\r':
        return size < 1 << 40 or b"\0" in head[:8] or not head[:8].isascii()  # else a text, with an object in it
    fits = 0 < size <= min(MAX_HEADER, source.size - 8)
    return fits and (start[:1] in b'{["' or head[8:11] == b"\xef\xbb\xbf")


def read(source: Readable, *, cut: bool = False) -> Checkpoint:
    """The checkpoint in a safetensors file. Reads the header only.

    Tensors that stock `save_model` left out as tied (`{dropped: kept}` in the metadata) are there again, tied. A file
    that `convert --all` made gives its whole tree back. cut: its end may be missing, or more may follow it;
    whoever reads a tensor has to look. Raises `Truncated`, `Corrupt`, `Ambiguous`, `BadTensor` or `LimitExceeded`.
    """
    size = int.from_bytes(source.read(0, 8), "little")
    if size < 2:
        raise Truncated(f"{source}: a header of {size:,} bytes", "It was never written, or the file was damaged.")
    if size > MAX_HEADER:
        raise LimitExceeded(f"{source}: a header of {size:,} bytes", f"safetensors allows {MAX_HEADER:,}.")
    if 8 + size > source.size:
        raise Truncated(f"{source} ends inside its header, which has {size:,} bytes", fix="Copy or download it again.")
    header = _Header(source, size, cut)
    tree, notes = header.entries, list[Note]()
    ties, tied = ties_in(header.metadata, tree), dict[str, TensorEntry]()
    try:
        separate = set(json.loads(header.metadata.pop(marks.DEDUPLICATED, "[]")))
    except (ValueError, TypeError, RecursionError):
        raise Corrupt(f"{source}: its record of deduplicated storages is damaged") from None
    for dropped, kept in ties.items():
        entry = tree[kept]
        storage = entry.storage.alone() if dropped in separate else entry.storage
        tied[dropped] = TensorEntry(storage, entry.dtype, entry.shape, entry.stride)
    metadata = {key: value for key, value in header.metadata.items() if key not in ties}
    discarded, is_whole = (), False
    if (pickle := metadata.pop(marks.PICKLE, None)) is not None:
        from ckptool.formats import whole_tree

        tree, discarded, is_whole = whole_tree.unpack(tree, pickle, str(source), tied)
    elif (record := metadata.pop(marks.OLD_TREE, None)) is not None:
        from ckptool.formats import old_records

        tree, is_whole = old_records.unpack(source.file, tree | tied, record), True
    else:
        tree |= tied
    if not is_whole:
        notes += noted("ties-recorded", ties, "name shares", "names share", "the tensor of another")
    notes += marks.recovered_notes(metadata)
    return Checkpoint(tree, NAME, metadata, source.file, None, tuple(notes), discarded, tensors_only=not is_whole)


def ties_in(metadata: Mapping[str, Any], tensors: Collection[str]) -> dict[str, str]:
    """The names that were left out as ties, each with the one that was kept; `format: pt` says something else."""
    return {
        dropped: kept
        for dropped, kept in metadata.items()
        if type(kept) is str and kept in tensors and dropped not in tensors and (dropped, kept) != ("format", "pt")
    }


class _Header:
    """The header of a file, read member by member.

    entries: its tensors.  metadata: its texts.
    """

    def __init__(self, source: Readable, size: int, cut: bool) -> None:
        self.source, self.base = source, 8 + size
        self.entries: dict[str, TensorEntry] = {}
        self.metadata: dict[str, str] = {}
        self.ranges: list[tuple[int, int]] = []
        seen_metadata = False
        for name, fields in members(source.read(8, size), f"{source}: its header", METADATA, self._take):
            if name in self.entries or (name == METADATA and seen_metadata):
                raise Ambiguous(f"{source}: its header names {name} twice")
            if name == METADATA:
                self.metadata, seen_metadata = fields, True
            else:
                self.entries[name] = self._entry(name, fields)
            if len(self.ranges) > MAX_TENSORS:
                raise LimitExceeded(f"{source}: more than {MAX_TENSORS:,} tensors")
        promised = max((end for _, end in self.ranges), default=0)
        at, available = 0, promised if cut else source.size - self.base
        for begin, end in sorted(self.ranges):
            if begin != at:
                how = "overlap" if begin < at else "leave a hole"
                raise Corrupt(f"{source}: tensors {how} at byte {at:,} of the data")
            at = end
        if at > available:
            count = sum(end <= available for _, end in self.ranges)
            raise Truncated(
                f"{source} ends {at - available:,} bytes short of the data that its header describes",
                f"{Truncated.meaning} Tensors that are inside it: {count:,} of {len(self.ranges):,}. "
                "Copy or download it again if you can.",
                f"Save what is whole: {command('recover', source.file.path, out=OUT)}",
            )
        if at < available:
            raise Corrupt(f"{source} has {available - at:,} bytes after its last tensor")

    def _take(self, pairs: Pairs) -> bool:
        """Adds many entries at once if each is new and as every writer writes it; else none of them."""
        entries: dict[str, TensorEntry] = {}
        ranges: list[tuple[int, int]] = []
        file, base = self.source.file, self.source.start + self.base
        try:
            for name, fields in pairs:
                (first, kind), (second, sizes), (third, (begin, end)) = fields
                if (type(fields), first, second, third, type(sizes)) != _AS_WRITTEN or len(sizes) > MAX_RANK:
                    return False
                dtype, (shape, stride, count) = _WHOLE_BYTES[kind], _layout(*sizes)
                if not (type(begin) is type(end) is int and begin >= 0 and count * dtype.itemsize == end - begin):
                    return False
                ranges.append((begin, end))
                entries[name] = TensorEntry(Storage(FileRange(file, base + begin, end - begin)), dtype, shape, stride)
        except (KeyError, TypeError, ValueError):
            return False
        repeated = len(entries) != len(pairs) or not self.entries.keys().isdisjoint(entries)
        if repeated or METADATA in entries or len(self.ranges) + len(ranges) > MAX_TENSORS:
            return False
        self.entries |= entries
        self.ranges += ranges
        return True

    def _entry(self, name: str, fields: Any) -> TensorEntry:
        source = self.source
        try:
            dtype, shape, (begin, end) = BY_SAFETENSORS[fields["dtype"]], fields["shape"], fields["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise _bad_fields(source, name, fields) from None
        if dtype.name == "f4_e2m1fn_x2":
            # The shape of packed 4-bit values as torch has it, two to an element; the file counts them singly.
            if type(shape) is not list or not shape or type(shape[-1]) is not int or shape[-1] % 2:
                raise BadTensor(f"{source}: {name} of 4-bit values has no whole bytes by its shape {str(shape)[:200]}")
            shape = [*shape[:-1], shape[-1] // 2]
        if type(shape) is not list or type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
            raise _bad_fields(source, name, fields)
        stride, count = _contiguous(shape)
        if count * dtype.itemsize != end - begin:
            shown = f"of type {dtype} and shape [{listed(shape, 8)[:200]}]"
            raise BadTensor(f"{source}: {name} {shown} has {end - begin:,} bytes")
        if len(fields) > 3:
            names = listed([key[:40] for key in sorted(fields.keys() - _FIELDS)], 3)
            what = f"{source}: {name} has fields that the format does not define ({names})"
            raise Unsupported(what, fix="If they mean nothing: safetensors.torch.save_file(load_file(OLD), NEW)")
        self.ranges.append((begin, end))
        storage = Storage(FileRange(source.file, source.start + self.base + begin, end - begin))
        return TensorEntry(storage, dtype, tuple(shape), stride)


def _bad_fields(source: Readable, name: str, fields: Any) -> Corrupt | Unsupported:
    kind = fields.get("dtype") if isinstance(fields, dict) else None
    if isinstance(kind, str) and kind not in BY_SAFETENSORS:
        what = f"{source}: {name} has the unknown dtype {kind[:40]}"
        is_newer = re.fullmatch(r"[A-Z][A-Z0-9_]{0,15}", kind)
        return Unsupported(what, "A newer safetensors may have it.") if is_newer else BadTensor(what)
    return Corrupt(f"{source}: the header's entry for {name} is damaged")


def _contiguous(shape: list[Any]) -> tuple[tuple[int, ...], int]:
    """Row-major strides, and the number of elements (-1 for sizes that are invalid, or too many)."""
    if len(shape) > MAX_RANK or any(type(size) is not int or not 0 <= size < 1 << 62 for size in shape):
        return (), -1
    return row_major_strides(tuple(shape)), math.prod(shape)


@lru_cache(1 << 10, typed=True)
def _layout(*sizes: Any) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """The shape as one object for all tensors that have it, its strides and number of elements."""
    return sizes, *_contiguous(list(sizes))


# Writing -------------------------------------------------------------------------------------------------------------


def write(checkpoint: Checkpoint, *, keep_unknown: bool = False) -> Plan:
    """The plan of a safetensors file: the tree must be a dictionary of texts to tensors that the format can hold.

    What was read from a file with the pickle of its tree is written with one again. Exact ties are stored once and
    recorded as stock `save_model` does. Raises `Unsupported` naming everything that cannot be kept.
    """
    if checkpoint.container == NAME and not checkpoint.tensors_only:
        from ckptool.formats import whole_tree

        checkpoint = whole_tree.pack(checkpoint)
    stored, ties = without_ties(holdable(checkpoint))
    allowed = checkpoint.metadata if checkpoint.container == NAME else (marks.PICKLE, marks.RECOVERED)
    metadata = {key: text for key, text in checkpoint.metadata.items() if key in allowed}
    if checkpoint.container == NAME and getattr(checkpoint.tree, "metadata", None):
        from ckptool.formats import whole_tree

        metadata |= whole_tree.set_on(checkpoint.tree)
    metadata.setdefault("format", "pt")
    if clash := sorted(set(metadata) & set(ties)):
        raise Unsupported(f"the tied tensor {clash[0]} has the name of an entry of the metadata", "Rename it.")
    metadata.update(ties)
    fields: dict[str, Any] = {METADATA: metadata, **dict.fromkeys(stored)}
    segments: list[Segment] = []
    checks: list[Storage] = []
    at = 0
    for name in sorted(stored, key=lambda name: -stored[name].dtype.itemsize):
        entry = stored[name]
        is_packed = entry.dtype.name == "f4_e2m1fn_x2"  # the file counts 4-bit values singly
        shape = (*entry.shape[:-1], entry.shape[-1] * 2) if is_packed else entry.shape
        fields[name] = {"dtype": entry.dtype.safetensors, "shape": shape, "data_offsets": (at, at + entry.nbytes)}
        at += entry.nbytes
        # The stored checksum of what the bytes come from is checked on the way.
        storage, data = entry.storage, resolved(entry).row_major()
        if data is storage.data and storage.crc is not None:
            segments.append(Checksummed(data, Crc(expected=storage.crc, name=f"the storage of {name}")))
            continue
        if storage.crc is not None:
            checks.append(storage)
        if data is storage.data and isinstance(data, Computed) and data.concatenated:
            segments += checksummed(data, Crc())
        else:
            segments.append(data)
    header = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > MAX_HEADER:
        raise Unsupported(f"the header would have {len(header):,} bytes", f"safetensors allows {MAX_HEADER:,}.")
    return Plan({"": [InlineBytes(len(header).to_bytes(8, "little") + header), *segments]}, checks)


def holdable(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """The tensors to write, or `Unsupported` with everything that a safetensors file cannot hold."""
    tree = checkpoint.tree
    if not isinstance(tree, dict):
        choose = f"Choose a part: {command('convert', FILE / 'ADDRESS', out=OUT_SAFETENSORS)}"
        what = "a safetensors file holds a dictionary of tensors and nothing else"
        raise Unsupported(what, "", f"{choose}; or keep everything: {arg(all=True)}")
    reasons = {name: why for name, value in tree.items() if (why := _why_not(name, value))}
    if not reasons:
        return tree
    file = input_of(checkpoint.source)
    if any(isinstance(tree[name], (TensorEntry, Composite)) for name in reasons):
        way = f"Leave them out: {command('convert', file, exclude=Slot('NAME'), out=OUT_SAFETENSORS)}"
    else:  # the weights are an entry
        way = f"Write only the weights, then change those: {command('convert', file, out=OUT_SAFETENSORS)}"
    what = f"a safetensors file cannot hold {listed([f'{name!s} ({why})' for name, why in reasons.items()], 3)}"
    why = "It holds only plain tensors of its own dtypes, under names."
    raise Unsupported(what, why, f"{way}; or keep everything: {arg(out=OUT_PT)}, or {_OTHERS}")


def _why_not(name: Any, value: Any) -> str:
    if type(name) is not str:
        return f"{with_article(type(name).__name__)} as a name"
    if name == METADATA:
        return "a reserved name"
    if not is_text(name):
        return "a name that is not Unicode text"
    if isinstance(value, Composite):
        return f"{value.kind} tensor"
    if not isinstance(value, TensorEntry):
        return f"{type(value).__name__}, not a tensor"
    if value.dtype.name == "f4_e2m1fn_x2" and not value.shape:
        return "packed 4-bit values without a dimension"
    return "" if value.dtype.safetensors else f"type {value.dtype}"


def without_ties(tensors: dict[str, TensorEntry]) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors to store, and for each other name the one that it is an exact tie of."""
    by_view: dict[Any, str] = {}
    stored, ties = {}, {}
    for name, entry in tensors.items():
        kept = by_view.setdefault(entry.view, name) if entry.nbytes else name
        if kept == name:
            stored[name] = entry
        else:
            ties[name] = kept
    return stored, ties
