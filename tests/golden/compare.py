"""What differs between two answers: exit codes, error codes, JSON, files. Words of messages are a kind of their own."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.golden.worker import MOMENT

# The file names that printed commands suggest.
SUGGESTED = re.compile(r"(?<![^\s\"'])[^\s\"']+\.(?:fixed|clean|plain|shared)\d*\b[.\w]*")


@dataclass(frozen=True)
class Difference:
    kind: str
    where: str
    old: str
    new: str
    path: str = ""  # in JSON

    @property
    def matters(self) -> bool:
        return self.kind != "words"

    @property
    def group(self) -> tuple[str, str, str]:
        """What it is an example of: differences of one verb in one place."""
        words = self.where.partition(": ")[2].split()
        keys = f"{self.old} {self.new}" if "keys" in self.old else ""
        return self.kind, words[0] if words else "", re.sub(r"\[\d+\]", "[]", self.path) + keys

    def __str__(self) -> str:
        return f"{self.kind:<10} {self.where} {self.path}\n    old: {self.old[:400]}\n    new: {self.new[:400]}"


def answers(where: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[Difference]:
    """What differs between two answers of the worker to one command."""
    for kind, key in (("exit code", "code"), ("error code", "error")):
        if old[key] != new[key]:
            yield Difference(kind, where, str(old[key]), str(new[key]))
    documents = [document(side["out"]) for side in (old, new)]
    if None in documents:
        if old["out"] != new["out"]:
            yield Difference("words" if documents == [None, None] else "json", where, old["out"], new["out"])
    else:
        yield from json_differences(where, *documents)
    for line in sorted({*old["written"]} ^ {*new["written"]}):
        sides = [line if line in side["written"] else "" for side in (old, new)]
        yield Difference("files", where, *sides)
    if normal(old["err"]) != normal(new["err"]):
        yield Difference("words", where, old["err"], new["err"])


def document(text: str) -> Any:
    """What JSON says; "" for nothing, None for what is no JSON."""
    try:
        return json.loads(normal(text)) if text else ""
    except ValueError:
        return None


def normal(text: str) -> str:
    """The text without moments and places, and with one name for every file that a printed command would write."""
    return SUGGESTED.sub("SUGGESTED", MOMENT.sub(b"*", text.encode()).decode())


def json_differences(where: str, old: Any, new: Any, path: str = "") -> Iterator[Difference]:
    """What differs between two JSON values, but for the order of keys. Texts of several words are for people."""
    if old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        if old.keys() != new.keys():
            gone, more = ([name for name in one if name not in other] for one, other in ((old, new), (new, old)))
            yield Difference("json", where, f"keys {gone}", f"keys {more}", path)
        for name in old.keys() & new.keys():
            yield from json_differences(where, old[name], new[name], f"{path}.{name}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from json_differences(where, one, other, f"{path}[{number}]")
    else:
        words = all(isinstance(value, str) and " " in value for value in (old, new))
        yield Difference("words" if words else "json", where, json.dumps(old), json.dumps(new), path)
