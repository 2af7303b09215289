"""`bundle.json`: how the files of an unbundled bundle belong together, and what of it was no tensor.

    {"schema": "ckptool.bundle/1", "container": "torch-zip",
     "members": [{"name": "generator", "file": "generator.pt"}, {"name": "epoch", "value": 3}, …]}

A name is a text or a number, as the bundle's key is. ordered: it is an OrderedDict. Records of 0.1.0 may have `ties` or
`twins`, tensors that members shared or that were stored once: each member's file has its bytes, and they stay apart.
"""

from __future__ import annotations

import json
from typing import Any

from ckptool.checkpoint.files import Folder
from ckptool.commands import FILE, OUT, Slot, command
from ckptool.errors import Corrupt, LimitExceeded, Unsupported, is_text
from ckptool.facts import dataclass
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
    """The contents of `bundle.json`. container: that of the bundle.  was_tied: its members shared tensors."""

    container: str
    parts: tuple[BundleMember, ...]
    ordered: bool = False
    was_tied: bool = False


def text(record: BundleRecord) -> bytes:
    """The file, for people as well as for programs."""
    fields: dict[str, Any] = {"schema": SCHEMA, "container": record.container}
    fields |= {"ordered": True} if record.ordered else {}
    fields["members"] = [
        {"name": part.name, "file": part.file} | ({"kind": part.kind} if part.kind else {})
        if part.file
        else {"name": part.name, "value": part.value}
        for part in record.parts
    ]
    content = json.dumps(fields, indent=1, ensure_ascii=False)
    if not is_text(content):
        raise Unsupported("names or values have half a surrogate pair", "No program could read it in bundle.json.")
    return content.encode() + b"\n"


def read(folder: Folder) -> BundleRecord:
    """The record in a folder. Raises `Corrupt`, `Unsupported` or `LimitExceeded` where it is not one of ours."""
    if NAME not in folder:
        fix = f"Name the members instead: {command('bundle', members={Slot('NAME'): FILE}, out=OUT)}"
        raise Unsupported(f"{folder} has no {NAME}, which ckptool unbundle writes", fix=fix)
    source = folder.open(NAME)
    if source.size > MAX_BYTES:
        raise LimitExceeded(f"{source} has {source.size:,} bytes", f"A record of a bundle has at most {MAX_BYTES:,}.")
    fields = parse_object(source.read(0, source.size), str(source))
    if (schema := fields.get("schema")) != SCHEMA:
        raise Unsupported(f"{source} is a record of the version {str(schema)[:80]}", f"This version reads {SCHEMA}.")

    def damaged(problem: str) -> Corrupt:
        return Corrupt(f"{source} is damaged: {problem[:200]}", "It is not what ckptool unbundle writes.")

    members = fields.get("members")
    if type(members) is not list:
        raise damaged("a list of members was expected")
    by_name: dict[str, BundleMember] = {}
    for member in members:
        name, file = (member.get("name"), member.get("file", "")) if type(member) is dict else (None, "")
        if not (type(name) is str or type(name) is int) or type(file) is not str or bool(file) == ("value" in member):
            raise damaged(f"the member {name!r} has no name, or not exactly one of a file and a value")
        if str(name) in by_name:
            raise damaged(f"it names {name} twice")
        by_name[str(name)] = BundleMember(name, file, member.get("value"))
    ordered, was_tied = fields.get("ordered") is True, bool(fields.get("ties"))
    return BundleRecord(str(fields.get("container")), tuple(by_name.values()), ordered, was_tied)
