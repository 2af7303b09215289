"""`npz`: what `numpy.savez` and `savez_compressed` write, a zip of one `.npy` for each name.

Source: numpy/lib/_npyio_impl.py (`_savez`) and Lib/zipfile; the arrays are `npy`'s. Written as `numpy.savez` does,
without compression, with the array of each record aligned in the file. Names may differ in case alone: numpy tells them
apart.
"""

from __future__ import annotations

from typing import Any

from ckptool.checkpoint import Checkpoint, Composite, Data, InlineBytes, TensorEntry
from ckptool.checkpoint.blocks import Plan
from ckptool.checkpoint.files import Input, Source
from ckptool.checkpoint.nodes import Global, Object, with_article
from ckptool.checkpoint.numpy_arrays import code_of
from ckptool.commands import FILE, OUT, OUT_NPZ, Slot, command
from ckptool.errors import Ambiguous, Unsupported, is_text, listed
from ckptool.formats import marks
from ckptool.formats.marks import noted
from ckptool.formats.npy import read_array, spelled
from ckptool.formats.zip import directory, writer
from ckptool.formats.zip.directory import END, LOCAL
from ckptool.formats.zip.writer import ZipLayout
from ckptool.pickles.plain import summary

NAME = "npz"
ENDING = ".npy"
ALIGNMENT = 64
MAX_NAME = 0xFFFF - len(ENDING)


def detect(head: bytes, source: Input) -> bool:
    """True for a zip whose first record is an array, and for one without records, as `numpy.savez()` writes."""
    if head[:4] == b"PK\x05\x06":
        return source.size == END.size
    name_at = LOCAL.size
    if head[:4] != b"PK\x03\x04" or len(head) < name_at or not isinstance(source, Source):
        return False
    size = int.from_bytes(head[26:28], "little")
    end = min(name_at + size, source.size)
    name = head[name_at:end] if end <= len(head) else source.read(name_at, end - name_at)
    return name.endswith(ENDING.encode())


def read(source: Source) -> Checkpoint:
    """The arrays in an `.npz` by their names. Reads the directory and the headers of the arrays, no numbers.

    Arrays of texts and dates are inert objects, as in a pickle; those of Python objects, which are pickles, are left
    out and noted. Raises what `read_archive` and `read_array` raise; `Corrupt` for a record that is no array.
    """
    return of_archive(directory.read_archive(source, case_matters=True))


def of_archive(archive: directory.Archive) -> Checkpoint:
    """The arrays in the records of an archive, as `read` gives them."""
    source = archive.source
    if pickles := [name for name in archive.records if name.rpartition("/")[2] == "data.pkl"]:
        raise Ambiguous(f"{source} holds numpy arrays beside {pickles[0]}")
    tree: dict[str, Any] = {}
    pickled = dict[str, None]()
    mark = archive.records.get(marks.RECOVERED_RECORD)
    metadata = {marks.RECOVERED: mark.contents(marks.MAX_RECORD).decode("utf-8", "replace")} if mark else {}
    for name, record in archive.records.items():
        if record is mark:
            continue
        key = name.removesuffix(ENDING)
        if key in tree or (key != name and key in archive.records):
            raise Ambiguous(f"{source} has the records {key} and {name}")
        tree[key] = read_array(record.data, f"{source}: {record}", record.sum)
        if tree[key] is None:
            pickled[key] = None  # its calls are not known; its checksum tells it from others
            tree[key] = Object(Global("numpy", "load"), (name, record.crc, record.size))
    notes = [*archive.notes]
    others = {name: value for name, value in tree.items() if not isinstance(value, TensorEntry) and name not in pickled}
    shown = (f"{name} ({summary(value)})" for name, value in others.items())
    notes += noted("other-arrays", shown, "entry is", "entries are", "no tensors")
    words = "array of Python objects is", "arrays of Python objects are", "a pickle, not read"
    notes += noted("other-arrays", pickled, *words)
    notes += marks.recovered_notes(metadata)
    return Checkpoint(tree, NAME, metadata, source.file, notes=tuple(notes), tensors_only=True)


# Writing -------------------------------------------------------------------------------------------------------------


def write(checkpoint: Checkpoint, *, keep_unknown: bool = False) -> Plan:
    """The plan of an `.npz` with these tensors, which must be a dictionary of texts to tensors of numpy's own types.

    Ties are written once for each name. Raises `Unsupported` naming everything that cannot be kept.
    """
    tree = checkpoint.tree
    if not isinstance(tree, dict):
        what = "an .npz file holds a dictionary of arrays and nothing else"
        raise Unsupported(what, "", f"Choose a part: {command('convert', FILE / 'ADDRESS', out=OUT_NPZ)}")
    arrays, problems = dict[str, tuple[bytes, Data, int | None]](), list[str]()
    for name, value in tree.items():
        if not (why := _bad_name(name)):
            if isinstance(value, TensorEntry) and (array := spelled(value)) is not None:
                arrays[name] = array
                continue
            why = f"{summary(value)}, not a tensor"
            if isinstance(value, TensorEntry):
                why = f"type {value.dtype}" if code_of(value.dtype) is None else f"shape {list(value.shape)}"
            why = f"{value.kind} tensor" if isinstance(value, Composite) else why
        problems.append(f"{name!s} ({why})")
    if problems:
        why = "It holds arrays of numpy's own dtypes: no bf16, no float8, no packed or quantized values."
        left_out = command("convert", FILE, exclude=Slot("NAME"), out=OUT_NPZ)
        cast = f"Cast the weights first: {command('cast', FILE, dtype='f32', out=OUT)}; or leave them out"
        helps = all(isinstance(tree[name], TensorEntry) and not _bad_name(name) for name in tree.keys() - arrays.keys())
        fix = f"{cast if helps else 'Leave them out'}: {left_out}"
        raise Unsupported(f"an .npz file cannot hold {listed(problems)}", why, fix)
    if not arrays:
        return Plan({"": [InlineBytes(writer.end_records(0, 0, 0)[-END.size :])]})
    layout, checks = ZipLayout(ALIGNMENT), []
    for name, (header, data, crc) in arrays.items():
        layout.add(name + ENDING, data, crc, header)
        storage = tree[name].storage
        if storage.crc is not None and crc is None:
            checks.append(storage)  # of which only a part is written, or in another order
    if mark := checkpoint.metadata.get(marks.RECOVERED):
        layout.add(marks.RECOVERED_RECORD, InlineBytes(mark.encode()))  # numpy gives it as bytes, where it is asked for
    return Plan({"": layout}, checks)


def _bad_name(name: Any) -> str:
    if type(name) is not str:
        return f"{with_article(type(name).__name__)} as a name"
    if not is_text(name) or "\0" in name:
        return "a name that is not Unicode text"
    if name.endswith(ENDING):
        return f"a name that ends with {ENDING}"
    return "a name that is too long" if len(name.encode()) > MAX_NAME else ""
