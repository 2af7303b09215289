"""`bundle.json`: how the files of an unbundled bundle belong together, and what of it was no tensor.

    {"schema": "ckptool.bundle/1", "container": "torch-zip",
     "members": [{"name": "generator", "file": "generator.pt"}, {"name": "epoch", "value": 3}, …],
     "ties": [["generator/emb.weight", "discriminator/emb.weight"], …]}

A name is a text or a number, as the bundle's key is. ties: addresses of tensors on one storage, in several members.
ordered: it is an OrderedDict. In records of 0.1.0, `twins` are separate tensors that the bundle stored once: each has
its bytes in its own file, and they stay apart.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ckptool.checkpoint.files import Folder
from ckptool.errors import Corrupt, LimitExceeded, Unsupported, is_text, listed
from ckptool.formats.strict_json import parse_object

NAME = "bundle.json"
SCHEMA = "ckptool.bundle/1"
MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class BundleMember:
    """A member as the record has it: the file that holds it, or (where that is empty) its plain value."""

    name: str | int
    file: str = ""
    value: Any = None
    kind: str = ""


@dataclass(frozen=True, slots=True)
class BundleRecord:
    """The contents of `bundle.json`. container: that of the bundle."""

    container: str
    parts: tuple[BundleMember, ...]
    ties: tuple[tuple[str, ...], ...] = ()
    ordered: bool = False


def text(record: BundleRecord) -> bytes:
    """The file, for people as well as for programs."""
    fields: dict[str, Any] = {"schema": SCHEMA, "container": record.container}
    fields |= {"ordered": True} if record.ordered else {}
    fields["members"] = [_member(part) for part in record.parts]
    fields |= {"ties": record.ties} if record.ties else {}
    made = json.dumps(fields, indent=1, ensure_ascii=False)
    if not is_text(made):
        raise Unsupported(
            "names or values with half a surrogate pair cannot be written to bundle.json", "No program could read it."
        )
    return made.encode() + b"\n"


def _member(part: BundleMember) -> dict[str, Any]:
    if part.file:
        return {"name": part.name, "file": part.file} | ({"kind": part.kind} if part.kind else {})
    return {"name": part.name, "value": part.value}


def read(folder: Folder) -> BundleRecord:
    """The record in a folder. Raises `Corrupt`, `Unsupported` or `LimitExceeded` where it is not one of ours."""
    if NAME not in folder:
        raise Unsupported(
            f"{folder} has no {NAME}",
            "It says which files make up a bundle, and in what order; ckptool unbundle writes it.",
            "Name the members instead: ckptool bundle NAME=FILE … -o OUT",
        )
    source = folder.open(NAME)
    if source.size > MAX_BYTES:
        raise LimitExceeded(f"{source} has {source.size:,} bytes", f"A record of a bundle has at most {MAX_BYTES:,}.")
    fields = parse_object(source.read(0, source.size), str(source))
    schema = fields.get("schema")
    if schema != SCHEMA:
        raise Unsupported(f"{source} is a record of the version {str(schema)[:80]}", f"This version reads {SCHEMA}.")
    try:
        parts = tuple(_part(member) for member in _list(fields["members"]))
        if twice := [name for name, count in Counter(str(part.name) for part in parts).items() if count > 1]:
            raise ValueError(f"it names {listed(twice)} twice")
        ties = tuple(_texts(group) for group in _list(fields.get("ties", [])))
        return BundleRecord(str(fields.get("container")), parts, ties, fields.get("ordered") is True)
    except (KeyError, TypeError, ValueError) as error:
        raise Corrupt(
            f"{source} is damaged: {str(error)[:200] or type(error).__name__}",
            "It is not what ckptool unbundle writes.",
        ) from None


def _part(member: Any) -> BundleMember:
    if type(member) is not dict:
        raise TypeError("a member that is no object")
    name, file = member["name"], member.get("file", "")
    if type(name) not in (str, int) or type(file) is not str or bool(file) == ("value" in member):
        raise ValueError(f"the member {name!r} has no name, or not exactly one of a file and a value")
    return BundleMember(name, file, member.get("value"))


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError("a list was expected")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not all(type(text) is str for text in _list(value)):
        raise TypeError("a list of strings was expected")
    return tuple(value)
