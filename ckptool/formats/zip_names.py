"""What the directory of a zip archive calls its records, and takes them for: names and attributes that readers disagree about."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ckptool.checkpoint import Note
from ckptool.checkpoint.commands import FILE, OUT, command
from ckptool.errors import Ambiguous, Corrupt, counted, listed, printable

if TYPE_CHECKING:
    from ckptool.formats.zip_archive import Archive
    from ckptool.formats.zip_records import Record

_FOLDER, _LINK = 0x10, 0xA  # in the external attributes: a bit of DOS at the bottom, a file type of Unix at the top
# What a program that unpacked the archive might follow out of its folder, or take for a folder.
_ELSEWHERE = re.compile(r"(?:^|[/\\])\.\.(?:[/\\]|$)|^/|\\|^[A-Za-z]:", re.MULTILINE)


def check_attributes(archive: Archive, record: Record, attributes: int) -> None:
    """Looks at what a directory entry says of the file that the record was; raises `Ambiguous` for a folder with contents."""
    if attributes >> 28 == _LINK:
        archive.links.append(record)
    if attributes & _FOLDER:
        _check_folder(record)


def _check_folder(record: Record) -> None:
    if record.size:
        raise Ambiguous(
            f"{record.archive.source}: the record {record} is marked as a folder and has contents",
            "torch takes nothing from it, but whatever the memory held before; others read it.",
        )


def check_names(archive: Archive) -> None:
    """Raises `Corrupt` or `Ambiguous` for names that no two readers take alike."""
    if "" in archive.records:
        raise Corrupt(f"{archive.source}: a record has no name")
    together = "\n".join(archive.records) + "\n"
    if "\0" not in together and "/\n" not in together:  # one search, where there are tens of thousands of names
        return
    for name, record in archive.records.items():
        if "\0" in name:
            raise Ambiguous(
                f"{archive.source}: the record name {printable(name)} holds a NUL",
                "torch reads it up to there, others as a whole.",
            )
        if name.endswith("/"):
            _check_folder(record)


def refuse_twins(archive: Archive) -> None:
    """Raises `Ambiguous` for names that are one to a reader without regard to case, as torch is."""
    if len(set(map(str.lower, archive.records))) == len(archive.records):
        return
    folded: dict[str, str] = {}
    for name in archive.records:
        twin = folded.setdefault(name.lower(), name)
        if twin != name:
            raise Ambiguous(
                f"{archive.source} has the records {printable(twin)} and {printable(name)}",
                "torch takes names without regard to case.",
            )


def leads_elsewhere(name: str) -> bool:
    """True for a record name that a program which unpacks archives might follow out of its folder. Nothing here ever does."""
    return _ELSEWHERE.search(name) is not None


def note_odd_entries(archive: Archive) -> None:
    """Notes what is harmless here, where nothing is unpacked, and should be known before another program unpacks the archive."""
    fix = command("convert", FILE, out=OUT)
    if _ELSEWHERE.search("\n".join(archive.records)):
        names = [printable(name) for name in archive.records if leads_elsewhere(name)]
        if names:
            message = (
                f"{counted(len(names), 'record name')} could lead another program out of its folder: {listed(names, 3)}"
            )
            archive.notes.append(Note("unsafe-record-names", message))
    if archive.links:
        message = (
            f"{counted(len(archive.links), 'record is', 'records are')} marked as symbolic links, "
            f"which is ignored: {listed(archive.links, 3)}"
        )
        archive.notes.append(Note("symlink-records", message, fix))
