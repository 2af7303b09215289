"""A strict reader of the tar archives in which torch kept checkpoints before 0.1.10; nothing is ever extracted.

Four plain files, each once, by their names alone; before each there may be a header of attributes (Python's tarfile keeps the time of
change with its fraction there). Links, devices, folders, sparse files and long names are refused.

Source: POSIX.1-2001, pax interchange format; Lib/tarfile.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptool.checkpoint import Data, FileRange
from ckptool.checkpoint.files import Source
from ckptool.errors import Corrupt, Truncated, printable

BLOCK = 512
MAX_ATTRIBUTES = 1 << 16  # bytes of one header of attributes
MAX_HEADERS = 64
_HARMLESS = {"mtime", "atime", "ctime", "uid", "gid", "uname", "gname", "comment", "charset", "hdrcharset", "size"}
_KINDS = {
    "1": "a hard link",
    "2": "a symbolic link",
    "3": "a device",
    "4": "a device",
    "5": "a folder",
    "6": "a pipe",
    "S": "a sparse file",
    "L": "a long name",
    "K": "a long link",
    "g": "a header for all files",
}


@dataclass(frozen=True, slots=True)
class Header:
    """One header of an archive. kind: `0` for a file, `x` for attributes of the next one.  at: where its content begins."""

    name: str
    kind: str
    size: int
    at: int

    @property
    def end(self) -> int:
        """Where the next header begins."""
        return self.at + self.size + -self.size % BLOCK


def is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar"


def names(source: Source) -> list[str]:
    """The last parts of the names in an archive, as far as its headers can be read; to tell what it is."""
    return [path.rpartition("/")[2] for path in paths(source)]


def paths(source: Source) -> list[str]:
    """The names of the files in an archive, as far as its headers can be read."""
    found: list[str] = []
    at = 0
    try:
        while len(found) < MAX_HEADERS and at + BLOCK <= source.size and (header := _header(source, at)) is not None:
            if header.kind == "0":
                found.append(header.name)
            at = header.end
    except (Corrupt, Truncated):
        pass
    return found


def read_members(source: Source, wanted: tuple[str, ...]) -> tuple[dict[str, Data], int]:
    """The contents of the wanted files by name, and where the archive ends.

    Raises `Corrupt` for anything else in it or anything missing, `Truncated` for a cut archive or a bad checksum.
    """
    members: dict[str, Data] = {}
    size: int | None = None  # as the attributes of the next file give it
    at = 0
    for _ in range(MAX_HEADERS):
        if at + BLOCK > source.size:
            raise Truncated(f"{source} ends at byte {source.size:,}, before the end of the archive", _CUT)
        header = _header(source, at)
        if header is None:
            return _complete(source, members, wanted), _end(source, at)
        if header.kind == "x":
            size = _attributes(source, header)
        else:
            if size is not None:
                header = Header(header.name, header.kind, size, header.at)
            _check_member(source, header, members, wanted)
            members[header.name] = FileRange(source, header.at, header.size)
            size = None
        at = header.end
    raise Corrupt(f"{source} has more than {MAX_HEADERS} headers", "torch writes four files.")


_CUT = "The file was cut off, or bytes of it were lost."


def _header(source: Source, at: int) -> Header | None:
    """The header at a byte; None for the zeros behind the last file."""
    block = source.read(at, BLOCK)
    if not block.strip(b"\0"):
        return None
    stored = _number(block[148:156], source, at)
    if stored != sum(block) - sum(block[148:156]) + 8 * 32:
        raise Truncated(f"{source}: the header at byte {at:,} does not match its checksum", _CUT)
    if not is_tar(block):
        raise Corrupt(f"{source}: the header at byte {at:,} is of another kind of archive", "torch writes POSIX tars.")
    name = block[:100].partition(b"\0")[0]
    if block[257:263] == b"ustar\0" and block[345]:
        name = block[345:500].partition(b"\0")[0] + b"/" + name
    kind = block[156:157].decode("latin-1")
    size = _number(block[124:136], source, at)
    return Header(name.decode("latin-1"), "0" if kind == "\0" else kind, size, at + BLOCK)


def _number(field: bytes, source: Source, at: int) -> int:
    """A number in a header: octal digits, or binary where the first bit is set."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    if not digits or digits.strip(b"01234567"):
        raise Corrupt(f"{source}: the header at byte {at:,} holds no number where one should be", _CUT)
    return int(digits, 8)


def _attributes(source: Source, header: Header) -> int | None:
    """What a header of attributes gives as the size of the next file, if it does; raises `Corrupt` for what would change its meaning."""
    where = f"{source}: the attributes at byte {header.at:,}"
    if header.size > MAX_ATTRIBUTES or header.end > source.size:
        raise Corrupt(f"{where} have {header.size:,} bytes", "They hold a time or a name.")
    content, at, size = source.read(header.at, header.size), 0, None
    while at < len(content):
        digits, _, _ = content[at : at + 8].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        key, separator, value = content[at + len(digits) + 1 : at + length - 1].partition(b"=")
        if not separator or at + length > len(content) or content[at + length - 1 : at + length] != b"\n":
            raise Corrupt(f"{where} are no attributes", _CUT)
        if key.decode("latin-1") not in _HARMLESS:
            raise Corrupt(f"{where} set {printable(key.decode('latin-1'))}", "torch writes no such attribute.")
        if key == b"size":
            if not value.isdigit() or len(value) > 19:
                raise Corrupt(f"{where} give no number as the size", _CUT)
            size = int(value)
        at += length
    return size


def _check_member(source: Source, header: Header, members: dict[str, Data], wanted: tuple[str, ...]) -> None:
    shown = f"{source}: {printable(header.name[:120])!r}"
    if header.kind != "0":
        kind = _KINDS.get(header.kind, f"of the kind {printable(header.kind)!r}")
        raise Corrupt(f"{shown} in it is {kind}", "torch writes four plain files. Nothing was extracted.")
    if header.name not in wanted:
        raise Corrupt(f"{shown} is in it, which torch does not write", f"It writes {', '.join(wanted)}.")
    if header.name in members:
        raise Corrupt(f"{shown} is in it twice", "Readers would disagree which is right.")
    if header.at + header.size > source.size:
        what = f"{shown} has {header.size:,} bytes from byte {header.at:,}; the file ends at {source.size:,}"
        raise Truncated(what, _CUT)


def _complete(source: Source, members: dict[str, Data], wanted: tuple[str, ...]) -> dict[str, Data]:
    missing = [name for name in wanted if name not in members]
    if missing:
        raise Corrupt(f"{source} has no {' and no '.join(missing)} in it", f"torch writes {', '.join(wanted)}.")
    return members


def _end(source: Source, at: int) -> int:
    """Where the archive ends that has a block of zeros at `at`: after the second one, and the zeros that fill its last record."""
    if at + 2 * BLOCK > source.size or source.size % BLOCK:
        raise Truncated(f"{source}: its last block is not whole (the file has {source.size:,} bytes)", _CUT)
    if source.read(at + BLOCK, BLOCK).strip(b"\0"):
        raise Corrupt(f"{source} goes on at byte {at + BLOCK:,} after the end of the archive began", _CUT)
    at += 2 * BLOCK
    padding = source.read(at, min(source.size - at, 20 * BLOCK))
    return at + len(padding) - len(padding.lstrip(b"\0"))
