"""What the tests of folders share: plans of small files, and what is in a folder."""

from __future__ import annotations

from pathlib import Path

from ckptool.checkpoint import InlineBytes
from ckptool.checkpoint.plan import Plan

OLD = {"a": b"old a", "b": b"old b"}


NEW = {"a": b"new a", "c": b"new c"}


def plan(files: dict[str, bytes] | None = None) -> Plan:
    return Plan({name: [InlineBytes(data)] for name, data in (files or NEW).items()})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
