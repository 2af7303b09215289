"""`archive`: a zip or tar of several files of torch.save, as stable-baselines3 (`policy.zip`) and NeMo (`.nemo`) write
them.

The tree has each file under its name: those of torch and safetensors as what is in them, JSON and short texts as such;
others are named in a note. They are read in place, and so refused where they are compressed. A zip with a `data.pkl` is
torch's own, or nobody's, and never one of these.

Source: stable_baselines3/common/save_util.py (`save_to_zip_file`), nemo/core/connectors/save_restore_connector.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ckptool.checkpoint import Checkpoint, FileRange, Note
from ckptool.checkpoint.files import Input, Readable, Source
from ckptool.commands import other_program
from ckptool.errors import Ambiguous, CkptoolError, Corrupt, LimitExceeded, Unsupported, counted
from ckptool.formats import HEAD, ZIP, safetensors, torch_legacy, torch_tar, torch_zip
from ckptool.formats.marks import noted
from ckptool.formats.zip import directory
from ckptool.formats.zip.directory import LEADS_ELSEWHERE

NAME = "archive"
OTHERS, PICKLES = "other-records", "embedded-pickles"  # of the notes
MAX_TEXT = MAX_TABLE = 1 << 20
MAX_FOLDERS = 100  # one inside the other
_WEIGHTS = re.compile(r"\.(?:pth|pt|th|ckpt|bin|safetensors)\Z")
_NAMED = re.compile(rb"\.(?:pth|pt|th|ckpt|safetensors|distcp)")
# Archives of other kinds that may hold such files: torch's, TorchServe's, Java's, Office's.
_OF_OTHERS = re.compile(
    rb"data\.pkl|constants\.pkl|archive_format|serialized_exported_program|model\.json|MAR-INF/|META-INF/"
    rb"|\[Content_Types\]|AndroidManifest|model\.weights\.h5|\.data/",
    re.IGNORECASE,
)


def detect(head: bytes, source: Input) -> bool:
    """True for a zip or tar that names files of torch.save, and is none of torch's own; only looks, `read` checks."""
    if not isinstance(source, Source):
        return False
    if torch_tar.is_tar(head):
        names = torch_tar.record_paths(source)
        return any(_NAMED.search(name.encode()) for name in names) and not torch_tar.detect(head, source)
    table = directory.table(source, MAX_TABLE) if head[:4] in ZIP else b""
    return _NAMED.search(table) is not None and _OF_OTHERS.search(table) is None


def read(source: Source) -> Checkpoint:
    """The checkpoint that the files in an archive make up. Reads their tables, no tensor data.

    Raises `Ambiguous` for two files of one name, `Corrupt` for names that lead elsewhere, `LimitExceeded` for folders
    nested more than 100 deep, `Unsupported` for compressed files, and what reading each file raises.
    """
    values: dict[str, Any] = {}
    notes: list[Note] = []
    discarded: list[Any] = []
    names, skipped = set[str](), list[str]()
    pickles = 0
    for full_name, part in _files(source, notes):
        name = full_name.removeprefix("./")
        if name in names:
            raise Ambiguous(f"{source} has two files called {name}", "Some readers take the first, some the last.")
        if not name or re.search(LEADS_ELSEWHERE, name) or "" in name.split("/"):
            raise Corrupt(f"{source}: the name {name[:200]!r} points outside of the folder that it is unpacked to")
        if name.endswith(".distcp"):
            raise Unsupported(f"{source} holds a folder of torch.distributed.checkpoint", fix=_unpack(source))
        names.add(name)
        if _WEIGHTS.search(name):
            head = part.read(0, min(HEAD, part.size))
            try:
                if head[:4] in ZIP:
                    checkpoint = torch_zip.read(part)
                elif torch_legacy.begins_stream(head):
                    stream = FileRange(part.file, part.start, part.size)
                    checkpoint, _ = torch_legacy.read_stream(stream, name=str(part))
                elif name.endswith(safetensors.SUFFIXES):
                    checkpoint = safetensors.read(part)
                else:
                    raise Unsupported(f"{source}: {name} cannot be read inside an archive", fix=_unpack(source))
            except CkptoolError as error:
                raise error.within(f"{source}: {name}") from None
            notes += [Note(note.code, f"{name}: {note.message}") for note in checkpoint.notes]
            discarded += checkpoint.discarded
            values[name] = checkpoint.tree
            continue
        try:
            text = part.read(0, part.size).decode() if part.size <= MAX_TEXT else "\0"
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:  # or larger than the texts of a checkpoint are
            skipped.append(name)
            continue
        values[name] = text
        if name == "data" or name.endswith(".json"):
            with suppress(ValueError, RecursionError):
                values[name] = json.loads(text)
        pickles += text.count('":serialized:"')
    notes += noted(OTHERS, skipped, "file is", "files are", "no checkpoint")
    if pickles:
        what = counted(pickles, "pickle in its text", "pickles in its texts")
        notes.append(Note(PICKLES, f"{what} would run when stable-baselines3 loads it; here they stay text"))
    tree = in_folders(values, f"{source}: ")
    return Checkpoint(tree, NAME, {}, source, notes=tuple(notes), discarded=tuple(discarded))


def in_folders(values: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Values nested by the folders in their names. Raises `Ambiguous` where a folder is a file, too, `LimitExceeded`
    for folders nested more than 100 deep."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *folders, last = name.split("/")
        if len(folders) > MAX_FOLDERS:
            raise LimitExceeded(f"{where}{name[:200]!r} is in {counted(len(folders), 'folder')}")
        node = tree
        for depth, folder in enumerate(folders):
            if "/".join(folders[: depth + 1]) in values:
                raise Ambiguous(f"{where}{folder} is a file and a folder", "Readers take one of them.")
            node = node.setdefault(folder, {})
        node[last] = value
    return tree


def _unpack(source: Source) -> str:
    is_tar = torch_tar.is_tar(source.read(0, min(HEAD, source.size)))
    words = ("tar xkf",) if is_tar else ("unzip -d", f"{source.path}.unpacked")  # neither replaces a file
    return f"Unpack it, and name the file: {other_program(*words, source.path)}"


# The files -----------------------------------------------------------------------------------------------------------


def _files(source: Source, notes: list[Note]) -> Iterator[tuple[str, Readable]]:
    """The files in an archive, by name. Raises `Unsupported` for compressed ones, links and the like."""
    if source.read(0, 2) != b"PK":
        tar = torch_tar.Tar(source)
        for header in tar.headers():
            kind = torch_tar.odd_kind(header)
            if kind is None:
                yield header.name, source.part(header.offset_data, header.size)
            elif not header.isdir():
                raise Unsupported(f"{source}: {header.name[:120]!r} in it is {kind}", fix=_unpack(source))
        if tar.end != source.size:
            raise Ambiguous(f"{source} has {source.size - tar.end:,} bytes after its end")
        return
    archive = directory.read_archive(source)
    notes += archive.notes
    archive.confirm()
    if compressed := next((record for record in archive.records.values() if record.method and record.size), None):
        raise Unsupported(f"{source}: its {compressed} is compressed", "Files are read in place.", _unpack(source))
    for name, record in archive.records.items():
        if not name.endswith("/"):
            yield name, source.part(record.data_at, record.stored)
