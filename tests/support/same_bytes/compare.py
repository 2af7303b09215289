"""What differs between two sides: exit codes, error codes, JSON, the files of a folder. Words of messages are a kind of
their own."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What a run of the harness says of the moment and the place: its own name, times, its process.
MOMENT = re.compile(
    rb'\b[0-9a-f]{32}\b|\b\d{4}-\d\d-\d\dT[\d:+]+|(?<=seconds": )[\d.e-]+|\bpid \d+|"argv": \[.*?\]', re.DOTALL
)
# The file names that printed commands suggest.
SUGGESTED = re.compile(r"[^\s\"']+\.(?:fixed|clean|plain|shared)\d*\b[.\w]*")


@dataclass(frozen=True)
class Difference:
    kind: str
    where: str
    old: str
    new: str

    @property
    def matters(self) -> bool:
        return self.kind != "words"

    def __str__(self) -> str:
        return f"{self.kind:<10} {self.where}\n    old: {self.old[:400]}\n    new: {self.new[:400]}"


def answers(where: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[Difference]:
    """What differs between two answers of the worker to one command."""
    for kind, key in (("exit code", "code"), ("error code", "error")):
        if old[key] != new[key]:
            yield Difference(kind, where, str(old[key]), str(new[key]))
    documents = [_document(side["out"]) for side in (old, new)]
    if None in documents:
        if old["out"] != new["out"]:
            yield Difference("words" if documents == [None, None] else "json", where, old["out"], new["out"])
    else:
        yield from json_differences(where, *documents)


def _document(text: str) -> Any:
    try:
        return json.loads(_without_suggested(MOMENT.sub(b"*", text.encode()).decode())) if text else ""
    except ValueError:
        return None


def _without_suggested(text: str) -> str:
    """The text with one name for every file that a printed command would write."""
    return SUGGESTED.sub("SUGGESTED", text)


def json_differences(where: str, old: Any, new: Any) -> Iterator[Difference]:
    """What differs between two JSON values. Texts of several words are for people."""
    if old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        if list(old) != list(new):
            yield Difference("json", where, f"keys {list(old)}", f"keys {list(new)}")
        for name in old.keys() & new.keys():
            yield from json_differences(f"{where} .{name}", old[name], new[name])
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from json_differences(f"{where}[{number}]", one, other)
    else:
        words = all(isinstance(value, str) and " " in value for value in (old, new))
        yield Difference("words" if words else "json", where, json.dumps(old), json.dumps(new))


def folders(where: str, old: Path, new: Path) -> Iterator[Difference]:
    """What differs between two folders: names, kinds, permissions, bytes."""
    sides = [{str(path.relative_to(side)): path for path in side.rglob("*")} for side in (old, new)]
    for name in sorted(sides[0].keys() ^ sides[1].keys()):
        there = ["there" if name in side else "not there" for side in sides]
        yield Difference("files", f"{where}/{name}", *there)
    for name in sorted(sides[0].keys() & sides[1].keys()):
        one, other = sides[0][name], sides[1][name]
        if one.lstat().st_mode != other.lstat().st_mode:
            yield Difference("mode", f"{where}/{name}", oct(one.lstat().st_mode), oct(other.lstat().st_mode))
        elif compared_bytes(one) != compared_bytes(other):
            yield Difference("bytes", f"{where}/{name}", f"{one.stat().st_size} bytes", f"{other.stat().st_size} bytes")


def compared_bytes(path: Path) -> bytes | str:
    if path.is_symlink():
        return os.readlink(path)
    if not path.is_file():
        return ""
    data = path.read_bytes()
    return MOMENT.sub(b"*", data) if path.suffix in (".json", ".jsonl", ".yaml", "") else data
